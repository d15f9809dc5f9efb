"""explore: run a program under every schedule, as far as schedules make a difference.

Steps that are independent (Touch.meets) commute, so of all schedules that differ only in the order of such steps one is
run: source sets and sleep sets (Abdulla, Aronis, Jonsson, Sagonas: Optimal Dynamic Partial Order Reduction, POPL 2014).

What is covered: every order of turns that SimulatedWorld can give, if ranks talk through torch.distributed alone, and
no rank asks in vain more than `patience` times in a row while another that could go on is kept waiting: is_completed of
collectives that are not complete, or sleep(0) while nothing happens.

What is not: other times than the world's own clock gives, which takes a microsecond for a turn and nothing for
computing, so that a rank is late only if it sleeps; ranks that share Python objects; clocks read to the microsecond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tpbed.tp.errors import TestbedError
from tpbed.tp.orders import count_orders
from tpbed.tp.schedule import Replayed, RoundRobin
from tpbed.tp.searched_run import SearchedRun, Step, Touch
from tpbed.tp.simulated import SimulatedWorld
from tpbed.tp.world import RankProgram, WorldRun

LONGEST = 20_000  # steps of a run that the search follows


class NotRepeatableError(TestbedError):
    """A program did not do the same again under the same schedule, so its schedules cannot be searched."""


class _Cut(Exception):
    """Ends a run that need not go on. `too_long`: or that cannot."""

    def __init__(self, too_long: bool = False) -> None:
        super().__init__()
        self.too_long = too_long


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    """What a search of the schedules of a program found. Only a complete one proves anything of the rest."""

    world_size: int
    schedules: int  # that were run to their end, no two of them equivalent
    pruned: int  # that were begun, and left since they are equivalent to one that was run
    complete: bool  # all were searched; else the limit came first, or a run without an end
    orders: int | None = None  # that those stand for, all told; None if that is not known: see trust_overlap
    patience: int = 0  # what held ranks back that ask in vain; 0 if nothing did
    bad: Replayed | None = None  # the shortest schedule found that is not as it should be
    bad_run: WorldRun | None = None  # what the ranks did under it

    def __str__(self) -> str:
        searched = f"{self.schedules} schedules ({self.pruned} pruned)"
        if self.bad is not None:
            return f"one of {searched} is bad: SimulatedWorld({self.world_size}, {self.bad!r})"
        return f"all {searched} are good" if self.complete else f"{searched} are good, and others were not searched"


def hangs(run: WorldRun) -> bool:
    """Whether ranks of the run are stuck for good."""
    return bool(run.stuck)


def explore(
    program: RankProgram,
    world_size: int = 2,
    *,
    limit: int = 10_000,
    patience: int = 2,
    is_bad: Callable[[WorldRun], bool] = hangs,
    trust_overlap: bool = False,
    reduce: bool = True,
) -> Exploration:
    """Run `program` under every schedule and look for one under which `is_bad` is true of what the ranks did.

    limit: runs. patience: what this module's docstring says of fairness; at least 1.
    trust_overlap: take it that ranks leave the tensors of an asynchronous collective alone until they have waited for
        it. Otherwise every order of ranks is run at each of these, since who comes last moves the data. With it the
        orders that the runs stand for are not counted: who comes last may do more in one turn.
    reduce: False runs equivalent schedules as well, as the tests of the reduction do.
    Raises NotRepeatableError if the program does something else when it is run again.
    Cost: a run for each schedule; the number of schedules grows exponentially with what ranks do at the same time.
    """
    tree, best = _Tree(reduce), _Best(program, world_size, is_bad)
    world = SimulatedWorld(world_size)
    world.make_run = partial(SearchedRun, steer=tree.steer, patience=patience, trust_overlap=trust_overlap)
    while tree.goes_on and tree.schedules + tree.pruned + tree.unended < limit:
        with tree.one_run():
            best.consider(world.run(program), world.choices)
    return Exploration(
        world_size=world_size,
        schedules=tree.schedules,
        pruned=tree.pruned,
        complete=not tree.goes_on and not tree.unended,
        orders=None if trust_overlap else tree.orders,
        patience=patience * tree.held_back,
        bad=best.schedule,
        bad_run=best.run,
    )


class _Best:
    """The shortest bad schedule so far: as few choices as it takes, and round-robin from there on."""

    def __init__(self, program: RankProgram, world_size: int, is_bad: Callable[[WorldRun], bool]) -> None:
        self._program, self._size, self._is_bad = program, world_size, is_bad
        self.schedule: Replayed | None = None
        self.run: WorldRun | None = None

    def consider(self, run: WorldRun, choices: Sequence[int]) -> None:
        """Keep it if it is bad, and shorter than the best."""
        if not self._is_bad(run):
            return
        for length in range(len(choices) if self.schedule is None else len(self.schedule.choices)):
            if self._try(Replayed(choices[:length], then=RoundRobin())):
                return
        if self.schedule is None:
            self.schedule, self.run = Replayed(choices), run

    def _try(self, schedule: Replayed) -> bool:
        run = SimulatedWorld(self._size, schedule).run(self._program)
        if self._is_bad(run):
            self.schedule, self.run = schedule, run
            return True
        return False


@dataclass(slots=True)
class _Node:
    """A place in the tree of schedules, on the path that is being run."""

    options: tuple[int, ...]
    choice: int
    wanted: set[int]  # choices to try
    asleep: dict[int, Touch]  # choices that lead nowhere new, and what their steps touch
    tried: dict[int, Touch] = field(default_factory=dict)

    def next_choice(self) -> int | None:
        left = self.wanted - self.tried.keys() - self.asleep.keys()
        return min(left) if left else None


class _Tree:
    """The tree of schedules, searched depth first."""

    def __init__(self, reduce: bool) -> None:
        self._reduce = reduce
        self._path: list[_Node] = []
        self._run: Any = None
        self.goes_on, self.held_back = True, False
        self.orders: int | None = 0
        self.schedules = self.pruned = self.unended = 0  # runs

    @contextmanager
    def one_run(self) -> Iterator[None]:
        """Count what becomes of a run, and turn back after it."""
        whole = False
        try:
            yield
            self.schedules += 1
            whole = True
        except _Cut as cut:
            self.pruned += not cut.too_long
            self.unended += cut.too_long
        self._turn_back(whole)

    def steer(self, run: SearchedRun, options: Sequence[int]) -> int:
        """The next choice of the run: as on the path, and at its end whatever is awake, as round-robin would."""
        self._run, depth = run, len(run.steps)
        if depth == LONGEST:
            raise _Cut(too_long=True)
        if depth == len(self._path):
            self._path.append(self._grow(run.steps, tuple(options)))
        node = self._path[depth]
        if node.options != tuple(options):
            raise _not_repeatable(depth, f"ranks {list(options)} can run", node)
        return node.choice

    def _grow(self, steps: list[Step], options: tuple[int, ...]) -> _Node:
        asleep = self._still_asleep(steps[-1].touch) if steps and self._reduce else {}
        awake = [rank for rank in options if rank not in asleep]
        if not awake:
            raise _Cut
        last = self._path[-1].choice if self._path else 0
        choice = next((rank for rank in awake if rank >= last), awake[0])
        return _Node(options, choice, {choice} if self._reduce else set(options), asleep)

    def _still_asleep(self, touch: Touch) -> dict[int, Touch]:
        node = self._path[-1]
        before = node.asleep | node.tried
        return {rank: of for rank, of in before.items() if rank != node.choice and not of.meets(touch)}

    def _turn_back(self, whole: bool) -> None:
        """The run is over: go back to the last place where another choice is to be tried."""
        steps, self.held_back, self._run = self._run.steps, self.held_back or self._run.held_back, None
        if len(steps) < len(self._path):
            raise _not_repeatable(len(steps), "the run was over", self._path[len(steps)])
        del steps[len(self._path) :]
        pasts = self._want_reversals(steps) if self._reduce else []
        if whole and self.orders is not None:
            orders = count_orders(pasts) if self._reduce else 1
            self.orders = None if orders is None else self.orders + orders
        while self._path:
            node = self._path[-1]
            node.tried[node.choice] = steps[len(self._path) - 1].touch
            choice = node.next_choice()
            if choice is not None:
                node.choice = choice
                return
            self._path.pop()
        self.goes_on = False

    def _want_reversals(self, steps: Sequence[Step]) -> list[int]:
        """Returns what must come before each step, as bits."""
        pasts: list[int] = []
        for number in range(len(steps)):
            past, races = _past(steps, pasts, number)
            pasts.append(past)
            for other in races:
                self._want(steps, pasts, other, number)
        return pasts

    def _want(self, steps: Sequence[Step], pasts: Sequence[int], first: int, second: int) -> None:
        """Let the later of two steps that race come first, with what it needs, and without what needs the earlier."""
        node = self._path[first]
        free = [k for k in range(first + 1, second) if not pasts[k] >> first & 1] + [second]
        beginners = _beginners(steps, pasts, free)
        if beginners.isdisjoint(node.wanted):
            can = beginners.intersection(node.options)
            node.wanted.update({min(can)} if can else node.options)


def _not_repeatable(depth: int, now: str, node: _Node) -> NotRepeatableError:
    return NotRepeatableError(
        f"after {depth} turns {now}, where ranks {list(node.options)} could run when the same turns were taken before: "
        "let the program keep nothing from one run to the next, and depend on nothing outside."
    )


def _past(steps: Sequence[Step], pasts: Sequence[int], number: int) -> tuple[int, list[int]]:
    """The steps that must come before this one, as bits; and those with which it races, which come right before it."""
    step, past = steps[number], 0
    own = next((k for k in range(number - 1, -1, -1) if steps[k].rank == step.rank), None)
    for k in (*step.follows, *(() if own is None else (own,))):
        past |= pasts[k] | 1 << k
    races, all_before = [], (1 << number) - 1
    for k in range(number - 1, -1, -1):
        if past == all_before:
            break
        if not past >> k & 1 and steps[k].touch.meets(step.touch):
            past |= pasts[k] | 1 << k
            races.append(k)
    return past, races


def _beginners(steps: Sequence[Step], pasts: Sequence[int], free: Sequence[int]) -> set[int]:
    """The ranks that can begin, of those that take these steps."""
    among, found, seen = sum(1 << k for k in free), set(), set()
    for k in free:
        if steps[k].rank not in seen and not pasts[k] & among:
            found.add(steps[k].rank)
        seen.add(steps[k].rank)
    return found
