"""Serving programs, kernels and heads with one defect each: all are shown, and go wrong by what is planned alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from math import inf

import pytest
import torch
from test_catalogue import SIMULATED, simulate

from tpbed.harness.fault_oracle import UNFORESEEN, OracleError, foresee
from tpbed.harness.faults import (
    Fact,
    Inflated,
    JunkScale,
    NoWeight,
    Nudge,
    OtherTile,
    OtherTopK,
    PackedOnly,
    StaleMethod,
    Unmasked,
    Unpadded,
    WrongScale,
)
from tpbed.harness.head_faults import give_head
from tpbed.harness.inject import TopKError, check_topks
from tpbed.harness.kernels import KERNELS
from tpbed.harness.misreadings import MISREADINGS
from tpbed.harness.plan import make_plan
from tpbed.harness.program import rank_program
from tpbed.harness.properties import Simulator, faults_diagnosed
from tpbed.harness.record import RunRecord
from tpbed.harness.scenario import Overwrite, Scenario
from tpbed.harness.serving import SERVING
from tpbed.harness.strategies import RIGHT, kinds_of
from tpbed.harness.turn import BATCH
from tpbed.harness.verdict import Verdict, judge
from tpbed.scenarios import CATALOGUE
from tpbed.tp.ledger import PENDING
from tpbed.tp.simulated import SimulatedWorld

BY_FACTS = [
    scenario
    for scenario in SIMULATED
    if scenario.selector in SERVING and any(isinstance(fault, Fact) for fault in scenario.faults)
]
RUNNER = Simulator()
MINIMUM = CATALOGUE["decision/capacity-of-smallest-memory"]


def run(scenario: Scenario) -> RunRecord:
    plan = make_plan(scenario, seed=7)
    with SimulatedWorld(scenario.world_size) as world:
        return RunRecord.of(plan, world.run(rank_program(plan)), elapsed_s=0.0)


def found(scenario: Scenario) -> Verdict:
    return judge(run(scenario))


@pytest.mark.parametrize("scenario", BY_FACTS, ids=lambda scenario: scenario.name)
def test_a_serving_program_goes_wrong_by_its_facts_alone(scenario):
    rest = tuple(fault for fault in scenario.faults if not isinstance(fault, Fact))
    assert found(replace(scenario, faults=rest)).findings == ()


def test_every_program_and_kernel_is_in_the_catalogue():
    scenarios = CATALOGUE.values()
    assert (set(SERVING) | set(MISREADINGS)) - {scenario.selector for scenario in scenarios} == set()
    planned = [fault for scenario in scenarios for fault in scenario.faults]
    others = {fault.topk for fault in planned if isinstance(fault, OtherTopK)}
    assert set(KERNELS) - {scenario.topk for scenario in scenarios} - others == set()


@pytest.mark.parametrize("name", [name for name in SERVING if {"alone", "own", "after"} & set(name.split("-"))])
def test_a_program_that_acts_alone_has_one_beside_it_that_bears_the_same_facts(name):
    alone = [scenario for scenario in CATALOGUE.values() if scenario.selector == name and scenario.expect]
    right = [scenario for scenario in CATALOGUE.values() if scenario.selector in SERVING and not scenario.expect]
    assert any(one.faults == other.faults for one in alone for other in right)


def test_a_fact_that_nobody_asks_for_leaves_the_run_undecided():
    verdict = found(replace(MINIMUM, faults=(Fact(rank=1, name="weather", value="fair"),)))
    assert verdict.status == "UNDECIDED" and "name=weather" in verdict.doubts[0]


def test_a_fact_of_one_step_holds_in_that_step_alone():
    scenario = replace(MINIMUM, faults=(Fact(rank=1, name="capacity", value=1, step=2),))
    batches = [mark.value for mark in run(scenario).ledgers[0].marks if mark.name == BATCH]
    assert batches == [4, 4, 1]


def test_an_answer_is_judged_by_the_rows_that_its_program_had():
    """Without the mark of its rows the same answer is short, and wrong."""
    record = run(MINIMUM)
    bare = [replace(one, marks=tuple(mark for mark in one.marks if mark.name != BATCH)) for one in record.ledgers]
    assert judge(record).status == "PASS"
    assert [one.kind for one in judge(replace(record, ledgers=tuple(bare))).unexpected] == ["wrong_ids"]


def test_faults_of_any_kind_come_together():
    """A logit that is off is found in a program that also bears a smaller memory."""
    nudge = Nudge(rank=0, step=1, row=0, column=5, value=1e30)
    verdict = found(replace(MINIMUM, faults=(*MINIMUM.faults, nudge)))
    assert [one.kind for one in verdict.unexpected] == ["wrong_ids"] and not verdict.doubts


def test_errors_are_marked_where_a_collective_holds_them_back_and_nowhere_else():
    held = {
        scenario.name
        for scenario in SIMULATED
        if any(mark.name == PENDING for ledger in simulate(scenario.name).ledgers for mark in ledger.marks)
    }
    assert held == {"collective/error-behind-an-exchange", "collective/error-behind-a-teardown"}


@pytest.mark.parametrize("faults", list(permutations([OtherTile(rank=1), PackedOnly(rank=1), NoWeight(rank=1)])))
def test_faults_of_one_head_do_the_same_in_whatever_order_they_are_planned(faults):
    plan = make_plan(replace(CATALOGUE["quantized/agreed"], faults=faults), seed=7)
    head = give_head(plan, 1, faults, torch.device("cpu"))
    assert (hasattr(head, "weight"), head.quant_method) == (False, None)


def test_a_wrong_scale_leaves_the_other_faults_of_its_head_as_they_are():
    scenario = CATALOGUE["quantized/scale-of-another-shard"]
    faults = (NoWeight(rank=1), WrongScale(rank=1, scale_of=0))
    head = give_head(make_plan(replace(scenario, faults=faults), seed=7), 1, faults, torch.device("cpu"))
    assert not hasattr(head, "weight")


@pytest.mark.parametrize("selector", RIGHT)
def test_of_two_methods_left_on_one_head_the_last_counts_in_the_run_and_in_the_oracle(selector):
    read, ignored = StaleMethod(rank=1), StaleMethod(rank=1, method="ModelOptFp8LinearMethod")
    for faults, kinds in (((read, ignored), 0), ((ignored, read), 1)):
        scenario = replace(CATALOGUE["loading/share-before-padding"], selector=selector, faults=faults)
        plan = make_plan(scenario, seed=7)
        assert faults_diagnosed(plan, RUNNER) == [] and len(judge(RUNNER(plan)).findings) == kinds


@pytest.mark.parametrize("kind", UNFORESEEN, ids=lambda kind: kind.__name__)
def test_an_oracle_says_which_fault_it_cannot_foresee_and_strategies_never_draw_it(kind):
    planned = (fault for scenario in CATALOGUE.values() for fault in scenario.faults)
    fault = replace(next(fault for fault in planned if isinstance(fault, kind)), rank=0)
    plan = make_plan(replace(MINIMUM, faults=(fault,)), seed=7)
    with pytest.raises(OracleError, match="cannot be foreseen"):
        foresee(plan)
    assert kind not in kinds_of(plan.scenario, "gloo")


@pytest.mark.parametrize("changes", [{"topk": "nope"}, {"faults": (OtherTopK(rank=1, topk="nope"),)}])
def test_a_top_k_that_there_is_not_is_refused_before_anything_is_run(changes):
    with pytest.raises(TopKError, match="there is no top-k 'nope': give one of contract, torch"):
        check_topks(replace(MINIMUM, **changes))


FORESEEN = [
    ("bf16", Unpadded(rank=1)),
    ("bf16", NoWeight(rank=1)),
    ("bf16", StaleMethod(rank=1)),
    ("bf16", StaleMethod(rank=1, method="ModelOptFp8LinearMethod")),
    ("bf16", Unmasked(rank=1)),
    ("fp8", PackedOnly(rank=1)),
    ("fp8", NoWeight(rank=1)),
    ("fp8", OtherTile(rank=1)),
    ("fp8-tensor", JunkScale(rank=1, junk=1.0)),
    ("nvfp4-modelopt", Inflated(rank=1)),
]


@pytest.mark.parametrize("selector", RIGHT)
@pytest.mark.parametrize(("head", "fault"), FORESEEN, ids=str)
def test_faults_of_heads_and_masks_are_diagnosed_as_an_oracle_foresees_them(head, fault, selector):
    """Of rank 1 with a part of 1,002 tokens, one of them forbidden; alone, and with the same on a second rank."""
    forbidden = (Overwrite(row=0, token_id=300, value=-inf),) if selector != "full-gather" else ()
    scenario = replace(CATALOGUE["loading/share-before-padding"], head=head, selector=selector, overwrites=forbidden)
    for struck in ((fault,), (fault, replace(fault, rank=2))):
        plan = make_plan(replace(scenario, faults=struck), seed=7)
        assert faults_diagnosed(plan, RUNNER) == []


def test_a_weight_for_the_share_before_padding_is_whole_where_nothing_is_padded():
    scenario = replace(CATALOGUE["loading/share-before-padding-on-one-rank"], org_vocab_size=1024, expect=())
    plan = make_plan(scenario, seed=7)
    assert faults_diagnosed(plan, RUNNER) == [] and found(scenario).findings == ()
