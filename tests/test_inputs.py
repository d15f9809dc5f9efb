"""Inputs: what a plan's tensors are, and that the truth that answers are held to is the truth."""

from __future__ import annotations

import math

import pytest
import torch

from tpbed.harness.inputs import build_head, build_shard, full_weight, hidden_states, ladder, true_logits
from tpbed.harness.plan import make_plan
from tpbed.harness.scenario import Overwrite, Scenario
from tpbed.selector.project import project_candidate_logits
from tpbed.selector.quantized import FORMATS


def plan(**fields):
    return make_plan(Scenario(name="inputs", claim="Inputs.", kind=0, **fields), seed=1)


@pytest.mark.parametrize("head", ["fp32", "bf16", "fp16", *FORMATS])
@pytest.mark.parametrize("logits", ["distinct", "negative", "tied", "equal", "gaussian"])
def test_what_the_shards_compute_is_within_the_bound_of_the_truth(head, logits):
    """All shards side by side, against float64 of the whole: within the bound, which is zero for planted logits."""
    made = plan(head=head, logits=logits)
    computed = []
    for rank in range(4):
        shard = build_shard(made.scenario, rank)
        logits_of_rank = project_candidate_logits(hidden_states(made, 1), build_head(made, rank))
        computed.append(logits_of_rank[:, : shard.num_org])
    exact, bound = true_logits(made, 1)
    assert ((torch.cat(computed, dim=1).double() - exact).abs() <= bound).all()
    assert bool((bound == 0).all()) == (logits != "gaussian" and head not in FORMATS)


@pytest.mark.parametrize("head", ["fp32", "bf16", "fp16"])
def test_distinct_logits_have_no_ties(head):
    exact, _ = true_logits(plan(head=head), 0)
    assert all(len(row.unique()) == 1000 for row in exact)


def test_logits_of_a_wide_vocabulary_are_distinct_where_it_counts():
    exact, _ = true_logits(plan(org_vocab_size=20_000, world_size=1), 0)
    top = exact.topk(200, dim=1).values
    assert all(len(row.unique()) == 200 for row in top)


def test_negative_logits_are_all_below_zero_and_tied_ones_come_in_fours():
    assert (true_logits(plan(logits="negative"), 0)[0] < 0).all()
    counts = true_logits(plan(logits="tied"), 0)[0][0].unique(return_counts=True)[1]
    assert set(counts.tolist()) == {4}


def test_steps_have_states_of_their_own_and_seeds_weights_of_their_own():
    assert not torch.equal(hidden_states(plan(), 0), hidden_states(plan(), 1))
    one, other = (make_plan(plan().scenario, seed=seed) for seed in (1, 2))
    assert not torch.equal(full_weight(one), full_weight(other))


def test_an_overwrite_is_part_of_the_truth():
    exact, _ = true_logits(plan(overwrites=(Overwrite(row=1, token_id=5, value=math.inf),)), 0)
    assert exact[1, 5] == math.inf and exact[0].isfinite().all()


def test_a_ladder_climbs_in_steps_of_bfloat16():
    rungs = ladder(torch.arange(8192))
    assert (rungs[1:] > rungs[:-1]).all() and torch.equal(rungs, rungs.bfloat16().float())


def test_a_scale_of_another_rank_changes_the_head_and_nothing_else():
    made = plan(head="fp8", logits="gaussian", world_size=2, org_vocab_size=1024)
    own, wrong = build_head(made, 1), build_head(made, 1, scale_of=0)
    assert torch.equal(own.weight.float(), wrong.weight.float())
    assert torch.equal(wrong.weight_scale, build_head(made, 0).weight_scale)
