"""TpMark: what `@pytest.mark.tp(...)` says, checked; loads pytest alone."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

import pytest

WORLDS = ("sim", "gloo", "nccl")
SIGNATURE = "tp(world_size, *, world=None, stall_after_s=10.0, schedules=None, schedule='')"


@dataclass(frozen=True, slots=True, kw_only=True)
class TpMark:
    """The arguments of one mark."""

    world_size: int | Collection[int]
    world: str | None = None  # None: as --tp-world says
    stall_after_s: float = 10.0
    schedules: int | Literal["all"] | None = None  # "all", or how many seeded ones, of simulated ranks
    schedule: str = ""  # the one to follow

    @property
    def sizes(self) -> tuple[int, ...]:
        """The world sizes: one test each."""
        return (self.world_size,) if isinstance(self.world_size, int) else tuple(self.world_size)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_sizes(value: Any) -> bool:
    return _is_size(value) or (isinstance(value, Collection) and len(value) > 0 and all(map(_is_size, value)))


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value) and value > 0


ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {  # by argument: what it can be, and how that is told
    "world_size": (_is_sizes, "a number of ranks, 1 or more, or a list of such numbers"),
    "world": (lambda value: value is None or value in WORLDS, f"one of {', '.join(WORLDS)}"),
    "stall_after_s": (_is_time, "seconds, more than 0"),
    "schedules": (lambda value: value is None or value == "all" or _is_size(value), '"all", or how many seeded ones'),
    "schedule": (lambda value: isinstance(value, str), '"0,1,1,0", "seed:17" or "round-robin"'),
}


def read_mark(node: pytest.Item | Any) -> TpMark | None:
    """The mark of a test or of its definition; None if it has none.

    Fails the test, or its collection, with a line that names file and test if the mark cannot be understood.
    """
    mark = node.get_closest_marker("tp")
    if mark is None:
        return None
    wrong = _wrong(mark)
    if wrong:
        pytest.fail(f"{node.nodeid}: @pytest.mark.tp {wrong}. It takes {SIGNATURE}.", pytrace=False)
    return TpMark(**_named(mark))


def _named(mark: pytest.Mark) -> dict[str, Any]:
    return {**dict(zip(["world_size"], mark.args, strict=False)), **mark.kwargs}


def _wrong(mark: pytest.Mark) -> str:
    """What is wrong with the arguments of a mark; empty if nothing is."""
    if len(mark.args) > 1:
        return f"was given {', '.join(map(repr, mark.args))}: give all but the world size by name"
    if mark.args and "world_size" in mark.kwargs:
        return "was given world_size twice"
    named = _named(mark)
    if "world_size" not in named:
        return "was given no world_size"
    for name, value in named.items():
        if name not in ALLOWED:
            return f"was given {name}={value!r}, which it does not know"
        fits, allowed = ALLOWED[name]
        if not fits(value):
            return f"was given {name}={value!r}: give {allowed}"
    return ""
