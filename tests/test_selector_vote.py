"""Vote: ranks whose heads differ all raise alike, with every rank's reason, before anything is projected."""

from types import SimpleNamespace

import pytest
import torch

from tpbed.selector.admission import AdmissionError
from tpbed.selector.errors import SelectionError
from tpbed.selector.fp8 import Fp8Head
from tpbed.selector.head import DenseHead
from tpbed.selector.int8 import Int8Head
from tpbed.selector.nvfp4 import Nvfp4Head
from tpbed.selector.select import compute_candidates
from tpbed.selector.shard import VocabShard
from tpbed.selector.vote import BALLOT_BYTES, agree_admission
from tpbed.tp.simulated import SimulatedWorld


def vote(*heads):
    def program(rank: int):
        try:
            return agree_admission(heads[rank], group=None, device=torch.device("cpu"))
        except AdmissionError as error:
            return str(error)

    return SimulatedWorld(len(heads)).run(program)


def dense():
    return SimpleNamespace(weight=torch.ones(2, 2), quant_method=None)


def quantized(name: str = "Method"):
    method = type(name, (), {"apply": lambda self, layer, x, bias=None: x})()
    return SimpleNamespace(weight=torch.ones(2, 2, dtype=torch.int8), quant_method=method)


def test_heads_that_are_alike_pass_with_each_ranks_own_reason():
    run = vote(quantized("A"), quantized("B"))
    assert run.results == (("quantized", "A serves it"), ("quantized", "B serves it"))
    assert [[c.payload_bytes for c in ledger.collectives] for ledger in run.ledgers] == [[BALLOT_BYTES]] * 2


def test_one_that_differs_makes_all_raise_with_every_ranks_reason():
    told = vote(dense(), quantized(), dense(), SimpleNamespace()).results
    assert len(set(told)) == 1
    assert "rank 0, 2 goes dense (weight is torch.float32)" in told[0]
    assert "rank 1 goes quantized (Method serves it)" in told[0]
    assert "rank 3 refuses (SimpleNamespace can be projected neither" in told[0]


def test_heads_that_all_refuse_raise_on_all_after_the_same_collective():
    run = vote(SimpleNamespace(), SimpleNamespace())
    assert "rank 0, 1 refuses" in run.results[0] and run.results[0] == run.results[1]


def test_a_head_that_raises_when_it_is_read_is_a_refusal_and_leaves_nobody_waiting():
    class Unread(SimpleNamespace):
        @property
        def quant_method(self):
            raise RuntimeError("the weight is on no device")

    told = vote(dense(), Unread(weight=torch.ones(2, 2))).results
    assert told[0] == told[1] and "rank 1 refuses (RuntimeError: the weight is on no device)" in told[0]


def test_a_group_of_one_votes_without_a_collective():
    run = vote(dense())
    assert run.results[0][0] == "dense" and not run.ledgers[0].collectives


def test_a_reason_that_is_too_long_is_cut_and_still_counts():
    told = vote(dense(), quantized("M" * 2 * BALLOT_BYTES)).results
    assert "goes quantized (MMM" in told[0] and told[0] == told[1]


@pytest.mark.parametrize("admission", ["rank_local", "agreed"])
def test_a_stale_method_on_one_rank_hangs_its_peers_or_stops_all(admission):
    def program(rank: int) -> None:
        head = DenseHead.from_full(torch.ones(4, 2), VocabShard.even(rank, 2, 4, pad_to=2))
        if rank == 0:
            head = SimpleNamespace(shard=head.shard, weight=torch.ones(2, 2, dtype=torch.int8), quant_method=None)
        compute_candidates(torch.ones(1, 2), head, k=2, group=None, admission=admission)

    run = SimulatedWorld(2).run(program)
    assert run.ledgers[0].end.error_type == "AdmissionError"
    assert (run.ledgers[1].end is None) == (admission == "rank_local")
    issued = [len(ledger.collectives) for ledger in run.ledgers]
    assert issued == ([0, 1] if admission == "rank_local" else [1, 1])


WEIGHT = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()


def even(rank: int, tokens: int = 64, **options) -> VocabShard:
    return VocabShard.even(rank, 2, tokens, pad_to=32, **options)


UNLIKE = {  # of rank 0, of rank 1, and what tells them apart
    "dtypes": (
        DenseHead.from_full(WEIGHT, even(0)),
        DenseHead.from_full(WEIGHT.float(), even(1)),
        ("weight bfloat16", "weight float32"),
    ),
    "formats": (Int8Head.from_full(WEIGHT, even(0)), Fp8Head.from_full(WEIGHT, even(1)), ("int8", "float8_e4m3fn")),
    "granularities": (
        Fp8Head.from_full(WEIGHT, even(0)),
        Fp8Head.from_full(WEIGHT, even(1), granularity="tensor"),
        ("granularity channel", "granularity tensor"),
    ),
    "layouts": (
        Nvfp4Head.from_full(WEIGHT, even(0)),
        Nvfp4Head.from_full(WEIGHT, even(1), layout="modelopt"),
        ("layout compressed-tensors", "layout modelopt"),
    ),
    "hidden sizes": (
        DenseHead.from_full(WEIGHT, even(0)),
        DenseHead.from_full(WEIGHT[:, :16], even(1)),
        ("hidden_size 32", "hidden_size 16"),
    ),
    "vocabularies": (
        DenseHead.from_full(WEIGHT, even(0)),
        DenseHead.from_full(WEIGHT[:60], even(1, 60)),
        ("64 + 0 tokens", "60 + 0 tokens"),
    ),
    "added tokens": (
        DenseHead.from_full(WEIGHT[:40], even(0, 32, added_vocab_size=8)),
        DenseHead.from_full(WEIGHT[:32], even(1, 32)),
        ("32 + 8 tokens", "32 + 0 tokens"),
    ),
    "edges": (
        DenseHead.from_full(WEIGHT, VocabShard.uneven(0, [30, 34])),
        DenseHead.from_full(WEIGHT, VocabShard.uneven(1, [34, 30])),
        ("multiples of 30", "multiples of 34"),
    ),
    "shares": (
        DenseHead.from_full(WEIGHT, even(0)),
        DenseHead.from_full(WEIGHT, VocabShard.uneven(1, [30, 34])),
        ("width 32", "width uneven"),
    ),
}


@pytest.mark.parametrize("name", UNLIKE)
@pytest.mark.parametrize("merge", ["two_gather", "packed", "full_gather"])
def test_heads_that_are_not_alike_are_refused_on_all_ranks_with_what_each_of_them_holds(name, merge):
    first, second, facts = UNLIKE[name]

    def program(rank: int) -> str:
        with pytest.raises(AdmissionError) as raised:
            head = (first, second)[rank]
            compute_candidates(torch.ones(1, 32), head, k=62, group=None, admission="agreed", merge=merge)
        return str(raised.value)

    run = SimulatedWorld(2).run(program)
    assert run.results[0] == run.results[1] and "\n" not in run.results[0]
    assert all(fact in run.results[0] for fact in facts)
    assert [[c.payload_bytes for c in ledger.collectives] for ledger in run.ledgers] == [[BALLOT_BYTES]] * 2


@pytest.mark.parametrize("widths", [[0, 64], [1, 63], [63, 1], [32, 32]])
@pytest.mark.parametrize("granularity", ["channel", "tensor"])
def test_shards_of_one_head_are_alike_however_little_a_rank_holds(widths, granularity):
    def program(rank: int):
        head = Fp8Head.from_full(WEIGHT[:, :16], VocabShard.uneven(rank, widths), granularity=granularity)
        return compute_candidates(torch.ones(1, 16), head, k=9, group=None, admission="agreed").ids.tolist()

    first, second = SimulatedWorld(2).run(program).results
    assert first == second and len(first[0]) == 9


def test_what_is_wrong_with_the_request_is_told_on_all_ranks_after_the_vote():
    def program(rank: int) -> str:
        with pytest.raises(SelectionError, match="k=65") as raised:
            head = DenseHead.from_full(WEIGHT, even(rank))
            compute_candidates(torch.ones(1, 32), head, k=65, group=None, admission="agreed")
        return str(raised.value)

    first, second = SimulatedWorld(2).run(program).results
    assert first == second
