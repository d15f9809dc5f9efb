"""Strategies: what is drawn can be run, keeps to what was asked for, and shrinks to the plainest."""

from typing import get_args

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from tpbed.harness.fault_oracle import UNFORESEEN
from tpbed.harness.faults import ArrivalFault, CollectiveFault, Fault, Nudge, Rows, Spin, WrongScale
from tpbed.harness.inputs import build_head, build_shard
from tpbed.harness.plan import make_plan
from tpbed.harness.scenario import Scenario
from tpbed.harness.strategies import (
    NAME,
    RIGHT,
    faulted_plans,
    faults,
    geometries,
    heads,
    kinds_of,
    overwrites,
    plans,
    scenarios,
    schedules,
)

FEW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
SEARCH = settings(max_examples=3000, deadline=None, database=None, phases=[Phase.generate])
PLAIN = Scenario(name=NAME, claim="", kind=0, world_size=2, hidden_size=16, rows=2, steps=2)


@FEW
@given(plan=plans())
def test_every_rank_of_a_drawn_plan_has_a_shard_and_a_head_and_k_is_in_the_vocabulary(plan):
    scenario = plan.scenario
    shards = [build_shard(scenario, rank) for rank in range(scenario.world_size)]
    assert sum(shard.num_org for shard in shards) == scenario.org_vocab_size
    assert [build_head(plan, rank).shard for rank in range(scenario.world_size)] == shards
    assert 1 <= scenario.k <= scenario.org_vocab_size
    assert not scenario.faults


def test_a_plan_shrinks_to_one_step_of_one_row_and_to_no_more_ranks_and_tokens_than_it_takes():
    def takes(plan):
        return plan.scenario.world_size > 1 and plan.scenario.org_vocab_size > 3 and plan.scenario.rows > 0

    scenario = find(plans(), takes).scenario
    assert (scenario.world_size, scenario.org_vocab_size, scenario.rows, scenario.k, scenario.steps) == (2, 4, 1, 1, 1)
    assert (scenario.head, scenario.logits, scenario.pad_fill, scenario.overwrites) == ("fp32", "distinct", 0.0, ())


@FEW
@given(plan=faulted_plans(selectors=("packed", "full-gather"), world_sizes=(2, 5), topks=("torch",)))
def test_only_what_was_asked_for_is_drawn(plan):
    scenario = plan.scenario
    assert scenario.selector in ("packed", "full-gather")
    assert scenario.world_size in (2, 5)
    assert scenario.topk == "torch"
    assert 1 <= len(scenario.faults) <= 2


@pytest.mark.parametrize(
    "kind", [kind for kind in get_args(Fault) if kind not in UNFORESEEN], ids=lambda kind: kind.__name__
)
def test_every_kind_of_fault_is_drawn_where_its_world_can_express_it(kind):
    world = "gloo" if kind in get_args(ArrivalFault) else "sim"
    struck = faulted_plans(world=world).map(lambda plan: plan.scenario.faults)
    assert find(struck, lambda drawn: any(isinstance(fault, kind) for fault in drawn), settings=SEARCH)


@FEW
@given(plan=faulted_plans())
def test_simulated_ranks_are_in_their_group_from_the_start(plan):
    assert not any(isinstance(fault, get_args(ArrivalFault)) for fault in plan.scenario.faults)


def test_where_a_fault_makes_no_sense_it_is_not_drawn():
    assert not {Nudge, Rows, Spin} & set(kinds_of(Scenario(**fields(PLAIN) | {"selector": "crop"}), "sim"))
    assert not {Nudge, Spin} & set(kinds_of(Scenario(**fields(PLAIN) | {"selector": "full-gather"}), "sim"))
    assert WrongScale not in kinds_of(PLAIN, "sim")
    assert WrongScale in kinds_of(Scenario(**fields(PLAIN) | {"head": "int8"}), "sim")


def fields(scenario):
    return {name: getattr(scenario, name) for name in scenario.__dataclass_fields__}


@pytest.mark.parametrize("place", ["first", "past the last"])
def test_faults_are_drawn_at_the_first_collective_and_past_the_last(place):
    seq = 1 if place == "first" else 5  # two steps of two
    assert find(faults(PLAIN), lambda fault: isinstance(fault, get_args(CollectiveFault)) and fault.seq == seq)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-0.0", "1.0078125"])
def test_what_is_planted_has_ties_and_values_that_are_not_finite(value):
    drawn = overwrites(rows=2, tokens=3)
    assert find(drawn, lambda planted: any(str(one.value) == value for one in planted), settings=SEARCH)


@FEW
@given(data=st.data())
def test_parts_are_drawn_alone(data):
    geometry = data.draw(geometries(world_sizes=(3,)))
    head = data.draw(heads(geometry))
    scenario = Scenario(name=NAME, claim="", kind=0, rows=1, k=1, **geometry, **head)
    plan = make_plan(scenario, seed=0, schedule=data.draw(schedules()))
    assert [build_head(plan, rank).shard.rank for rank in range(3)] == [0, 1, 2]
    assert data.draw(scenarios()).selector in RIGHT
