"""compute_candidates on one rank against the reference, its guards, and what each of several ranks would contribute.

Real collectives are the matter of the tests that run worlds: here two_gather_merge is replaced for several ranks.
"""

import pickle
from dataclasses import replace
from math import inf, nan
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tpbed.selector import candidates as merging
from tpbed.selector import select
from tpbed.selector.admission import AdmissionError
from tpbed.selector.errors import SelectionError
from tpbed.selector.fp8 import Fp8Head, dequantise_fp8, pack_fp8_per_channel
from tpbed.selector.head import DenseHead
from tpbed.selector.merge import merge_gathered, pad_candidates
from tpbed.selector.reference import error_bound, explain_candidates, reference_logits, reference_topk
from tpbed.selector.select import compute_candidates
from tpbed.selector.shard import VocabShard
from tpbed.selector.topk import canonical_topk, contract_topk, torch_topk

HEADS = [DenseHead, Fp8Head]
GEOMETRIES = {
    "GA": [VocabShard.even(r, 2, 1001) for r in range(2)],
    "GB": [VocabShard.even(r, 4, 1000) for r in range(4)],
    "GC": [VocabShard.even(r, 4, 130) for r in range(4)],
    "GD": [VocabShard.even(r, 8, 65) for r in range(8)],
    "GE": [VocabShard.even(r, 4, 1024, 16) for r in range(4)],
    "GF": [VocabShard.even(r, 2, 1024) for r in range(2)],
    "GG": [VocabShard.even(r, 3, 1000, pad_to=192) for r in range(3)],
    "GH": [VocabShard.uneven(r, [501, 500]) for r in range(2)],
    "empty": [VocabShard.uneven(r, [20, 0, 3]) for r in range(3)],
}


def tied_weight(tokens, seed):
    """Small integers with a 7 in every row: exact in fp8 with scale 2**-6, and full of ties."""
    weight = torch.randint(-1, 2, (tokens, 6), generator=torch.Generator().manual_seed(seed)).float()
    weight[:, 0] = 7.0
    return weight


def all_ranks(monkeypatch, hidden, heads, *, k, topk=None):
    """Run every rank's part of compute_candidates with a gather in this process; returns lists sent and the answer."""
    sent = []
    monkeypatch.setattr(select, "_check_group", lambda shard, group: None)
    monkeypatch.setattr(merging, "two_gather_merge", lambda v, i, *, k, group: sent.append((v, i)) or (v, i))
    for head in heads:
        compute_candidates(hidden, head, k=k, group=None, topk=topk)
    padded = [pad_candidates(values.float(), ids, k) for values, ids in sent]
    values, ids = merge_gathered(*(torch.cat(parts, dim=-1) for parts in zip(*padded, strict=True)), k)
    return sent, values, ids


@pytest.mark.parametrize("head_class", HEADS)
@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("padding", [0.0, nan, inf])
def test_the_parts_of_all_ranks_merge_to_the_reference_in_every_geometry(monkeypatch, head_class, name, padding):
    shards = GEOMETRIES[name]
    org, k = shards[0].org_vocab_size, min(16, shards[0].org_vocab_size)
    weight = tied_weight(org + shards[0].added_vocab_size, seed=len(name))
    weight[org:] *= 64  # added tokens would win
    hidden = torch.tensor([[1.0, 2, 0, -1, 1, 1], [-1.0, 0, 0, 1, 0, 0], [0.0] * 6])  # second row: negative throughout
    heads = [head_class.from_full(weight, shard, padding=padding) for shard in shards]
    sent, values, ids = all_ranks(monkeypatch, hidden, heads, k=k, topk=canonical_topk)
    exact = reference_logits(hidden, weight[:org], logits_dtype=heads[0].logits_dtype)
    assert explain_candidates(ids, values, exact, 0.0, k=k) == []
    assert [v.shape[1] for v, _ in sent] == [min(k, shard.width) for shard in shards]


@pytest.mark.parametrize("topk", [torch_topk, contract_topk])
def test_other_kernels_differ_from_the_reference_in_ties_alone(monkeypatch, topk):
    weight, hidden = tied_weight(130, seed=5), torch.eye(6)[:4]
    heads = [DenseHead.from_full(weight, shard) for shard in GEOMETRIES["GC"]]
    _, values, ids = all_ranks(monkeypatch, hidden, heads, k=16, topk=topk)
    assert explain_candidates(ids, values, reference_logits(hidden, weight), 0.0, k=16, ties="equivalent") == []


@given(
    seed=st.integers(0, 999), rows=st.integers(0, 5), k=st.integers(1, 100), hidden_dtype=st.sampled_from(["b", "f"])
)
@pytest.mark.parametrize("head_class", HEADS)
@settings(deadline=None, max_examples=40)
def test_one_rank_answers_within_the_error_bound_of_the_reference(head_class, seed, rows, k, hidden_dtype):
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(100, 48, generator=draw).bfloat16()
    hidden = torch.randn(rows, 48, generator=draw).bfloat16()
    hidden = hidden.float() if hidden_dtype == "f" else hidden
    found = compute_candidates(hidden, head_class.from_full(weight, VocabShard.even(0, 1, 100)), k=k, group=None)
    full = dequantise_fp8(*pack_fp8_per_channel(weight)) if head_class is Fp8Head else weight
    exact, bound = reference_logits(hidden, full), error_bound(hidden, full, torch.bfloat16)
    assert explain_candidates(found.ids, found.values, exact, bound, k=k) == []
    assert (found.ids.dtype, found.values.dtype) == (torch.int64, torch.float32)
    assert found.ids.shape == found.values.shape == (rows, k)


def test_k_of_the_whole_vocabulary_lists_every_token_once():
    weight = tied_weight(70, seed=1)
    found = compute_candidates(
        torch.ones(1, 6), DenseHead.from_full(weight, VocabShard.even(0, 1, 70)), k=70, group=None
    )
    expected, _ = reference_topk(reference_logits(torch.ones(1, 6), weight), 70)
    assert found.ids.tolist() == expected.tolist()
    assert sorted(found.ids[0].tolist()) == list(range(70))


def test_a_row_of_nan_is_invalid_and_its_neighbours_are_untouched():
    weight, hidden = tied_weight(100, seed=2), torch.ones(3, 6)
    hidden[1, 2] = nan
    found = compute_candidates(hidden, DenseHead.from_full(weight, VocabShard.even(0, 1, 100)), k=4, group=None)
    expected, _ = reference_topk(reference_logits(hidden, weight), 4)
    assert found.ids.tolist() == expected.tolist()
    assert found.ids[1].tolist() == [-1] * 4
    assert found.values[1].isnan().all()


@pytest.mark.parametrize("name", ["GC", "GD", "empty"])
def test_a_step_without_rows_still_sends_its_lists(monkeypatch, name):
    heads = [DenseHead.from_full(tied_weight(s.org_vocab_size, seed=3), s) for s in GEOMETRIES[name]]
    refuse = lambda logits, k: pytest.fail("a kernel was called with nothing to rank")  # noqa: E731
    sent, values, ids = all_ranks(monkeypatch, torch.zeros(0, 6), heads, k=16, topk=refuse)
    assert len(sent) == len(heads)
    assert values.shape == ids.shape == (0, 16)


def test_kernels_get_contiguous_logits_within_their_contract_on_every_rank(monkeypatch):
    seen = []
    for name, shards in GEOMETRIES.items():
        heads = [Fp8Head.from_full(tied_weight(s.org_vocab_size + s.added_vocab_size, seed=4), s) for s in shards]
        with monkeypatch.context() as patched:
            all_ranks(patched, torch.ones(2, 6), heads, k=16, topk=lambda v, k: seen.append(k) or contract_topk(v, k))
        assert seen, name
    assert set(seen) == {16, 3}


def test_the_guards_refuse_on_every_rank_alike_before_anything_is_projected(monkeypatch):
    monkeypatch.setattr(select, "project_candidate_logits", lambda hidden, head: pytest.fail("it was projected"))
    monkeypatch.setattr(select, "_check_group", lambda shard, group: None)
    hidden = torch.ones(2, 6)
    for shards in GEOMETRIES.values():
        org = shards[0].org_vocab_size
        heads = [DenseHead.from_full(tied_weight(org + s.added_vocab_size, seed=0), s) for s in shards]
        for broken in [
            {"k": 0},
            {"k": -1},
            {"k": org + 1},
            {"k": 2.5},
            {"k": "4"},
            {"k": True},
            {"k": None},
            {"hidden": None},
            {"hidden": torch.ones(6)},
            {"hidden": torch.ones(2, 3, 6)},
            {"hidden": torch.ones(2, 5)},
            {"hidden": torch.ones(2, 6).long()},
            {"hidden": torch.ones(2, 6).double()},
        ]:
            request = {"hidden": hidden, "k": 2} | broken
            said = set()
            for head in heads:
                with pytest.raises(SelectionError, match=r": (use k from|give)") as raised:
                    compute_candidates(request["hidden"], head, k=request["k"], group=None)
                said.add(str(raised.value))
            assert len(said) == 1


def test_a_head_without_shard_and_one_that_is_not_admitted_are_refused():
    head = Fp8Head.from_full(tied_weight(70, seed=0), VocabShard.even(0, 1, 70))
    with pytest.raises(AdmissionError):
        compute_candidates(torch.ones(1, 6), replace(head, quant_method=None), k=1, group=None)
    engine_head = SimpleNamespace(weight=torch.ones(70, 6), quant_method=None)
    with pytest.raises(SelectionError, match="has no shard"):
        compute_candidates(torch.ones(1, 6), engine_head, k=1, group=None)


def test_a_head_of_another_class_is_served_by_its_four_members_and_checked_by_its_weight():
    head = SimpleNamespace(
        weight=tied_weight(64, seed=0), quant_method=None, logits_dtype=torch.float32, shard=VocabShard.even(0, 1, 64)
    )
    assert compute_candidates(torch.ones(1, 6), head, k=1, group=None).ids.shape == (1, 1)
    with pytest.raises(SelectionError, match="multiplies 6"):
        compute_candidates(torch.ones(1, 5), head, k=1, group=None)


def test_a_packed_head_is_not_judged_by_the_width_of_its_packed_weight():
    class Unpacks:
        def apply(self, layer, x, bias=None):
            return torch.zeros(x.shape[0], layer.shard.width)

    head = SimpleNamespace(
        weight=torch.zeros(64, 3, dtype=torch.uint8),  # two values to the byte
        quant_method=Unpacks(),
        logits_dtype=torch.bfloat16,
        shard=VocabShard.even(0, 1, 64),
    )
    assert compute_candidates(torch.ones(1, 6), head, k=2, group=None).ids.tolist() == [[0, 1]]


def test_several_ranks_without_a_group_or_with_one_of_another_size_are_refused():
    head = DenseHead.from_full(tied_weight(130, seed=0), VocabShard.even(2, 4, 130))
    with pytest.raises(SelectionError, match="call init_process_group first"):
        compute_candidates(torch.ones(1, 6), head, k=1, group=None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(SelectionError, match="but the group has 1"):
            compute_candidates(torch.ones(1, 6), head, k=1, group=dist.group.WORLD)
        alone = DenseHead.from_full(tied_weight(130, seed=0), VocabShard.even(0, 1, 130))
        assert compute_candidates(torch.ones(1, 6), alone, k=1, group=None).ids.shape == (1, 1)
    finally:
        dist.destroy_process_group()


def test_choices_of_a_rank_are_noted_with_reasons_before_the_gather(monkeypatch):
    notes = []
    monkeypatch.setattr(select, "_check_group", lambda shard, group: None)
    monkeypatch.setattr(merging, "two_gather_merge", lambda v, i, *, k, group: notes.append("gather") or (v, i))
    head = DenseHead.from_full(tied_weight(65, seed=0), VocabShard.even(7, 8, 65))

    def note(name, value, because):
        notes.append((name, value, because))

    compute_candidates(torch.ones(1, 6), head, k=20, group=None, note=note)
    compute_candidates(torch.ones(1, 6), head, k=2, group=None, topk=torch_topk, note=note)
    assert notes == [
        ("admission", "dense", "weight is torch.float32"),
        ("topk", "canonical_topk", "default for cpu"),
        "gather",
        ("admission", "dense", "weight is torch.float32"),
        ("topk", "torch_topk", "given by the caller"),
        "gather",
    ]


def test_candidates_and_errors_survive_pickling():
    found = compute_candidates(
        torch.ones(2, 6), DenseHead.from_full(tied_weight(64, seed=0), VocabShard.even(0, 1, 64)), k=3, group=None
    )
    assert torch.equal(pickle.loads(pickle.dumps(found)).ids, found.ids)
    assert str(pickle.loads(pickle.dumps(AdmissionError("text")))) == "text"
