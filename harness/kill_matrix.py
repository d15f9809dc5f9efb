"""The kill matrix: mutants and drawn examples in; which check kills which mutant, in how many of them, out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cached_property
from multiprocessing import get_context
from random import Random

import torch
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy

from tpbed.harness.diagnosis_kills import DiagnosisProber
from tpbed.harness.faults import Raise, Recast, Strided
from tpbed.harness.kills import INVARIANTS, Matrix, Row, make_row
from tpbed.harness.mutant_diagnoses import DIAGNOSES
from tpbed.harness.mutants import MUTANTS, RIGHT, Mutant, first_line
from tpbed.harness.plan import Plan
from tpbed.harness.properties import PROPERTIES, Runner, Simulator
from tpbed.harness.scenario import Scenario
from tpbed.harness.strategies import faulted_plans, plans, with_faults
from tpbed.harness.verdict import judge

EXAMPLES = 60
BYTES = 2048  # more than any plan is drawn from
FAULTED = 3  # examples with faults for each healthy one, where diagnoses are tried
HEALTHY = plans(selectors=("tpbed",))
DIAGNOSIS = "diagnosis/"  # what names of its mutants begin with
SMALLEST = 2  # ranks, of which none tells whether the other is wrong
THE_DIAGNOSIS = "the diagnosis"
ALL_RIGHT = (*RIGHT, THE_DIAGNOSIS)
NO_ANSWER = frozenset({"hang", "mismatch", "stall", "crash_one", "crash_all"})  # none to compare with another run's


def draw_plans(count: int, seed: int, strategy: SearchStrategy[Plan] = HEALTHY) -> tuple[Plan, ...]:
    """`count` different plans, as a strategy draws them with this seed, each for itself.

    From random bytes, as an outside fuzzer would: what hypothesis draws by itself depends on which modules are loaded.
    """
    drawn: dict[Plan, None] = {}

    @settings(database=None, deadline=None)
    @given(strategy)
    def collect(plan: Plan) -> None:
        drawn[plan] = None

    source = Random(seed)
    while len(drawn) < count:
        collect.hypothesis.fuzz_one_input(source.randbytes(BYTES))  # type: ignore[attr-defined]
    return tuple(drawn)


def find_killers(plan: Plan, run: Runner) -> frozenset[str]:
    """The checks of CHECKS that a plan does not pass: kinds of findings, and invariants that do not hold."""
    kinds = {finding.kind for finding in judge(run(plan)).findings}
    broken = set() if kinds & NO_ANSWER else {name for name in INVARIANTS if PROPERTIES[name](plan, run)}
    return frozenset(kinds | broken)


class SelectorProber:
    """Plants mutants in examples. What is right is tried once for all mutants that stand in its place."""

    def __init__(self, examples: Sequence[Plan], run: Runner) -> None:
        self._examples, self._run = examples, run
        self._right: dict[Plan, frozenset[str]] = {}

    def kills(self, mutant: Mutant) -> Iterator[frozenset[str]]:
        """By example: the checks that it does not pass, and that the right thing in its place passes."""
        for plan in self._examples:
            control = replace(plan, scenario=mutant.control(plan.scenario))
            if control not in self._right:
                self._right[control] = find_killers(control, self._run)
            yield find_killers(planted(plan, mutant), self._run) - self._right[control]

    def false_alarms(self, name: str) -> Iterator[frozenset[str]]:
        """The checks that a selector does not pass which is right, by example that it can serve."""
        right = Mutant(name=name, about="", needs={}, change={"selector": name})
        for plan in self._examples:
            if _serves(name, plan.scenario):
                yield find_killers(planted(plan, right), self._run)


def planted(plan: Plan, mutant: Mutant) -> Plan:
    """The plan with a mutant in it."""
    return replace(plan, scenario=mutant.planted(plan.scenario))


def _serves(name: str, scenario: Scenario) -> bool:
    """A full gather needs equal widths, and calls no top-k, through which single logits are replaced."""
    return name != "full-gather" or (scenario.widths is None and not scenario.overwrites)


def all_mutants() -> dict[str, str]:
    """What is wrong with each mutant, by name: family/name."""
    diagnoses = {f"{DIAGNOSIS}{name}": first_line(diagnosis) for name, diagnosis in DIAGNOSES.items()}
    return {**{name: mutant.about for name, mutant in MUTANTS.items()}, **diagnoses}


class Prober:
    """Tries what is called by name, wrong or right, in the examples of one seed."""

    def __init__(self, examples: int, seed: int) -> None:
        self._count, self._seed = examples, seed

    def kills(self, name: str) -> Iterator[frozenset[str]]:
        """The checks that kill it, by example."""
        if name.startswith(DIAGNOSIS):
            return self._diagnoses.kills(DIAGNOSES[name.removeprefix(DIAGNOSIS)])
        return self._selectors.kills(MUTANTS[name])

    def false_alarms(self, name: str) -> Iterator[frozenset[str]]:
        """The checks that something right does not pass, by example: one of RIGHT, or the diagnosis."""
        return self._diagnoses.false_alarms() if name == THE_DIAGNOSIS else self._selectors.false_alarms(name)

    @cached_property
    def _selectors(self) -> SelectorProber:
        return SelectorProber(draw_plans(self._count, self._seed), Simulator())

    @cached_property
    def _diagnoses(self) -> DiagnosisProber:
        """Runs are made once for all mutants, so there are more of them."""
        faulted = draw_plans(FAULTED * self._count, self._seed, faulted_plans())
        healthy = draw_plans(self._count, self._seed, plans())
        doubly = [struck for plan in healthy if plan.scenario.world_size > SMALLEST for struck in _struck_twice(plan)]
        return DiagnosisProber((*healthy, *faulted, *doubly), Simulator())


def _struck_twice(plan: Plan) -> Iterator[Plan]:
    """Two ranks go wrong in the first collective, each in a way of its own: two findings, which draws seldom have."""
    last = plan.scenario.world_size - 1
    for fault in (Recast(rank=0, seq=1, dtype="int8"), Strided(rank=0, seq=1)):
        yield with_faults(plan, (fault, Raise(rank=last, seq=1)))


def build_matrix(
    names: Sequence[str],
    *,
    examples: int = EXAMPLES,
    seed: int = 0,
    jobs: int = 1,
    on_row: Callable[[Row], None] = lambda row: None,
) -> Matrix:
    """Try all that is right, and the mutants of these names, on the simulated ranks of `jobs` processes.

    seed: of the examples; the same seed and number give the same matrix, whatever the number of jobs.
    on_row: called with each row as it is there, in order.
    """
    rows: list[Row] = []
    for row in _tried([*ALL_RIGHT, *names], examples, seed, jobs):
        rows.append(row)
        on_row(row)
    return Matrix(rows=tuple(rows[len(ALL_RIGHT) :]), controls=tuple(rows[: len(ALL_RIGHT)]))


def _tried(names: Sequence[str], examples: int, seed: int, jobs: int) -> Iterator[Row]:
    if jobs == 1:
        _start(examples, seed)
        yield from map(_try, names)
        return
    workers = ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_start, initargs=(examples, seed))
    with workers:
        yield from workers.map(_try, names)


_prober: Prober | None = None  # of this process


def _start(examples: int, seed: int) -> None:
    global _prober
    torch.set_num_threads(1)
    _prober = Prober(examples, seed)


def _try(name: str) -> Row:
    assert _prober is not None
    if name in ALL_RIGHT:
        return make_row(name, "right", _prober.false_alarms(name))
    return make_row(name, all_mutants()[name], _prober.kills(name))
