"""Merge: the pure core against the reference, the rules for -inf and NaN, and what a group of one does."""

from math import inf, nan

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tpbed.selector.merge import merge_gathered, pad_candidates, two_gather_merge
from tpbed.selector.reference import reference_topk
from tpbed.selector.topk import canonical_topk


@st.composite
def sharded_rows(draw):
    """(logits of one row, widths of its shards, k): few distinct values, so that ties cross shards."""
    row = draw(st.lists(st.sampled_from([-inf, -1.0, -0.0, 0.0, 2.0, inf]), min_size=1, max_size=20))
    cuts = sorted(draw(st.lists(st.integers(0, len(row)), max_size=5)))
    widths = [b - a for a, b in zip([0, *cuts], [*cuts, len(row)], strict=True)]
    return row, widths, draw(st.integers(1, len(row)))


def merged(row, widths, k):
    """Local canonical top-k per shard, padded lists side by side in rank order, merged."""
    lists, start = [], 0
    for width in widths:
        values, columns = canonical_topk(torch.tensor([row[start : start + width]]), min(k, width))
        lists.append(pad_candidates(values, columns + start, k))
        start += width
    values, ids = (torch.cat(parts, dim=-1) for parts in zip(*lists, strict=True))
    assert values.shape == ids.shape == (1, len(widths) * k)
    return merge_gathered(values, ids, k)


@given(case=sharded_rows())
@example(case=([0.0, 0.0, 0.0, 0.0, 1.0], [2, 2, 1], 2))
@example(case=([-0.0, 0.0], [1, 1], 1))
@example(case=([-inf, 5.0], [1, 1], 2))
@settings(deadline=None, max_examples=300)
def test_merged_candidates_are_those_of_the_reference_however_the_row_is_sharded(case):
    row, widths, k = case
    values, ids = merged(row, widths, k)
    expected_ids, expected_values = reference_topk(torch.tensor([row]), k)
    assert ids.tolist() == expected_ids.tolist()
    assert values.double().tolist() == expected_values.tolist()
    assert (values.dtype, ids.dtype) == (torch.float32, torch.int64)


@given(case=sharded_rows(), where=st.integers(0, 19), sign=st.sampled_from([nan, -nan]))
@settings(deadline=None)
def test_a_nan_anywhere_makes_its_own_row_invalid_and_no_other(case, where, sign):
    row, widths, k = case
    broken = list(row)
    broken[where % len(row)] = sign
    values, ids = merged(broken, widths, k)
    assert ids.tolist() == [[-1] * k]
    assert values.isnan().all()
    both = [pad_candidates(torch.tensor([r]), torch.arange(len(row)).unsqueeze(0), len(row)) for r in (broken, row)]
    values, ids = merge_gathered(*(torch.cat(parts) for parts in zip(*both, strict=True)), k)
    assert ids[0].tolist() == [-1] * k
    assert ids[1].tolist() == reference_topk(torch.tensor([row]), k)[0][0].tolist()


def test_minus_inf_never_keeps_an_id_and_sorts_last():
    values, ids = merge_gathered(torch.tensor([[-inf, 3.0, -inf, 4.0]]), torch.tensor([[0, 9, 5, 7]]), 4)
    assert ids.tolist() == [[7, 9, -1, -1]]
    assert values.tolist() == [[4.0, 3.0, -inf, -inf]]


def test_ids_beyond_what_float32_can_count_stay_exact():
    big = 2**24 + 1
    _, ids = merge_gathered(torch.tensor([[1.0, 1.0, 2.0]]), torch.tensor([[big + 1, big, 2**40 + 1]]), 3)
    assert ids.tolist() == [[2**40 + 1, big, big + 1]]


def test_both_zeros_come_out_as_plus_zero():
    values, ids = merge_gathered(torch.tensor([[-0.0, 0.0]]), torch.tensor([[8, 9]]), 2)
    assert ids.tolist() == [[8, 9]]
    assert not values.signbit().any()


@pytest.mark.parametrize(("rows", "held"), [(0, 0), (0, 5), (3, 0), (3, 2), (3, 5)])
def test_lists_are_padded_to_k_columns_with_minus_inf_and_no_token(rows, held):
    values, ids = pad_candidates(torch.ones(rows, held), torch.ones(rows, held, dtype=torch.int64), 5)
    assert values.shape == ids.shape == (rows, 5)
    assert ids.dtype == torch.int64
    assert (values[:, held:] == -inf).all()
    assert (ids[:, held:] == -1).all()
    assert (values[:, :held] == 1).all()
    assert (ids[:, :held] == 1).all()


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_group_of_one_orders_and_screens_its_candidates_without_a_collective(group_of_one, monkeypatch):
    monkeypatch.setattr(dist, "all_gather", lambda *args, **kwargs: pytest.fail("a collective was issued"))
    values = torch.tensor([[1.0, 2.0, 2.0, -inf]]).bfloat16()
    merged_values, ids = two_gather_merge(
        values, torch.tensor([[4, 9, 3, 1]], dtype=torch.int32), k=5, group=group_of_one
    )
    assert ids.tolist() == [[3, 9, 4, -1, -1]]
    assert ids.dtype == torch.int64
    assert merged_values.tolist() == [[2.0, 2.0, 1.0, -inf, -inf]]
    assert merged_values.dtype == torch.float32
