"""explore_schedules: a rank program in; that no schedule of it shows a finding, or the shortest that does, out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from tpbed.harness.diagnose import diagnose
from tpbed.harness.findings import Finding
from tpbed.harness.plan import make_plan
from tpbed.harness.program import rank_program
from tpbed.harness.record import RunRecord
from tpbed.harness.report import explain
from tpbed.harness.scenario import Scenario
from tpbed.harness.schedules import following, tell_schedule
from tpbed.harness.verdict import judge
from tpbed.tp.errors import TestbedError
from tpbed.tp.search import NotRepeatableError, explore
from tpbed.tp.simulated import SimulatedWorld
from tpbed.tp.world import RankProgram, WorldRun

MAX_RUNS = 10_000
PATIENCE = 2
Find = Callable[[WorldRun], tuple[Finding, ...]]
Answer = Literal["free", "found", "undecided"]
EXIT_STATUS: dict[Answer, int] = {"free": 0, "found": 1, "undecided": 3}


class SearchSettingError(TestbedError):
    """A search was asked for that cannot be made."""


def find_in_ledgers(run: WorldRun) -> tuple[Finding, ...]:
    """What any program can show: hangs, mismatches, crashes, decisions that differ."""
    return diagnose(run.ledgers, run.liveness)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """What a search of schedules came to. `schedule`, `findings` and `run`: of the one that shows something, if any."""

    target: str
    world_size: int
    answer: Answer
    runs: int
    sampled: bool = False  # seeded schedules were run, and not all
    orders: int | None = None  # schedules that the runs stand for, if counted
    patience: int = 0  # questions in vain after which a rank was held back, if any was
    why: str = ""  # it is undecided
    schedule: str = ""
    findings: tuple[Finding, ...] = ()
    run: WorldRun | None = None

    def headline(self) -> str:
        """The answer in one line."""
        at = f"at TP={self.world_size}"
        if self.answer == "found":
            if self.sampled:
                return f"schedule {self.schedule} of {self.target} {at} shows a finding ({self._cost()})"
            return f"the shortest schedule of {self.target} {at} that shows a finding: {self.schedule} ({self._cost()})"
        if self.answer == "undecided":
            return f"undecided: {self.why} ({self._cost()})"
        if self.sampled:
            return f"all {self.runs:,} schedules that were drawn {at} are free of hangs and other findings"
        count = f"all {self.orders:,} schedules" if self.orders else "all schedules"
        return f"{count} {at} are free of hangs and other findings ({self._cost()}{self._fairness()})"

    def told(self, again: str) -> str:
        """The answer; and what was found, explained as in any run, with the line that replays it."""
        if self.run is None:
            return self.headline()
        return "\n".join([self.headline(), explain(self.findings, self.run), f"{'again':<10}{again}"])

    def to_json(self, again: str) -> dict[str, Any]:
        """The same as plain values."""
        fields = ("target", "world_size", "answer", "runs", "sampled", "orders", "patience", "why", "schedule")
        plain = {name: getattr(self, name) for name in fields}
        return {"type": "exploration", **plain, "findings": [asdict(one) for one in self.findings], "again": again}

    def _cost(self) -> str:
        runs = f"{self.runs:,} run{'s' * (self.runs != 1)}"
        if self.answer != "free":
            return f"{runs}"
        return f"{runs} stand{'s' * (self.runs == 1)} for them"

    def _fairness(self) -> str:
        if not self.patience:
            return ""
        return f"; a rank that asked {self.patience} times in vain let the others go first"


def explore_schedules(
    program: RankProgram,
    world_size: int,
    *,
    target: str = "the program",
    find: Find = find_in_ledgers,
    max_runs: int = MAX_RUNS,
    patience: int = PATIENCE,
    samples: int | None = None,
) -> Explored:
    """Run `program` under all its schedules, and look for the shortest one under which `find` finds anything.

    max_runs, patience: of tpbed.tp.search.explore. samples: run so many seeded schedules instead, for programs that are
        too large; the first that shows anything is told.
    The answer is undecided if there were more schedules than max_runs, or if the program does not repeat itself.
    Raises SearchSettingError for numbers below 1.
    """
    if min(max_runs, patience, 1 if samples is None else samples) < 1:
        raise SearchSettingError(
            f"max_runs={max_runs}, patience={patience}, samples={samples}: give 1 or more of each."
        )
    if samples is not None:
        return _sample(program, world_size, target, find, samples)
    try:
        found = explore(program, world_size, limit=max_runs, patience=patience, is_bad=lambda run: bool(find(run)))
    except NotRepeatableError as error:
        return Explored(target=target, world_size=world_size, answer="undecided", runs=0, why=str(error))
    runs, orders = found.schedules + found.pruned, found.orders if found.complete else None
    shared: dict[str, Any] = {"target": target, "world_size": world_size, "runs": runs, "orders": orders}
    if found.bad is not None and found.bad_run is not None:
        return _found(find, found.bad_run, schedule=tell_schedule(found.bad), **shared)
    if found.complete:
        return Explored(answer="free", patience=found.patience, **shared)
    why = f"more schedules than {max_runs:,} runs can tell, and none of these shows anything: allow more, or draw some"
    return Explored(answer="undecided", why=why, **shared)


def _found(find: Find, run: WorldRun, **told: Any) -> Explored:
    return Explored(answer="found", findings=find(run), run=run, **told)


def _sample(program: RankProgram, world_size: int, target: str, find: Find, samples: int) -> Explored:
    for seed in range(samples):
        explored = replay(program, world_size, f"seed:{seed}", target=target, find=find)
        if explored.answer == "found":
            return replace(explored, runs=seed + 1)
    return Explored(target=target, world_size=world_size, answer="free", runs=samples, sampled=True)


def replay(
    program: RankProgram, world_size: int, schedule: str, *, target: str = "the program", find: Find = find_in_ledgers
) -> Explored:
    """Run `program` once, under one schedule as harness.schedules reads it."""
    with SimulatedWorld(world_size) as world, following(world, schedule):
        run = world.run(program)
    told: dict[str, Any] = {"target": target, "world_size": world_size, "runs": 1, "sampled": True}
    return _found(find, run, schedule=schedule, **told) if find(run) else Explored(answer="free", **told)


def scenario_program(scenario: Scenario, *, seed: int) -> tuple[RankProgram, Find]:
    """The rank program of a scenario, and what the judgement finds in a run of it, the right answers among it."""
    plan = make_plan(scenario, seed=seed)
    return rank_program(plan), lambda run: judge(RunRecord.of(plan, run, elapsed_s=0.0)).findings
