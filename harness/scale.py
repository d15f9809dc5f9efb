"""Scale: what a simulated world costs by its number of ranks - a start, a small collective, a proved hang, memory."""

from __future__ import annotations

import math
import resource
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter  # by name: ranks that look it up in the module find the simulated clock

import psutil
import torch
import torch.distributed as dist

from tpbed.tp.errors import TestbedError
from tpbed.tp.simulated import SimulatedWorld

CALLS = 8  # collectives that are timed in one run
RUNS = 3  # at least, of each case
FIRST = 8  # ranks from which growth is told: below, a run costs what it costs at any size
UNITS = {"start": "run", "all_reduce": "call", "all_gather": "call", "hang": "run"}  # what a time is of, by case
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13


class ScaleError(TestbedError):
    """A world size that nothing can be compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePoint:
    """What one case costs in a world of so many ranks: real time for each rank, per collective or per run."""

    case: str  # one of UNITS
    world_size: int
    least_us: float  # of the repeats
    median_us: float
    ratio: float  # of least_us to that of the smallest world measured
    peak_mib: float  # resident memory of this process at its highest, above what it was before the first world
    peak_kib_per_rank: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How the least time for each rank grows with the number of ranks."""

    case: str
    from_ranks: int
    to_ranks: int
    factor: float  # from the first to the last
    slope: float  # of a straight line through all of them, both axes logarithmic: 0 where a world's cost is linear

    def __str__(self) -> str:
        told = f"{self.case}: cost per rank grows by x{self.factor:.2f} from {self.from_ranks} to {self.to_ranks} ranks"
        return f"{told} (log-log slope {self.slope:+.2f})"


def sizes_up_to(largest: int) -> tuple[int, ...]:
    """2, 4, 8, ... and `largest` itself.

    Raises ScaleError below 4 ranks.
    """
    if largest < 4:
        raise ScaleError(f"up to {largest} ranks there is nothing to compare: give 4 or more.")
    return (*(2**power for power in range(1, math.ceil(math.log2(largest)))), largest)


def bench_scale(
    sizes: Sequence[int], *, at_least_s: float = 0.3, on_progress: Callable[[str], None] = lambda message: None
) -> Iterator[ScalePoint]:
    """Measure every case at every size, smallest first.

    at_least_s: a case is repeated for so long, and RUNS times at least. on_progress: told what is measured next.
    """
    SimulatedWorld(2).run(_one_sum)  # what is loaded late is loaded now
    before_mib = psutil.Process().memory_info().rss / 2**20
    smallest: dict[str, float] = {}
    for size in sorted(sizes):
        on_progress(f"measuring {size} ranks")
        for case, seconds in _CASES.items():
            times, peak_mib = _measure(partial(seconds, SimulatedWorld(size)), at_least_s)
            least_us = min(times) / size * 1e6
            yield ScalePoint(
                case=case,
                world_size=size,
                least_us=least_us,
                median_us=statistics.median(times) / size * 1e6,
                ratio=least_us / smallest.setdefault(case, least_us),
                peak_mib=max(0.0, peak_mib - before_mib),
                peak_kib_per_rank=max(0.0, peak_mib - before_mib) * 1024 / size,
            )


def growths(points: Sequence[ScalePoint]) -> list[Growth]:
    """One for each case that was measured at two sizes or more, from FIRST ranks on where that leaves two."""
    return [_growth([p for p in points if p.case == case]) for case in dict.fromkeys(p.case for p in points)]


def _growth(points: Sequence[ScalePoint]) -> Growth:
    large = [point for point in points if point.world_size >= FIRST]
    points = large if len(large) > 1 else points
    first, last = points[0], points[-1]
    ranks, costs = [math.log(p.world_size) for p in points], [math.log(p.least_us) for p in points]
    return Growth(
        case=first.case,
        from_ranks=first.world_size,
        to_ranks=last.world_size,
        factor=last.least_us / first.least_us,
        slope=statistics.linear_regression(ranks, costs).slope,
    )


def _measure(seconds: Callable[[], float], at_least_s: float) -> tuple[list[float], float]:
    """The times of all runs, and the memory in MiB that this process held at most meanwhile."""
    with suppress(OSError):  # where it is refused, the peak is that since the process began
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    times: list[float] = []
    ends = perf_counter() + at_least_s
    while len(times) < RUNS or perf_counter() < ends:
        times.append(seconds())
    return times, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _start_s(world: SimulatedWorld) -> float:
    """A run of a program that does nothing."""
    return _run_s(world, lambda rank: None)


def _hang_s(world: SimulatedWorld) -> float:
    """A run in which the last rank raises and the others wait: with the proof, and the end of them all."""
    return _run_s(world, _sum_without_last)


def _run_s(world: SimulatedWorld, program: Callable[[int], None]) -> float:
    began = perf_counter()
    world.run(program)
    return perf_counter() - began


def _call_s(call: Callable[[], None], world: SimulatedWorld) -> float:
    """One collective of all ranks, out of CALLS: from the first rank to leave the one before to the last to leave."""
    left: list[float] = []

    def program(rank: int) -> None:
        for number in range(CALLS + 1):
            call()
            if number in (0, CALLS):
                left.append(perf_counter())

    world.run(program)
    return (left[-1] - left[0]) / CALLS


def _sum() -> None:
    dist.all_reduce(torch.ones(1))


def _gather_ones() -> None:
    _gather(torch.empty(dist.get_world_size()), torch.ones(1))


def _one_sum(rank: int) -> None:
    _sum()


def _sum_without_last(rank: int) -> None:
    if rank == dist.get_world_size() - 1:
        raise RuntimeError("planned")
    _sum()


_CASES: dict[str, Callable[[SimulatedWorld], float]] = {
    "start": _start_s,
    "all_reduce": partial(_call_s, _sum),
    "all_gather": partial(_call_s, _gather_ones),
    "hang": _hang_s,
}
