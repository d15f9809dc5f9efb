"""Schedules in a word, for marks, scenarios and command lines: `round-robin`, `seed:17`, or choices `0,1,1,0`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tpbed.tp.errors import TestbedError
from tpbed.tp.schedule import Replayed, RoundRobin, Schedule, Seeded
from tpbed.tp.simulated import SimulatedWorld
from tpbed.tp.world import World

ROUND_ROBIN = "round-robin"


class ScheduleTextError(TestbedError):
    """A word that says no schedule, or a world that cannot follow one."""


def read_schedule(text: str) -> Schedule:
    """The schedule that a word says; choices are followed by round-robin where they are used up.

    Raises ScheduleTextError for any other word.
    """
    kind, _, seed = text.partition(":")
    try:
        if kind == "seed":
            return Seeded(int(seed))
        choices = [] if text == ROUND_ROBIN else [int(choice) for choice in text.split(",")]
        return Replayed(choices, then=RoundRobin())
    except ValueError:
        raise ScheduleTextError(
            f"schedule {text!r} is none of {ROUND_ROBIN}, seed:17, or ranks in the order of their turns as 0,1,1,0: "
            "copy it from what `tpbed explore` has found."
        ) from None


def check_schedule(text: str, world_size: int) -> None:
    """Raise ScheduleTextError for a word that says no schedule of so many ranks; an empty one is any world's own."""
    schedule = read_schedule(text) if text else None
    unknown = [choice for choice in getattr(schedule, "choices", ()) if not 0 <= choice < world_size]
    if unknown:
        raise ScheduleTextError(
            f"schedule {text!r} gives a turn to rank {unknown[0]}, and {world_size} ranks are 0 to {world_size - 1}: "
            "replay the program that was explored, with its world size."
        )


def tell_schedule(schedule: Schedule) -> str:
    """The word for one that `read_schedule` can give."""
    if isinstance(schedule, Seeded):
        return f"seed:{schedule.seed}"
    return ",".join(map(str, getattr(schedule, "choices", ()))) or ROUND_ROBIN


@contextmanager
def following(world: World, text: str) -> Iterator[None]:
    """Let a world follow this schedule meanwhile; its own if there is none.

    Raises ScheduleTextError if the world is not simulated.
    """
    if not text:
        yield
        return
    if not isinstance(world, SimulatedWorld):
        raise ScheduleTextError(
            f"a schedule ({text}) needs the simulated world, and this one is {world.name}, where nobody decides who "
            "runs next: choose sim, or leave the schedule out."
        )
    own, world.schedule = world.schedule, read_schedule(text)
    try:
        yield
    finally:
        world.schedule = own
