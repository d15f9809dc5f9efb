"""open_world: a world by its short name, as marks, scenarios and the command line write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from tpbed.tp.errors import TestbedError
from tpbed.tp.world import World

Placement = Literal["pack", "spread"]
Progress = Callable[[str], None]
BACKENDS: dict[str, Literal["gloo", "nccl"]] = {"gloo": "gloo", "nccl": "nccl"}


class UnknownWorldError(TestbedError):
    """A name that no world has."""


def open_world(
    kind: str,
    world_size: int,
    *,
    seed: int | None = None,
    ray_address: str | None = None,
    placement: Placement = "pack",
    stacks: bool = False,
    progress: Progress | None = None,
) -> World:
    """A world of `world_size` ranks: "sim" (this process), "gloo" (Ray actors, CPU) or "nccl" (Ray actors, a GPU each).

    seed: of the order in which simulated ranks take turns; None lets them go round.
    ray_address, placement: of the worlds on Ray: a cluster to join, and whether on few or on many of its nodes.
    stacks: of those, too: read the native stacks of stuck ranks. progress: told what a slow start is at.
    Raises UnknownWorldError for another name; what the world itself raises where it cannot be formed here.
    """
    if kind == "sim":
        from tpbed.tp.schedule import RoundRobin, Seeded
        from tpbed.tp.simulated import SimulatedWorld

        return SimulatedWorld(world_size=world_size, schedule=RoundRobin() if seed is None else Seeded(seed))
    if kind in BACKENDS:
        from tpbed.tp.ray_world import RayWorld  # loads Ray: seconds

        return RayWorld(world_size, BACKENDS[kind], ray_address, progress, placement, stacks)
    raise UnknownWorldError(f"world={kind!r} is none of sim, gloo, nccl: use one of these.")
