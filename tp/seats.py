"""Seats: the Ray placement group that holds a place for each rank, packed on few nodes or spread over many."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Literal

import ray
from ray.exceptions import GetTimeoutError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tpbed.tp import ray_cluster
from tpbed.tp.fork_server import START_S
from tpbed.tp.job import Backend
from tpbed.tp.ray_cluster import InitError

Placement = Literal["pack", "spread"]

# What a rank reserves. Ranks over gloo wait most of the time, so many share a processor; but a node that gives Ray no
# processors at all, as a head node may, gets no ranks.
_NEEDS: dict[Backend, dict[str, float]] = {"gloo": {"CPU": 0.01}, "nccl": {"CPU": 0.01, "GPU": 1}}


class Seats:
    """One bundle per rank. If a node is lost, Ray finds its bundles places on other nodes, where there are any."""

    def __init__(self, world_size: int, backend: Backend, placement: Placement) -> None:
        """pack: on as few nodes as can be. spread: over as many, and each on its own if there are nodes enough.

        Raises InitError if Ray has no room for them.
        """
        needs = _NEEDS[backend]
        strict = placement == "spread" and world_size <= ray_cluster.nodes_with(needs)
        self._strategy = "PACK" if placement == "pack" else "STRICT_SPREAD" if strict else "SPREAD"
        self._gpus = int(needs.get("GPU", 0))
        self._group = ray.util.placement_group([dict(needs) for _ in range(world_size)], strategy=self._strategy)
        try:
            ray.get(self._group.ready(), timeout=START_S)
        except GetTimeoutError as error:
            self.close()
            raise InitError(self._no_room(world_size, needs)) from error

    def options(self, number: int) -> dict[str, Any]:
        """What an actor is to be created with, to sit in bundle `number`."""
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
        return {"num_cpus": 0, "num_gpus": self._gpus, "scheduling_strategy": strategy}

    def close(self) -> None:
        """Give the places back; what still sits there is ended."""
        with suppress(Exception):  # Ray may be shut down already
            ray.util.remove_placement_group(self._group)

    def _no_room(self, world_size: int, needs: dict[str, float]) -> str:
        each = ", ".join(f"{amount:g} {name}" for name, amount in needs.items())
        return (
            f"Ray found no room for {world_size} ranks ({each} each, {self._strategy}) within {START_S:.0f} s: "
            "`ray status` says what it has; use a smaller world, or add nodes."
        )
