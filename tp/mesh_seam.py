"""MeshSeam: device meshes of simulated ranks, each of them its rank's own.

Meshes of equal shape are equal, and DTensor caches by mesh what it has found out; with it, one rank would get the
groups of another, or of a run before. Torch keeps the meshes of threads apart by a thread's number; a rank takes that.
"""

from __future__ import annotations

import itertools
import pkgutil
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from tpbed.tp.simulated_run import SimulatedRun

_numbers = itertools.count()


class Meshes:
    """The device meshes that the ranks of one run have made."""

    def __init__(self, run: SimulatedRun) -> None:
        self._run, self._number = run, next(_numbers)
        self._made: list[Any] = []

    def replacements(self) -> list[tuple[Any, str, Any]]:
        """What to put in the place of what: object, name, new value."""
        return [(DeviceMesh, "__init__", self._owning(DeviceMesh.__init__))]

    def dissolve(self) -> None:
        """Let go of the groups that meshes hold, and of what DTensor has cached about them."""
        for mesh in self._made:
            mesh._pg_registry.clear()
        if self._made and "torch.distributed.tensor" in sys.modules:
            _clear_caches()
        self._made.clear()

    def _owning(self, init: Callable[..., None]) -> Callable[..., None]:
        def own(mesh: Any, *args: Any, **kwargs: Any) -> None:
            init(mesh, *args, **kwargs)
            mesh._thread_id = (self._number, self._run.here(waits=False).index)
            self._made.append(mesh)

        return own


_CACHES = (  # of DTensor, without bounds and by mesh: how each is cleared
    "debug:_clear_sharding_prop_cache",
    "_redistribute:clear_redistribute_planner_cache",
    "_redistribute:_gen_transform_infos.cache_clear",
    "_collective_utils:MeshTopoInfo.build_from_mesh.cache_clear",
)


def _clear_caches() -> None:
    for name in _CACHES:
        with suppress(ImportError, AttributeError):  # which torch has them changes from release to release
            pkgutil.resolve_name(f"torch.distributed.tensor.{name}")()
