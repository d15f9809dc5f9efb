"""Properties: each holds of the right selector, and is broken by a wrong one or a planted defect."""

from dataclasses import replace
from math import inf, nan

import pytest

from tpbed.harness import properties
from tpbed.harness.fault_oracle import foresee
from tpbed.harness.faults import Corrupt, Extra, Leave, Raise, Recast, Skip, Strided
from tpbed.harness.plan import PropertyName, make_plan
from tpbed.harness.properties import OF_FAULTLESS_RUNS, PROPERTIES, Breach, Simulator
from tpbed.harness.runner import run_plan
from tpbed.harness.scenario import Overwrite, Scenario
from tpbed.harness.strategies import with_faults
from tpbed.harness.verdict import judge
from tpbed.tp.simulated import SimulatedWorld

pytestmark = pytest.mark.usefixtures("one_thread")
PLAIN = Scenario(
    name="fuzz/case",
    claim="",
    kind=0,
    world_size=4,
    org_vocab_size=50,
    pad_to=16,
    hidden_size=16,
    rows=3,
    k=4,
    steps=1,
    topk="canonical",
)
BREAKS = {
    "no_finding": ("skip-empty-shard", {"org_vocab_size": 12}),
    "ranks_agree": ("rescore-locally", {"logits": "gaussian", "head": "fp32"}),
    "right_tokens": ("no-offset", {}),
    "right_order": ("worst-first", {}),
    "masked_columns_never_win": ("no-mask", {"logits": "negative", "pad_fill": -inf}),
    "tp_invariant": ("torch-merge", {"logits": "equal", "rows": 1, "k": 16}),
    "row_invariant": ("scatter-rows-first", {}),
    "shard_order_invariant": ("ranks-reversed", {}),
}


@pytest.fixture(scope="module")
def simulator():
    return Simulator()


def plan_of(selector="tpbed", faults=(), **changes):
    return make_plan(replace(PLAIN, selector=selector, faults=faults, **changes), seed=3)


def test_every_property_has_a_name_that_a_plan_can_hold_and_a_selector_that_breaks_it():
    assert set(PROPERTIES) == set(PropertyName.__args__)
    assert set(OF_FAULTLESS_RUNS) == set(BREAKS)


@pytest.mark.parametrize("name", BREAKS)
def test_a_property_is_broken_by_a_wrong_selector_and_holds_of_the_right_one_on_the_same_plan(name, simulator):
    selector, changes = BREAKS[name]
    [breach, *_] = PROPERTIES[name](plan_of(selector, **changes), simulator)
    assert (breach.name, bool(breach.text)) == (name, True)
    assert PROPERTIES[name](plan_of(**changes), simulator) == []


@pytest.mark.parametrize("name", OF_FAULTLESS_RUNS)
@pytest.mark.parametrize("selector", ["tpbed", "packed", "agreed", "full-gather"])
def test_properties_hold_of_right_selectors_with_ties_and_nan(name, selector, simulator):
    planted = () if selector == "full-gather" else (Overwrite(row=0, token_id=7, value=nan),)
    assert PROPERTIES[name](plan_of(selector, logits="tied", overwrites=planted), simulator) == []


def culprit_swapped(simulator):
    """Another rank does what the plan says."""

    def run(plan):
        fault = plan.scenario.faults[0]
        other = with_faults(plan, (replace(fault, rank=(fault.rank + 1) % 4),))
        return replace(simulator(other), plan=plan)

    return run


@pytest.mark.parametrize("kind", [Raise, Skip, Extra, Recast])
def test_a_fault_is_diagnosed_and_a_run_in_which_another_rank_did_it_breaks_the_property(kind, simulator):
    plan = plan_of(faults=(kind(rank=2, seq=2),), steps=2)
    assert PROPERTIES["faults_diagnosed"](plan, simulator) == []
    assert PROPERTIES["faults_diagnosed"](plan, culprit_swapped(simulator))


def test_a_fault_that_is_not_found_breaks_the_property(simulator, monkeypatch):
    plan = plan_of(faults=(Raise(rank=2, seq=1),))
    monkeypatch.setattr(properties, "judge", lambda record: replace(judge(record), findings=()))
    [breach] = PROPERTIES["faults_diagnosed"](plan, simulator)
    assert breach.text.endswith("found: nothing")


@pytest.mark.parametrize(
    ("world_size", "steps", "selector", "faults"),
    [
        (3, 2, "tpbed", (Skip(rank=0, seq=2), Extra(rank=1, seq=2))),
        (2, 1, "tpbed", (Recast(rank=0, seq=1, dtype="int32"), Recast(rank=1, seq=1, dtype="int32"))),
        (2, 1, "full-gather", (Skip(rank=0, seq=1), Leave(rank=1, step=0))),
        (2, 1, "tpbed", (Strided(rank=0, seq=1), Extra(rank=0, seq=1))),
    ],
    ids=[
        "a call too many beside one too few",
        "all ranks changed alike",
        "one leaves and its peer goes on alone",
        "a copy too many of a view",
    ],
)
def test_what_the_fuzzer_found_once_is_diagnosed(world_size, steps, selector, faults, simulator):
    plan = plan_of(
        selector, faults, world_size=world_size, steps=steps, org_vocab_size=1, pad_to=world_size, k=1, rows=2
    )
    assert PROPERTIES["faults_diagnosed"](plan, simulator) == []


def test_a_rank_that_left_alone_out_of_step_is_named_though_its_peers_call_from_different_places(simulator):
    plan = plan_of(faults=(Skip(rank=0, seq=2), Extra(rank=1, seq=2)), world_size=3, steps=2, pad_to=48)
    record = simulator(plan)
    assert [(one.kind, one.ranks, one.seq) for one in judge(record).findings][:1] == [("mismatch", (0,), 2)]


def test_over_gloo_a_collective_of_no_bytes_waits_for_nobody_so_a_rank_that_raises_before_it_crashes_alone():
    plan = plan_of(faults=(Raise(rank=2, seq=1),), rows=0)
    waited, alone = (foresee(plan, empty_waits=waits).roots for waits in (True, False))
    assert [(root.rank, root.kinds, root.seq) for root in waited] == [(2, ("hang",), 1)]
    assert [(root.rank, root.kinds, root.seq) for root in alone] == [(2, ("crash_one", "crash_all"), None)]
    filled = plan_of(faults=(Raise(rank=2, seq=1),))
    assert foresee(filled, empty_waits=False) == foresee(filled)


def verdict_on(plan):
    with SimulatedWorld(plan.scenario.world_size) as world:
        return run_plan(world, plan)


def test_a_plan_that_must_hold_a_property_fails_by_it_alone(monkeypatch):
    plan = replace(plan_of(), must_hold="tp_invariant")
    assert verdict_on(plan).status == "PASS"
    broken = [Breach(name="tp_invariant", text="at TP=1: other ids", plan=plan)]
    monkeypatch.setitem(properties.PROPERTIES, "tp_invariant", lambda plan, run: broken)
    verdict = verdict_on(plan)
    assert (verdict.status, verdict.broken, verdict.findings) == ("FAIL", ("at TP=1: other ids",), ())


def test_what_a_wrong_answer_shows_fails_though_the_property_that_must_hold_does():
    assert verdict_on(replace(plan_of("worst-first"), must_hold="ranks_agree")).status == "FAIL"


def test_of_faults_a_plan_that_must_have_them_diagnosed_expects_what_they_come_to():
    plan = plan_of(faults=(Raise(rank=2, seq=1), Corrupt(rank=1, seq=9)))
    assert verdict_on(plan).status == "UNDECIDED"  # the second never fires
    verdict = verdict_on(replace(plan, must_hold="faults_diagnosed"))
    assert (verdict.status, verdict.doubts, [one.ranks for one in verdict.findings]) == ("PASS", (), [(2,)])
