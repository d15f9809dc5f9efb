"""Schedule: which simulated rank runs next, where several could."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

from tpbed.tp.errors import TestbedError


class ScheduleError(TestbedError):
    """A schedule cannot be followed: it names a rank that cannot run, or it has no more choices."""


class Schedule(Protocol):
    """Chooses among the ranks that can run; asked only where there are at least two.

    The rank whose turn it is counts as one of them, unless it has just begun to wait.
    """

    def begin(self) -> None:
        """A run begins: choose as in any first run, so that a world repeats itself exactly."""
        ...

    def choose(self, runnable: Sequence[int], asks: int = -1) -> int:
        """One of `runnable`, which is in ascending order; it is the caller's own list, to be read and not kept.

        asks: the one of them, if any, that has just asked for something and not got it: it may have its turn again, but
            a schedule that always gives it one may never end.
        """
        ...


class RoundRobin:
    """A rank keeps its turn until it must wait, or asks in vain; then the next higher one runs, the lowest at last."""

    def __init__(self) -> None:
        self._last = 0

    def __repr__(self) -> str:
        return "RoundRobin()"

    def begin(self) -> None:
        """Start over with the lowest rank."""
        self._last = 0

    def choose(self, runnable: Sequence[int], asks: int = -1) -> int:
        """The last choice, or the next rank above it."""
        others = runnable if asks < 0 else [rank for rank in runnable if rank != asks]
        place = bisect_left(others, self._last)
        self._last = others[place if place < len(others) else 0]
        return self._last


class Seeded:
    """Any of the runnable ranks with the same chance; the same seed gives the same run, on every machine."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._random = random.Random(seed)

    def __repr__(self) -> str:
        return f"Seeded({self.seed})"

    def begin(self) -> None:
        """Start over from the seed."""
        self._random.seed(self.seed)

    def choose(self, runnable: Sequence[int], asks: int = -1) -> int:
        """One of `runnable`, by the next random number."""
        return runnable[int(self._random.random() * len(runnable))]


class Replayed:
    """The choices of a recorded run (SimulatedWorld.choices), in their order.

    then: chooses when they are used up; without it, they must last for the whole run.
    """

    def __init__(self, choices: Sequence[int], then: Schedule | None = None) -> None:
        self.choices, self.then = tuple(choices), then
        self._taken = 0

    def __repr__(self) -> str:
        then = "" if self.then is None else f", then={self.then!r}"
        return f"Replayed({list(self.choices)}{then})"

    def begin(self) -> None:
        """Start over with the first choice."""
        self._taken = 0
        if self.then is not None:
            self.then.begin()

    def choose(self, runnable: Sequence[int], asks: int = -1) -> int:
        """The next recorded choice.

        Raises ScheduleError if there is none, or if that rank cannot run: the program is not the recorded one.
        """
        if self._taken == len(self.choices):
            return self._go_on(runnable, asks)
        choice = self.choices[self._taken]
        self._taken += 1
        if choice not in runnable:
            raise ScheduleError(
                f"choice {self._taken} of {len(self.choices)} is rank {choice}, but only {list(runnable)} can run: "
                "replay the program that was recorded, with its arguments and world size."
            )
        return choice

    def _go_on(self, runnable: Sequence[int], asks: int) -> int:
        if self.then is not None:
            return self.then.choose(runnable, asks)
        raise ScheduleError(
            f"all {self._taken} recorded choices are taken and ranks {list(runnable)} could still run: "
            "replay the program that was recorded, with its arguments and world size."
        )
