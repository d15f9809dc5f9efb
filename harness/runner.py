"""run_plans: plans in, verdicts out - opens the worlds that they need, keeps them warm, and closes them."""

from __future__ import annotations

import os
import shutil
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import torch

from tpbed.harness.plan import Plan, make_plan
from tpbed.harness.program import rank_program
from tpbed.harness.properties import judge_property
from tpbed.harness.record import RunRecord, save_record
from tpbed.harness.report import WORLD_OPTIONS, render
from tpbed.harness.scenario import Scenario, WorldName
from tpbed.harness.schedules import following
from tpbed.harness.smollm2 import missing_checkpoint
from tpbed.harness.verdict import Status, Verdict, judge
from tpbed.harness.worlds import Placement, Progress, open_world
from tpbed.tp.ledger import Ledger
from tpbed.tp.schedule import ScheduleError
from tpbed.tp.simulated import SimulatedWorld
from tpbed.tp.world import Liveness, World, WorldRun

WorldChoice = Literal["auto", "sim", "gloo", "nccl"]
Opener = Callable[[int], World]  # world_size in, a world that is ready for runs out
WORLD_NAMES = {option: name for name, option in WORLD_OPTIONS.items()}  # what a world calls itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One scenario that was run."""

    verdict: Verdict
    evidence: Path | None = None  # its record.json, where it was saved


@dataclass(frozen=True, slots=True, kw_only=True)
class NotRun:
    """One scenario that was selected and not run: it counts as nothing, and never as a pass."""

    scenario: Scenario
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The world that scenarios run in, and why it is this one."""

    world: WorldName
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What became of every selected scenario. troubles: what went wrong in the test bed outside any scenario."""

    runs: tuple[Run, ...]
    not_run: tuple[NotRun, ...]
    troubles: tuple[str, ...] = ()
    interrupted: bool = False

    def count(self, status: Status) -> int:
        """How many runs ended so."""
        return sum(run.verdict.status == status for run in self.runs)

    @property
    def exit_status(self) -> int:
        """0 all passed, 1 some failed, 3 some undecided and none failed or nothing was run, 130 interrupted."""
        statuses = {run.verdict.status for run in self.runs}
        if self.interrupted or "FAIL" in statuses:
            return 130 if self.interrupted else 1
        return 0 if statuses == {"PASS"} and not self.troubles else 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Where records go: all of them, or those of runs that did not pass. out: None saves nothing."""

    out: Path | None = None
    keep: bool = False

    def save(self, verdict: Verdict) -> Path | None:
        """Write record.json, report.txt and stacks/rank-N.txt of a run under `out/<scenario>/<world>-<seed>`."""
        if self.out is None or (verdict.status == "PASS" and not self.keep):
            return None
        record = verdict.record
        path = self.out / record.plan.scenario.name / f"{record.world}-{record.plan.seed}" / "record.json"
        save_record(record, path)
        _save_stacks(record, path.with_name("stacks"))
        path.with_name("report.txt").write_text(render(verdict, evidence=path, full=True) + "\n")
        return path


def _save_stacks(record: RunRecord, folder: Path) -> None:
    """A file for each rank that did not end, of this run only: with native frames, or the Python frames alone."""
    shutil.rmtree(folder, ignore_errors=True)
    for rank, look in enumerate(record.liveness):
        text = look.stack or "".join(f"{frame}\n" for frame in look.frames)
        if text:
            folder.mkdir(exist_ok=True)
            (folder / f"rank-{rank}.txt").write_text(text)


def choose_world(asked: WorldChoice, plans: Sequence[Plan]) -> Choice:
    """Settle what "auto" means here: nccl where this machine has a GPU per rank, else gloo.

    Plans that only a simulated world can express are left out of the choice, unless there are no others.
    """
    if asked != "auto":
        return Choice(world=asked, why="as asked")
    if not any({"gloo", "nccl"} & set(worlds_of(plan)) for plan in plans):
        return Choice(world="sim", why="no selected scenario can run on processes")
    needed = max((plan.scenario.world_size for plan in plans if "nccl" in worlds_of(plan)), default=0)
    gpus = torch.cuda.device_count()
    fits = 0 < needed <= gpus
    why = f"{gpus} GPU{'s' * (gpus != 1)} here, and " + (f"nccl needs {needed}" if needed else "no scenario for nccl")
    return Choice(world="nccl" if fits else "gloo", why=why)


def worlds_of(plan: Plan) -> tuple[WorldName, ...]:
    """Where a plan can be run: only simulated ranks follow a schedule."""
    return ("sim",) if plan.schedule else plan.scenario.worlds


def run_scenario(
    world: World,
    scenario: Scenario,
    *,
    seed: int,
    schedule: str = "",
    on_failure: Callable[[], None] = lambda: None,
) -> Verdict:
    """Plan, run and judge one scenario in a world that is open.

    schedule: as harness.schedules reads it, instead of the scenario's own or what the seed says.
    on_failure: called where the world itself failed, and should not be trusted with another run.
    Errors of the test bed itself, in the world or in the judgement, make it UNDECIDED and are told as its doubt.
    """
    return run_plan(world, make_plan(scenario, seed=seed, schedule=schedule), on_failure=on_failure)


def run_plan(world: World, plan: Plan, *, on_failure: Callable[[], None] = lambda: None) -> Verdict:
    """Run and judge a plan in a world that is open; on_failure and errors as of run_scenario.

    Simulated ranks take turns as the plan's schedule says, or its seed.
    """
    schedule = plan.schedule or (f"seed:{plan.seed}" if isinstance(world, SimulatedWorld) else "")
    began = time.perf_counter()
    try:
        with following(world, schedule):
            run = world.run(rank_program(plan), stall_after_s=plan.scenario.stall_after_s)
        return judge_safely(RunRecord.of(plan, run, elapsed_s=time.perf_counter() - began))
    except ScheduleError as error:
        record = _bare_record(plan, world.name, time.perf_counter() - began)
        told = f"schedule {schedule} cannot be followed: {error}"
        return Verdict(record=replace(record, error=told), status="UNDECIDED", findings=(), doubts=(told,))
    except Exception as error:  # noqa: BLE001 - whatever it is, it becomes the verdict
        on_failure()
        return _undecided(_bare_record(plan, world.name, time.perf_counter() - began), "the test bed failed", error)


def judge_safely(record: RunRecord) -> Verdict:
    """judge, where a crash of the judgement itself is UNDECIDED."""
    try:
        return judge_property(judge(record))
    except Exception as error:  # noqa: BLE001 - whatever it is, it becomes the verdict
        return _undecided(record, "judging it failed", error)


def _undecided(record: RunRecord, what: str, error: Exception) -> Verdict:
    told = "".join(traceback.format_exception(error)).strip()
    record = replace(record, error=f"{what}: {told}")
    return Verdict(record=record, status="UNDECIDED", findings=(), doubts=(record.error,))


def _bare_record(plan: Plan, world: str, elapsed_s: float) -> RunRecord:
    """The record of a run of which nothing is known."""
    size = plan.scenario.world_size
    ledgers = tuple(Ledger(rank=rank, world_size=size, groups={}) for rank in range(size))
    liveness = (Liveness(state="running", detail="not known"),) * size
    return RunRecord.of(
        plan, WorldRun(world=world, results=(), ledgers=ledgers, liveness=liveness), elapsed_s=elapsed_s
    )


def run_plans(
    plans: Sequence[Plan],
    *,
    world: WorldName,
    ray_address: str | None = None,
    placement: Placement = "pack",
    evidence: Evidence = Evidence(),
    fail_fast: bool = False,
    on_progress: Progress = lambda message: None,
    on_run: Callable[[Run], None] = lambda run: None,
    opener: Opener | None = None,
) -> Session:
    """Run plans one after the other, by world size and then as given, trained heads last; one world open at a time.

    world: as choose_world settled it; what it cannot express, or has not the GPUs for, is not run.
    ray_address, placement: as of open_world. fail_fast: stop after the first run that is no PASS.
    on_progress, on_run: called with a line of text as something begins, and with each result.
    opener: opens the worlds, by world size; None for those of tpbed.
    An error in opening the first world is raised, since nothing has been run; later ones are UNDECIDED. Worlds are
    closed whatever happens. KeyboardInterrupt ends the session, which says so and has the runs until then.
    """

    def open_here(world_size: int) -> World:
        return open_world(
            world,
            world_size,
            ray_address=ray_address,
            placement=placement,
            stacks=evidence.keep,
            progress=on_progress,
        )

    able, not_run = _split(plans, world, _gpus(ray_address))
    slot = _Slot(opener or open_here)
    campaign = _Campaign(
        slot=slot,
        world=world,
        evidence=evidence,
        on_progress=on_progress,
        on_run=on_run,
    )
    interrupted = campaign.run(able, fail_fast=fail_fast)
    why = "interrupted before it ended" if interrupted else "the run stopped before it (--fail-fast)"
    not_run += [NotRun(scenario=plan.scenario, why=why) for plan in able[len(campaign.runs) :]]
    return Session(
        runs=tuple(campaign.runs), not_run=tuple(not_run), troubles=tuple(slot.troubles), interrupted=interrupted
    )


def _gpus(ray_address: str | None) -> int | None:
    """GPUs that nccl can count on; None where a cluster decides."""
    return None if ray_address or os.environ.get("RAY_ADDRESS") else torch.cuda.device_count()


def _split(plans: Iterable[Plan], world: WorldName, gpus: int | None) -> tuple[list[Plan], list[NotRun]]:
    able, not_run = [], []
    for plan in plans:
        why = _obstacle(plan, world, gpus)
        if why:
            not_run.append(NotRun(scenario=plan.scenario, why=why))
        else:
            able.append(plan)
    return sorted(able, key=_order), not_run


def _order(plan: Plan) -> tuple[bool, int]:
    """Trained heads last, since reading a checkpoint takes seconds; by world size, as one world is open at a time."""
    return plan.scenario.logits == "smollm2", plan.scenario.world_size


def _obstacle(plan: Plan, world: WorldName, gpus: int | None) -> str:
    scenario, worlds = plan.scenario, worlds_of(plan)
    if world not in worlds:
        return f"{world} cannot express it: run it with --world {' or '.join(worlds)}"
    if scenario.logits == "smollm2" and (why := missing_checkpoint()):
        return why
    if world == "nccl" and gpus is not None and scenario.world_size > gpus:
        others = " or ".join(name for name in worlds if name != "nccl")
        advice = f"run it with --world {others}, or" if others else "run it"
        return (
            f"needs {scenario.world_size} GPUs and this machine has {gpus}: {advice} on a Ray cluster (--ray-address)"
        )
    return ""


class _Slot:
    """The one world that is open: reopened where another size is asked for, or where it was given up."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._world: World | None = None
        self.troubles: list[str] = []

    def of_size(self, world_size: int) -> World:
        if self._world is None or self._world.world_size != world_size:
            self.close()
            self._world = self._opener(world_size)
        return self._world

    def close(self) -> None:
        world, self._world = self._world, None
        if world is not None:
            try:
                world.close()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is told
                self.troubles.append(f"closing {world.name} with {world.world_size} ranks failed: {error!r}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(slots=True, kw_only=True)
class _Campaign:
    """The loop over the plans of one call."""

    slot: _Slot
    world: WorldName
    evidence: Evidence
    on_progress: Progress
    on_run: Callable[[Run], None]
    runs: list[Run] = field(default_factory=list)
    unopened: dict[int, Exception] = field(default_factory=dict)  # by world size: why it could not be opened

    def run(self, plans: Sequence[Plan], *, fail_fast: bool) -> bool:
        """Returns whether it was interrupted."""
        try:
            with self.slot:
                for number, plan in enumerate(plans, start=1):
                    self._keep(self._verdict(plan, f"{number}/{len(plans)} {plan.scenario.name}"))
                    if fail_fast and self.runs[-1].verdict.status != "PASS":
                        break
        except KeyboardInterrupt:
            return True
        return False

    def _keep(self, verdict: Verdict) -> None:
        try:
            saved = self.evidence.save(verdict)
        except OSError as error:
            saved = None
            self.slot.troubles.append(f"the record of {verdict.record.plan.scenario.name} was not saved: {error}")
        self.runs.append(Run(verdict=verdict, evidence=saved))
        self.on_run(self.runs[-1])

    def _verdict(self, plan: Plan, title: str) -> Verdict:
        world = self._open(plan.scenario.world_size)
        if isinstance(world, Exception):
            return _undecided(_bare_record(plan, WORLD_NAMES[self.world], 0.0), "its world could not be opened", world)
        self.on_progress(title)
        return run_plan(world, plan, on_failure=self.slot.close)

    def _open(self, world_size: int) -> World | Exception:
        """The world of that size, or why there is none: it is tried once, and the first one must open."""
        if world_size in self.unopened:
            return self.unopened[world_size]
        try:
            return self.slot.of_size(world_size)
        except Exception as error:
            if not self.runs:
                raise
            return self.unopened.setdefault(world_size, error)
