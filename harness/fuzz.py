"""fuzz: a search in, the smallest plan that breaks a property out - hypothesis draws and shrinks, batch by batch.

A batch is drawn from the seed and its number alone, so that a search finds the same in any number of processes. Even
batches are of runs in which nothing goes wrong, odd ones of runs with faults, as far as their selectors are known.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import count
from math import inf
from pathlib import Path
from unittest import SkipTest

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.strategies import SearchStrategy

from tpbed.harness.case import Case
from tpbed.harness.coverage import Cell, covered, reachable
from tpbed.harness.plan import Plan, PropertyName
from tpbed.harness.program import rank_program
from tpbed.harness.properties import OF_FAULTED_RUNS, OF_FAULTLESS_RUNS, PROPERTIES, Property, Runner, Simulator
from tpbed.harness.record import RunRecord
from tpbed.harness.scenario import WorldName
from tpbed.harness.selectors import check_selectors
from tpbed.harness.strategies import RIGHT, TOPKS, faulted_plans, plans
from tpbed.harness.worlds import open_world
from tpbed.tp.errors import TestbedError
from tpbed.tp.world import World

BATCH = 100  # examples
SHRINKING_S = 30.0  # of a batch that has found something, before it settles for what it has
WORLD_SIZES = (1, 2, 3, 4, 8)
REMEMBERING = (Phase.reuse, Phase.shrink)
GENERATING = (Phase.generate, Phase.shrink)
BEGUN = "batches.json"  # in the folder of a database


class FuzzError(TestbedError):
    """A search was asked for that cannot be made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What is drawn from. database: the folder of examples to begin with, and to keep; None keeps nothing.

    faults: whether runs with faults are drawn, too; what they come to is known of selectors in strategies.RIGHT alone.
    """

    selectors: tuple[str, ...] = RIGHT
    world_sizes: tuple[int, ...] = WORLD_SIZES
    topks: tuple[str, ...] = TOPKS
    world: WorldName = "sim"
    seed: int = 0
    faults: bool = True
    database: Path | None = None

    def __post_init__(self) -> None:
        if not self.world_sizes or min(self.world_sizes) < 1:
            raise FuzzError(f"world sizes {self.world_sizes}: give numbers of ranks, 1 or more.")
        for name in self.topks:
            if name not in TOPKS:
                raise FuzzError(f"there is no top-k {name!r} to draw: give one of {', '.join(TOPKS)}.")
        check_selectors(self.selectors)

    @property
    def faulted_selectors(self) -> tuple[str, ...]:
        """Those that runs with faults are drawn of."""
        return tuple(name for name in self.selectors if name in RIGHT and self.faults)

    def reachable(self) -> tuple[Cell, ...]:
        """The cells that this search can cover; none where it draws no faults."""
        return reachable(self.faulted_selectors, self.world_sizes, self.world) if self.faulted_selectors else ()

    def folder(self) -> Path | None:
        """Of the database: what is drawn by another search cannot be read here."""
        drawn = repr((self.selectors, self.world_sizes, self.topks, self.world, self.faults))
        return self.database and self.database / sha256(drawn.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A property that does not hold, and the smallest plan that breaks it, which a case replays."""

    name: PropertyName
    plan: Plan
    text: str  # what came

    @property
    def expected(self) -> str:
        """What the property says."""
        return (PROPERTIES[self.name].__doc__ or "").split("\n\n")[0]

    def case(self) -> Case:
        """It passes when the property holds."""
        named = replace(self.plan.scenario, name=f"fuzz/{self.name}", claim=self.expected)
        told = " ".join(self.text.split())
        return Case(
            about=f"{self.name} does not hold: {told}", plan=replace(self.plan, scenario=named, must_hold=self.name)
        )


@dataclass(slots=True, kw_only=True)
class Tally:
    """What batches came to. runs: of ranks, of which an example can take several. kinds: of faults, in cells."""

    examples: int = 0
    runs: int = 0
    busy_s: float = 0.0  # of all processes
    cells: Counter[Cell] = field(default_factory=Counter)
    found: list[Found] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """Sum up; of what was found for a property, the first is kept."""
        self.examples += other.examples
        self.runs += other.runs
        self.busy_s += other.busy_s
        self.cells += other.cells
        known = {one.name for one in self.found}
        self.found += [one for one in other.found if one.name not in known]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The end of a search. batches: the number of the first that was not begun, for who resumes.

    recalled: what is told was found by an earlier search, and is broken still, so that nothing new was drawn.
    """

    search: Search
    tally: Tally
    batches: int
    recalled: bool
    elapsed_s: float

    def empty_cells(self) -> list[Cell]:
        """Those that could have been covered, and were not."""
        return [cell for cell in self.search.reachable() if cell not in self.tally.cells]


class _BrokenError(AssertionError):
    """A property does not hold of a plan."""

    def __init__(self, found: Found) -> None:
        super().__init__(found.text)
        self.found = found


# A class for each, since hypothesis takes errors of a class at a line for the same bug, and shrinks them together.
_BROKEN: dict[str, type[_BrokenError]] = {name: type(f"Broken_{name}", (_BrokenError,), {}) for name in PROPERTIES}


class RealRanks(Simulator):
    """Runs plans on ranks of processes; a world for each size, kept warm until it is closed."""

    def __init__(self, world: WorldName) -> None:
        super().__init__()
        self._kind = world
        self._open: dict[int, World] = {}

    def _run(self, plan: Plan) -> RunRecord:
        self.runs += 1
        size = plan.scenario.world_size
        if size not in self._open:
            self._open[size] = open_world(self._kind, size)
        run = self._open[size].run(rank_program(plan), stall_after_s=plan.scenario.stall_after_s)
        return RunRecord.of(plan, run, elapsed_s=0.0)

    def close(self) -> None:
        """End the ranks."""
        for world in self._open.values():
            world.close()


class _Examiner:
    """Asks of plan after plan whether the properties hold; counts; stops when the time is up.

    Once something is found, plans that were found broken stay so, and others pass when the time to shrink is over.
    """

    def __init__(self, properties: dict[PropertyName, Property], run: Runner, until: float) -> None:
        self.tally = Tally()
        self._properties, self._run, self._until = properties, run, until
        self._known: dict[str, Found] = {}

    def __call__(self, plan: Plan) -> None:
        """Raises _BrokenError for a plan of which a property does not hold."""
        found = self._known.get(repr(plan)) if self._known else None
        if found is None and time.monotonic() < self._until:
            self.tally.examples += 1
            found = next(self._broken(plan), None)
            self.tally.cells.update(covered(self._run(plan)))
        if found is not None:
            if not self._known:
                self._until = time.monotonic() + SHRINKING_S
            self._known[repr(plan)] = found
            raise _BROKEN[found.name](found)

    def _broken(self, plan: Plan) -> Iterator[Found]:
        for name, holds in self._properties.items():
            try:
                yield from (Found(name=name, plan=plan, text=breach.text) for breach in holds(plan, self._run))
            except Exception as error:  # noqa: BLE001 - a judgement that crashes is found, too
                yield Found(name=name, plan=plan, text=f"judging the run failed: {error!r}")


def run_batch(
    search: Search, number: int, *, examples: int = BATCH, until: float = inf, run: Simulator | None = None
) -> Tally:
    """Draw and judge one batch. until: on the monotonic clock, where it stops. run: None for simulated ranks."""
    faulted = number % 2 == 1 and bool(search.faulted_selectors)
    return _examine(search, faulted, search.seed * 1_000_003 + number, GENERATING, examples, until, run)


def recall(search: Search, run: Simulator | None = None) -> Tally:
    """What an earlier search found and the database kept, as far as it is broken still."""
    tally = Tally()
    for faulted in (False, True) if search.faulted_selectors else (False,):
        tally.add(_examine(search, faulted, 0, REMEMBERING, BATCH, inf, run))
    return tally


def _examine(
    search: Search,
    faulted: bool,
    drawn_from: int,
    phases: Sequence[Phase],
    examples: int,
    until: float,
    run: Simulator | None,
) -> Tally:
    began, run = time.monotonic(), run or Simulator()
    before = run.runs
    examiner = _Examiner(OF_FAULTED_RUNS if faulted else OF_FAULTLESS_RUNS, run, until)
    folder = search.folder()
    kept = None if folder is None else DirectoryBasedExampleDatabase(folder / ("faults" if faulted else "plain"))

    @settings(
        max_examples=examples,
        database=kept,
        phases=phases,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @seed(drawn_from)  # below the settings, which it would leave without a database
    @given(plan=_drawn(search, faulted))
    def holds(plan: Plan) -> None:
        examiner(plan)

    tally = examiner.tally
    try:
        holds()
    except SkipTest:  # hypothesis had nothing to remember
        pass
    except (_BrokenError, BaseExceptionGroup) as error:
        tally.found = list(_found_in(error))
    tally.runs, tally.busy_s = run.runs - before, time.monotonic() - began
    return tally


def _drawn(search: Search, faulted: bool) -> SearchStrategy[Plan]:
    if faulted:
        return faulted_plans(search.faulted_selectors, search.world_sizes, search.topks, search.world)
    return plans(search.selectors, search.world_sizes, search.topks)


def _found_in(error: BaseException) -> Iterator[Found]:
    """Several properties may be broken, each by a plan of its own; anything else is a bug of tpbed, and is raised."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _found_in(one)
    elif isinstance(error, _BrokenError):
        yield error.found
    else:
        raise error


OnTally = Callable[[Tally], None]


def fuzz(
    search: Search,
    *,
    seconds: float = inf,
    examples: int | None = None,
    jobs: int = 1,
    first: int = 0,
    on_tally: OnTally = lambda tally: None,
) -> Report:
    """Search until something is found, or for so many seconds or examples.

    jobs: processes, for simulated ranks alone. first: the batch to begin with. on_tally: called with the sum so far.
    Raises FuzzError where there is no bound, or one that allows nothing.
    """
    if examples is None and seconds == inf:
        raise FuzzError("neither seconds nor examples bound the search: give one of them.")
    if not all(bound > 0 for bound in (seconds, jobs, 1 if examples is None else examples)):  # nor is NaN
        raise FuzzError(f"seconds={seconds}, examples={examples}, jobs={jobs}: give more than 0 of each.")
    if jobs > 1 and search.world != "sim":
        raise FuzzError(f"jobs={jobs}: ranks of --world {search.world} are processes already: give --jobs 1.")
    began, total = time.monotonic(), Tally()
    sizes = _sizes(examples, first)
    total.add(recall(search) if search.database else Tally())
    way = _alone if jobs == 1 else _in_processes
    recalled = bool(total.found)
    batches = first if recalled else way(search, sizes, began + seconds, jobs, total, on_tally)
    elapsed_s = time.monotonic() - began
    report = Report(search=search, tally=total, batches=batches, recalled=recalled, elapsed_s=elapsed_s)
    _remember(report)
    return report


def _sizes(examples: int | None, first: int) -> Iterator[tuple[int, int]]:
    """Batch after batch: its number, and how many examples it has."""
    for number in count(first):
        left = BATCH if examples is None else examples - (number - first) * BATCH
        if left <= 0:
            return
        yield number, min(BATCH, left)


def _alone(
    search: Search, sizes: Iterator[tuple[int, int]], until: float, jobs: int, total: Tally, on_tally: OnTally
) -> int:
    """In this process. Both add to total, and return the number of the first batch that was not begun."""
    real = None if search.world == "sim" else RealRanks(search.world)
    number = -1
    try:
        for number, examples in sizes:
            total.add(run_batch(search, number, examples=examples, until=until, run=real))
            on_tally(total)
            if total.found or time.monotonic() >= until:
                break
    finally:
        if real:
            real.close()
    return number + 1


def _in_processes(
    search: Search, sizes: Iterator[tuple[int, int]], until: float, jobs: int, total: Tally, on_tally: OnTally
) -> int:
    """Batches that are begun are finished, so that the first one that finds something is the same with any jobs."""
    begun: dict[Future[Tally], int] = {}
    found: dict[int, list[Found]] = {}
    number = -1
    with ProcessPoolExecutor(
        jobs, multiprocessing.get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        try:
            while True:
                while not found and time.monotonic() < until and len(begun) < jobs and (size := next(sizes, None)):
                    number = size[0]
                    begun[pool.submit(run_batch, search, number, examples=size[1], until=until)] = number
                if not begun:
                    break
                for future in wait(begun, return_when=FIRST_COMPLETED).done:
                    ended, tally = begun.pop(future), future.result()
                    total.add(tally)
                    found |= {ended: tally.found} if tally.found else {}
                on_tally(total)
        finally:
            pool.shutdown(cancel_futures=True)
    total.found = found[min(found)] if found else []
    return number + 1


def resumed(search: Search) -> int:
    """The first batch that earlier searches with this seed have not begun; 0 where none is known."""
    return _begun(search).get(str(search.seed), 0)


def _remember(report: Report) -> None:
    folder = report.search.folder()
    if folder is not None:
        begun = _begun(report.search)
        begun[str(report.search.seed)] = max(report.batches, resumed(report.search))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / BEGUN).write_text(json.dumps(begun) + "\n", encoding="utf-8")


def _begun(search: Search) -> dict[str, int]:
    """The batches of earlier searches, by seed."""
    folder = search.folder()
    if folder is None or not (folder / BEGUN).exists():
        return {}
    try:
        begun: dict[str, int] = json.loads((folder / BEGUN).read_text(encoding="utf-8"))
    except ValueError as wrong:
        raise FuzzError(f"{folder / BEGUN} is not whole ({wrong}): remove it, and begin anew.") from wrong
    return begun
