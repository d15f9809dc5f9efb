"""DraftSampler on the CPU: the answer of the stages one by one, from buffers that keep nothing of other batches."""

from dataclasses import replace

import pytest
import torch

from tpbed.selector.admission import AdmissionError
from tpbed.selector.candidates import Candidates
from tpbed.selector.errors import SelectionError
from tpbed.selector.fp8 import Fp8Head
from tpbed.selector.head import DenseHead
from tpbed.selector.lattice import TransitionTables, lattice_scores
from tpbed.selector.reference import reference_logits, reference_topk
from tpbed.selector.sampler import EAGER_VARIABLE, DraftSampler, Eager
from tpbed.selector.shard import VocabShard
from tpbed.selector.walk import DraftParams, Noise, draft_distribution, walk
from tpbed.tp.simulated import SimulatedWorld

VOCAB, UNITS, R, K, SLOTS = 150, 16, 6, 4, 3


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()  # sums are exact


TABLES = TransitionTables(projection=draw(1, R, UNITS), predecessor=draw(2, VOCAB, R), successor=draw(3, VOCAB, R))
WEIGHT = draw(4, VOCAB, UNITS)


def sampler_of(rank: int = 0, world_size: int = 1, **options) -> DraftSampler:
    head = DenseHead.from_full(WEIGHT, VocabShard.even(rank, world_size, VOCAB), padding=99.0)
    return DraftSampler(head, TABLES, **{"k": K, "slots": SLOTS, **options})


def batch(seed: int, requests: int) -> tuple[torch.Tensor, torch.Tensor, DraftParams, Noise]:
    """Greedy and sampled requests in turn."""
    params = DraftParams(
        temperature=torch.arange(requests).remainder(2) * 5.0,
        top_k=torch.full((requests,), 3),
        top_p=torch.full((requests,), 0.95),
    )
    noise = Noise(rule="gumbel", seeds=torch.arange(requests) + seed, positions=torch.arange(requests) * 7)
    anchor = torch.arange(requests) * 3 % VOCAB
    return draw(100 + seed, requests, SLOTS, UNITS), anchor, params, noise


def stage_by_stage(hidden, anchor, params, noise):
    """The same without a sampler, from the reference's candidates."""
    ids, values = reference_topk(reference_logits(hidden.flatten(0, 1), WEIGHT), K)
    merged = Candidates(ids=ids, values=values.float())
    ids, unary = (t.view(-1, SLOTS, K) for t in (merged.ids, merged.values))
    q = draft_distribution(lattice_scores(ids, unary, hidden, anchor, TABLES), params)
    return walk(ids, q, params, noise), ids


def same(proposal, expected) -> bool:
    draft, ids = expected
    pairs = ((proposal.draft.tokens, draft.tokens), (proposal.draft.q_rows, draft.q_rows), (proposal.ids, ids))
    return all(torch.equal(found, wanted) for found, wanted in pairs)


@pytest.mark.parametrize("requests", [0, 1, 2, 3, 8, 11])
def test_a_proposal_is_what_the_stages_give_one_by_one_at_any_batch_size(requests):
    given = batch(0, requests)
    proposal = sampler_of().propose(*given)
    assert same(proposal, stage_by_stage(*given))
    assert proposal.eager is (Eager.TOO_LARGE if requests > 8 else Eager.NO_CUDA)


@pytest.mark.parametrize("merge", ["two_gather", "packed", "full_gather"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_proposes_the_same_at_every_tp_with_every_merge(world_size, merge):
    given = batch(1, 3)

    def program(rank: int) -> bool:
        proposal = sampler_of(rank, world_size, merge=merge, agree=True).propose(*given)
        return same(proposal, stage_by_stage(*given))

    assert all(SimulatedWorld(world_size).run(program).results)


def test_buffers_keep_nothing_of_a_larger_batch_or_another_input():
    sampler = sampler_of()
    for seed, requests in enumerate([8, 3, 5, 8, 1]):
        given = batch(seed, requests)
        assert same(sampler.propose(*given), stage_by_stage(*given))


def test_a_proposal_is_not_written_to_by_the_next():
    sampler, given = sampler_of(), batch(0, 4)
    first = sampler.propose(*given)
    sampler.propose(*batch(5, 4))
    assert same(first, stage_by_stage(*given))


def test_inputs_are_left_as_they_were():
    hidden, anchor, params, noise = batch(0, 3)
    before = hidden.clone(), anchor.clone()
    sampler_of().propose(hidden, anchor, params, noise)
    assert torch.equal(hidden, before[0]) and torch.equal(anchor, before[1])


def test_every_reason_that_holds_here_is_given_and_has_a_message(monkeypatch):
    assert sampler_of().reasons == (Eager.NO_CUDA,) and not sampler_of().captured
    assert sampler_of(slots=0).reasons == (Eager.NO_CUDA, Eager.NO_SLOTS)
    assert sampler_of(eager=True).reasons == (Eager.ASKED, Eager.NO_CUDA)
    monkeypatch.setenv(EAGER_VARIABLE, "1")
    assert sampler_of().reasons[0] is Eager.ASKED
    monkeypatch.setenv(EAGER_VARIABLE, "0")
    assert sampler_of().reasons[0] is Eager.NO_CUDA
    assert len({reason.value for reason in Eager}) == len(Eager)


def test_a_head_that_cannot_be_projected_is_a_reason_and_raises_when_it_proposes():
    head = Fp8Head.from_full(WEIGHT, VocabShard.even(0, 1, VOCAB))
    sampler = DraftSampler(replace(head, quant_method=None), TABLES, k=K, slots=SLOTS)
    assert sampler.reasons == (Eager.NO_CUDA, Eager.UNSUPPORTED_HEAD)
    with pytest.raises(AdmissionError, match="neither"):
        sampler.propose(*batch(0, 2))


def test_a_block_without_slots_proposes_nothing():
    hidden, anchor, params, noise = batch(0, 2)
    proposal = sampler_of(slots=0).propose(hidden[:, :0], anchor, params, noise)
    assert proposal.draft.tokens.shape == (2, 0) and proposal.ids.shape == (2, 0, K)


@pytest.mark.parametrize("wrong", [{"sizes": ()}, {"sizes": (0, 2)}, {"slots": -1}])
def test_sizes_that_are_none_are_refused(wrong):
    with pytest.raises(SelectionError, match="1 or more requests"):
        sampler_of(**wrong)


def test_shapes_and_rules_it_was_not_made_for_are_refused():
    hidden, anchor, params, noise = batch(0, 2)
    with pytest.raises(SelectionError, match="not \\(requests, 3, 16\\)"):
        sampler_of().propose(hidden[:, :2], anchor, params, noise)
    with pytest.raises(SelectionError, match="made for 'inverse_cdf'"):
        sampler_of(noise="inverse_cdf").propose(hidden, anchor, params, noise)
    with pytest.raises(SelectionError, match="k=151"):
        sampler_of(k=151).propose(hidden, anchor, params, noise)
