"""Vote: ranks whose heads differ all raise alike, with every rank's reason, before anything is projected."""

from types import SimpleNamespace

import pytest
import torch

from tpbed.selector.admission import AdmissionError
from tpbed.selector.head import DenseHead
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
