"""Faults as text: what a report prints --fault reads again, and what cannot be read is told with what there is."""

import json
import math
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpbed.harness import cli
from tpbed.harness.choice import Changes, UsageError, choose_plans
from tpbed.harness.fault_text import FaultTextError, read_fault
from tpbed.harness.faults import Delay, Fault, Linger, Nudge, Pause, Raise, Strided, describe
from tpbed.harness.plan import make_plan
from tpbed.harness.scenario import ScenarioError
from tpbed.scenarios import CATALOGUE

FAULTS = get_args(Fault)
NONE = Changes()
PAIR = "hang/pair-of-ranks"


@pytest.mark.parametrize("kind", FAULTS, ids=lambda one: one.__name__)
def test_every_fault_is_read_as_it_is_written(kind):
    @given(
        fault=st.builds(
            kind, kind=st.just(next(f for f in kind.__dataclass_fields__.values() if f.name == "kind").default)
        )
    )
    def check(fault):
        assert repr(read_fault(describe(fault))) == repr(read_fault(f"  {describe(fault)} "))
        assert describe(read_fault(describe(fault))) == describe(fault)
        assert read_fault(describe(fault)) == fault or "nan" in repr(fault)

    check()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("raise@rank=2,seq=3", Raise(rank=2, seq=3)),
        ("raise@seq=3, rank=2", Raise(rank=2, seq=3)),
        ("raise@rank=2,seq=3,message=out of memory", Raise(rank=2, seq=3, message="out of memory")),
        ('raise@rank=2,seq=3,message="a, b=\\"c\\""', Raise(rank=2, seq=3, message='a, b="c"')),
        ("raise@rank=2,seq=3,message=3", Raise(rank=2, seq=3, message="3")),
        ("raise@rank=2,seq=3,message=", Raise(rank=2, seq=3, message="")),
        ("delay@rank=0,seq=1,seconds=0.05", Delay(rank=0, seq=1, seconds=0.05)),
        ("delay@rank=0,seq=1,ms=50", Delay(rank=0, seq=1, seconds=0.05)),
        ("pause@rank=0,seq=1,ms=2000", Pause(rank=0, seq=1, seconds=2.0)),
        ("nudge@rank=1,step=0,row=0,column=3,value=7.5", Nudge(rank=1, step=0, row=0, column=3, value=7.5)),
        ("nudge@rank=1,step=0,row=0,column=3,value=-inf", Nudge(rank=1, step=0, row=0, column=3, value=-math.inf)),
        ("linger@rank=1,seconds=none", Linger(rank=1)),
        ("strided@rank=1,seq=2,transposed=True", Strided(rank=1, seq=2, transposed=True)),
    ],
)
def test_what_a_person_writes_is_read(text, fault):
    assert read_fault(text) == fault


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rais@rank=2,seq=3", "says no fault (near: raise"),
        ("", "with one of raise, kill, exit"),
        ("raise", "does not say rank and seq: raise takes rank, seq, [group], [times], [message]."),
        ("raise@rank=2", "does not say seq"),
        ("raise@rank=2,sequence=3", "raise has no sequence (near: seq): raise takes rank, seq,"),
        ("raise@rank=2,seq=3,ms=5", "raise has no ms"),
        ("raise@rank=2,seq=3,rank=2", "gives rank twice"),
        ("delay@rank=2,seq=3,ms=5,seconds=1", "gives seconds twice"),
        ("delay@rank=2,seq=3,ms=soon", "ms=soon is no number"),
        ("raise@rank=2;seq=3", "rank cannot be '2;seq=3': give int"),
        ("raise@rank=2,seq", "'seq' is no FIELD=VALUE: raise takes rank, seq"),
        ("raise@rank=2,seq=3.0", "seq cannot be '3.0': give int"),
        ("raise@rank=true,seq=3", "rank cannot be 'true': give int"),
        ("strided@rank=1,seq=2,transposed=1", "transposed cannot be '1': give bool"),
        ("absent@rank=1,how=gone", "give one of stall, stop, exit, kill, crash"),
        ("linger@rank=1,seconds=soon", "give float or NoneType"),
        ("recast@rank=1,seq=1,dtype=bf16", "give one of bfloat16, float16"),
    ],
)
def test_what_cannot_be_read_is_told_with_what_there_is(text, told):
    with pytest.raises(FaultTextError) as caught:
        read_fault(text)
    assert told in str(caught.value) and repr(text) in str(caught.value)


def plans(*words, changes=NONE, **options):
    return choose_plans(words, CATALOGUE, seed=3, changes=changes, **options)


RAISES = Changes(faults=(Raise(rank=1, seq=2),))


def test_faults_are_added_to_a_scenario_and_what_it_expects_is_dropped():
    (plan,) = plans(PAIR, changes=RAISES)
    own = make_plan(CATALOGUE[PAIR], seed=3)
    assert plan.scenario.faults == (*own.scenario.faults, *RAISES.faults)
    assert (plan.scenario.expect, own.scenario.expect != ()) == ((), True)
    assert (plan.weight_seed, plan.step_seeds) == (own.weight_seed, own.step_seeds)


def test_faults_alone_befall_a_healthy_run_of_as_many_ranks_as_asked():
    (plan,) = plans(changes=RAISES, tp=3)
    assert (plan.scenario.world_size, plan.scenario.faults, plan.scenario.expect) == (3, RAISES.faults, ())
    assert plans(changes=RAISES)[0].scenario.world_size == 4


def test_without_faults_plans_are_the_catalogues_own():
    assert plans() == [make_plan(scenario, seed=3) for scenario in CATALOGUE.values()]


def test_a_fault_on_a_rank_that_is_not_there_is_refused_with_the_ranks_there_are():
    with pytest.raises(ScenarioError, match="rank 2, and world_size=2 has ranks 0 to 1"):
        plans(PAIR, changes=Changes(faults=(Raise(rank=2, seq=1),)))


def test_the_world_size_selects_among_what_is_named():
    assert [plan.scenario.name for plan in plans("hang", tp=2, changes=RAISES)] == [PAIR, "hang/crossed-groups"]
    with pytest.raises(UsageError, match="no selected scenario has --tp 3"):
        plans("hang", tp=3)


@pytest.fixture
def tpbed(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            cli.main(["run", "--world", "sim", *(str(argument) for argument in arguments)])
        return end.value.code, *capsys.readouterr()

    return run


def test_a_fault_of_the_command_line_is_found_and_the_report_repeats_it(tpbed):
    options = ("--fault", "raise@rank=1,seq=3,message=out of memory", "--fault", "delay@rank=0,seq=1,ms=50")
    status, out, _ = tpbed("--tp", 2, *options, "--json")
    told = json.loads(out.splitlines()[0])
    assert (status, told["status"], told["culprits"]) == (1, "FAIL", [1])
    assert [fault["fault"] for fault in told["faults"]] == [options[1], "delay@rank=0,seq=1,seconds=0.05"]
    assert told["again"] == (
        "tpbed run --tp 2 --seed 0 --fault 'raise@rank=1,seq=3,message=out of memory' "
        "--fault delay@rank=0,seq=1,seconds=0.05 --world sim"
    )


def test_faults_that_show_nothing_pass(tpbed):
    assert tpbed("--tp", 2, "--fault", "delay@rank=0,seq=1,ms=50")[0] == 0


def test_the_same_faults_on_a_scenario(tpbed):
    status, out, _ = tpbed("healthy/tp4-padded-tail", "--fault", "skip@rank=3,seq=2")
    assert status == 1
    assert "again     tpbed run healthy/tp4-padded-tail --seed 0 --fault skip@rank=3,seq=2 --world sim\n" in out


@pytest.mark.parametrize("fault", ["raise@rank=4,seq=1", "raise@rank=1", "fall@rank=1"])
def test_a_fault_that_cannot_be_is_a_usage_error_in_one_line(tpbed, fault):
    status, out, error = tpbed("--fault", fault)
    assert (status, out, error.count("\n")) == (2, "", 1) and error.startswith("tpbed: ")


def test_a_fault_befalls_the_scenarios_of_a_name_that_have_its_rank_and_is_refused_where_none_has():
    chosen = plans("healthy", changes=Changes(faults=(Raise(rank=7, seq=1),)))
    assert [plan.scenario.name for plan in chosen] == ["healthy/tp8-mostly-padding"]
    with pytest.raises(ScenarioError, match="a fault strikes rank 999"):
        plans("healthy", changes=Changes(faults=(Raise(rank=999, seq=1),)))
