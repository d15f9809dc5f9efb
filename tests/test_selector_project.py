"""project_candidate_logits: the whole shard is projected, padding is masked, and the result is plainly contiguous."""

from dataclasses import dataclass, replace
from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tpbed.selector.admission import AdmissionError
from tpbed.selector.fp8 import Fp8Head
from tpbed.selector.head import DenseHead
from tpbed.selector.project import project_candidate_logits
from tpbed.selector.shard import VocabShard

HEADS = [DenseHead, Fp8Head]
GEOMETRIES = [(2, 1001, 0), (4, 1000, 0), (4, 130, 0), (8, 65, 0), (4, 1024, 16), (2, 1024, 0)]


def integers(*shape, seed=0):
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


@given(
    geometry=st.sampled_from(GEOMETRIES),
    rows=st.sampled_from([0, 1, 2, 7]),
    padding=st.sampled_from([0.0, nan, inf, 1e4, -1.0]),
)
@pytest.mark.parametrize("head_class", HEADS)
@settings(deadline=None, max_examples=25)
def test_real_columns_are_exact_and_every_other_column_is_minus_inf(head_class, geometry, rows, padding):
    world_size, org, added = geometry
    full, hidden = integers(org + added, 8), integers(rows, 8, seed=1)
    full[:, 0] = 7.0  # amax 7 in every row: the fp8 scale is 7/448 = 2**-6, so products stay exact
    for rank in range(world_size):
        shard = VocabShard.even(rank, world_size, org, added)
        logits = project_candidate_logits(hidden, head_class.from_full(full, shard, padding=padding))
        exact = (hidden @ full[shard.org_start : shard.org_start + shard.num_org].T).to(logits.dtype)
        assert logits.shape == (rows, shard.width)
        assert torch.equal(logits[:, : shard.num_org], exact)
        assert (logits[:, shard.num_org :] == -inf).all()
        assert logits.is_contiguous()
        assert logits.stride() == (shard.width, 1)


@pytest.mark.parametrize("head_class", HEADS)
def test_padding_loses_although_it_scores_zero_and_every_real_logit_is_negative(head_class):
    shard = VocabShard.even(3, 4, 1000)
    logits = project_candidate_logits(torch.ones(2, 4), head_class.from_full(-torch.ones(1000, 4), shard))
    assert logits.argmax(dim=1).max() < shard.num_org


@pytest.mark.parametrize("head_class", HEADS)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_shard_without_rows_gives_logits_without_columns(head_class, rows):
    logits = project_candidate_logits(
        torch.ones(rows, 4), head_class.from_full(torch.ones(9, 4), VocabShard.uneven(1, [9, 0]))
    )
    assert logits.shape == (rows, 0)
    assert logits.is_contiguous()


@pytest.mark.parametrize("head_class", HEADS)
def test_strided_weights_and_hidden_states_change_nothing(head_class):
    shard = VocabShard.even(1, 2, 100)
    head, hidden = head_class.from_full(integers(100, 8), shard), integers(3, 8, seed=1)
    wide = head.weight.new_zeros(shard.width, 16)
    wide[:, :8] = head.weight
    strided = replace(head, weight=wide[:, :8])
    assert not strided.weight.is_contiguous()
    expected = project_candidate_logits(hidden, head)
    assert torch.equal(project_candidate_logits(hidden.T.contiguous().T, strided), expected)


@dataclass(frozen=True)
class StridedMethod:
    """A quant method that answers with a view of a wider buffer, in a dtype of its own."""

    dtype: torch.dtype

    def apply(self, layer, x, bias=None):
        return torch.zeros(x.shape[0], 2 * layer.shard.width, dtype=self.dtype)[:, : layer.shard.width]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_method_that_returns_a_strided_view_still_gives_contiguous_masked_logits_of_the_promised_dtype(rows, dtype):
    method = StridedMethod(dtype)
    head = replace(Fp8Head.from_full(torch.ones(100, 4), VocabShard.even(1, 2, 100)), quant_method=method)
    logits = project_candidate_logits(torch.ones(rows, 4), head)
    assert logits.is_contiguous()
    assert logits.dtype == torch.bfloat16
    assert (logits[:, 36:] == -inf).all()
    assert (logits[:, :36] == 0).all()


def test_hidden_states_are_cast_to_a_dense_weights_dtype():
    head = DenseHead.from_full(torch.ones(64, 2).bfloat16(), VocabShard.even(0, 1, 64))
    logits = project_candidate_logits(torch.tensor([[1.001, 2.0]]), head)  # 1.001 is 1 in bfloat16
    assert logits.dtype == torch.bfloat16
    assert logits[0, 0] == 3.0


def test_quantized_heads_get_the_hidden_states_as_they_are():
    seen = []

    class Spy:
        def apply(self, layer, x, bias=None):
            seen.append((x.dtype, bias))
            return torch.zeros(x.shape[0], layer.shard.width)

    head = replace(Fp8Head.from_full(torch.ones(64, 2), VocabShard.even(0, 1, 64)), quant_method=Spy())
    project_candidate_logits(torch.ones(1, 2), head)
    assert seen == [(torch.float32, None)]


def test_weights_that_require_gradients_are_projected_without_a_graph():
    weight = torch.nn.Parameter(torch.ones(64, 2))
    logits = project_candidate_logits(torch.ones(1, 2), DenseHead(weight=weight, shard=VocabShard.even(0, 1, 64)))
    assert not logits.requires_grad


def test_a_head_that_is_neither_dense_nor_servable_is_refused():
    head = replace(Fp8Head.from_full(torch.ones(64, 2), VocabShard.even(0, 1, 64)), quant_method=None)
    with pytest.raises(AdmissionError):
        project_candidate_logits(torch.ones(1, 2), head)
