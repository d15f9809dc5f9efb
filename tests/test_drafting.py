"""Drafting: accepted lengths and changed tokens, on examples made by hand."""

import pytest
import torch

from tpbed.harness.activations import EMULATED, round_to_fp8, round_to_nvfp4
from tpbed.harness.drafting import accepted_length, draft
from tpbed.harness.neartie import Heads, choose
from tpbed.selector import project_candidate_logits

SLOTS = 7


def candidates(rows, order=(0, 1, 2, 3), values=(3.0, 2.0, 1.0, 0.0)):
    return torch.tensor([order] * rows), torch.tensor([values] * rows)


def told(found, true, passages=None):
    return draft(found, true, passages or (len(true[0]),), source="made", head="made")


def test_an_accepted_length_ends_at_the_first_miss():
    hits = torch.tensor([True, True, False, True, True, True, True])
    assert accepted_length(hits, (7,)) == 2.0
    assert accepted_length(torch.ones(7, dtype=torch.bool), (7,)) == 7.0


def test_a_block_begins_at_each_row_and_none_goes_beyond_its_passage():
    hits = torch.ones(17, dtype=torch.bool)
    hits[0] = False
    assert accepted_length(hits, (8, 9)) == (0 + 7 + 3 * 7) / 5
    assert told(candidates(17), candidates(17), (8, 9)).blocks == 5


def test_passages_that_are_too_short_have_no_accepted_length():
    short = told(candidates(9), candidates(9), (6, 3))
    assert (short.blocks, short.path_length, short.oracle_length) == (0, None, None)


def test_the_same_candidates_change_no_token():
    same = told(candidates(SLOTS), candidates(SLOTS))
    assert (same.changed_greedy, same.changed_gumbel, same.changed_inverse_cdf) == (0.0, 0.0, 0.0)
    assert (same.path_length, same.oracle_length) == (7.0, 7.0)


def test_the_order_of_equals_changes_what_the_inverse_cdf_draws_and_not_what_keyed_noise_draws():
    level = (1.0, 1.0, 1.0, 1.0)
    turned = told(candidates(SLOTS, (3, 2, 1, 0), level), candidates(SLOTS, (0, 1, 2, 3), level))
    assert turned.changed_gumbel == 0.0
    assert turned.changed_inverse_cdf == 1.0  # of four equals, turned round, none keeps its place


def test_a_best_token_that_is_held_and_not_first_counts_for_the_oracle_alone():
    second = told(candidates(SLOTS, (1, 0, 2, 3)), candidates(SLOTS))
    assert (second.changed_greedy, second.path_length, second.oracle_length) == (1.0, 0.0, 7.0)
    lost = told(candidates(SLOTS, (4, 5, 6, 7)), candidates(SLOTS))
    assert (lost.path_length, lost.oracle_length) == (0.0, 0.0)


@pytest.mark.parametrize(("rounding", "bound"), [(round_to_fp8, 1 / 16), (round_to_nvfp4, 1 / 4)])
def test_rounding_moves_a_hidden_state_no_further_than_its_format_and_keeps_its_largest_entry(rounding, bound):
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
    moved = (rounding(hidden) - hidden.float()).abs() / hidden.float().abs().amax(dim=1, keepdim=True)
    assert 0 < moved.max() < bound
    assert rounding(hidden[:0]).shape == (0, 32)


@pytest.mark.parametrize("rounding", [round_to_fp8, round_to_nvfp4])
def test_a_row_is_rounded_the_same_alone_and_among_others(rounding):
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
    assert torch.equal(rounding(hidden)[2:3], rounding(hidden[2:3]))


@pytest.mark.parametrize("name", EMULATED)
def test_heads_with_rounded_activations_give_other_logits_and_the_same_at_every_tp(name):
    draw = torch.Generator().manual_seed(4)
    weight, hidden = (torch.randn(rows, 32, generator=draw).bfloat16() for rows in (256, 9))
    heads = Heads(name, weight)
    plain = Heads(EMULATED[name][0], weight)
    assert not torch.equal(*(project_candidate_logits(hidden, one()[0]) for one in (heads, plain)))
    assert torch.equal(choose(heads(1), hidden).ids, choose(heads(4), hidden).ids)
