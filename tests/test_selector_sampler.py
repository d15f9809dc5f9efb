"""DraftSampler on the CPU: the answer of the stages one by one, from buffers that keep nothing of other batches."""

from dataclasses import replace
from math import inf, nan

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tpbed.selector.admission import AdmissionError
from tpbed.selector.candidates import Candidates
from tpbed.selector.errors import SelectionError
from tpbed.selector.fp8 import Fp8Head
from tpbed.selector.head import DenseHead
from tpbed.selector.lattice import TransitionTables, lattice_scores
from tpbed.selector.reference import reference_logits, reference_topk
from tpbed.selector.sampler import EAGER_VARIABLE, DraftSampler, Eager
from tpbed.selector.sampler_inputs import check_inputs
from tpbed.selector.select import compute_candidates
from tpbed.selector.shard import VocabShard
from tpbed.selector.verify import verify
from tpbed.selector.vote import BALLOT_BYTES
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


def told_by_all(world_size: int, program, *, votes: int = 0) -> str:
    """The one SelectionError that every rank raises, after so many votes and no other collective."""

    def refused(rank: int) -> str:
        with pytest.raises(SelectionError) as raised:
            program(rank)
        return str(raised.value)

    run = SimulatedWorld(world_size).run(refused)
    assert [ledger.end.how for ledger in run.ledgers] == ["returned"] * world_size
    assert [[c.payload_bytes for c in ledger.collectives] for ledger in run.ledgers] == [
        [BALLOT_BYTES] * votes
    ] * world_size
    assert len(set(run.results)) == 1
    return run.results[0]


@pytest.mark.parametrize("merge", ["full_gather", "foo"])
def test_a_merge_that_the_selector_refuses_is_refused_on_every_rank_before_any_collective(merge):
    def head_of(rank: int) -> DenseHead:
        return DenseHead.from_full(WEIGHT, VocabShard.uneven(rank, [50, 100]))

    def selector(rank: int) -> None:
        compute_candidates(torch.ones(1, UNITS), head_of(rank), k=K, group=None, merge=merge)

    def sampler(rank: int) -> None:
        DraftSampler(head_of(rank), TABLES, k=K, slots=SLOTS, merge=merge)

    by_sampler = told_by_all(2, sampler, votes=1)
    assert by_sampler == told_by_all(2, selector)


@pytest.mark.parametrize("wrong", [{"k": 0}, {"k": VOCAB + 1}, {"k": 2.5}, {"k": "4"}, {"k": True}])
def test_a_k_that_no_head_serves_is_refused_when_a_sampler_is_made(wrong):
    assert "k=" in told_by_all(2, lambda rank: sampler_of(rank, 2, **wrong), votes=1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"noise": "foo"},
        {"slots": 1.5},
        {"sizes": (2.0,)},
        {"multiplier": 0.0},
        {"multiplier": nan},
        {"multiplier": inf},
        {"softcap": nan},
    ],
)
def test_a_sampler_that_could_propose_nothing_is_refused_when_it_is_made(wrong):
    assert told_by_all(2, lambda rank: sampler_of(rank, 2, **wrong))


def test_a_reason_against_graphs_that_one_rank_has_is_that_of_all():
    """Or the others would capture, and wait in a merge that it never joins."""
    found = SimulatedWorld(3).run(lambda rank: sampler_of(rank, 3, eager=rank == 1).reasons).results
    assert found == ((Eager.ASKED, Eager.NO_CUDA),) * 3


@pytest.mark.parametrize("odd", ["no method", "another dtype", "another size"])
def test_a_head_that_one_rank_cannot_project_alike_is_refused_by_all_when_they_propose(odd):
    def head_of(rank: int):
        shard = VocabShard.even(rank, 2, VOCAB)
        if odd == "no method":
            head = Fp8Head.from_full(WEIGHT, shard)
            return replace(head, quant_method=None) if rank == 1 else head
        weight = WEIGHT.double().to(torch.bfloat16) if odd == "another dtype" else WEIGHT[:, :8]
        return DenseHead.from_full(weight if rank == 1 else WEIGHT, shard)

    def program(rank: int) -> tuple[str, tuple[Eager, ...]]:
        sampler = DraftSampler(head_of(rank), TABLES, k=K, slots=SLOTS)
        with pytest.raises(AdmissionError) as raised:
            sampler.propose(*batch(0, 2))
        return str(raised.value), sampler.reasons

    run = SimulatedWorld(2).run(program)
    assert [ledger.end.how for ledger in run.ledgers] == ["returned"] * 2
    assert run.results[0] == run.results[1] and run.results[0][1] == (Eager.NO_CUDA, Eager.UNSUPPORTED_HEAD)


def test_tables_of_another_vocabulary_or_model_are_refused_when_a_sampler_is_made():
    few = replace(TABLES, predecessor=TABLES.predecessor[:-1], successor=TABLES.successor[:-1])
    for tables in (few, replace(TABLES, projection=torch.zeros(R, UNITS + 1))):
        with pytest.raises(SelectionError, match="give the tables of the model"):
            DraftSampler(DenseHead.from_full(WEIGHT, VocabShard.even(0, 1, VOCAB)), tables, k=K, slots=SLOTS)


@pytest.mark.parametrize("rule", ["gumbel", "inverse_cdf"])
@pytest.mark.parametrize("sizes", [(8,), (1,)])
def test_noise_that_the_rule_needs_is_never_made_up(rule, sizes):
    hidden, anchor, params, _ = batch(0, 2)
    for noise in (Noise(rule=rule), Noise(rule=rule, seeds=torch.arange(2))):
        with pytest.raises(SelectionError, match=f"{rule} noise needs"):
            sampler_of(noise=rule, sizes=sizes).propose(hidden, anchor, params, noise)


REQUESTS = 5
WRONG_INPUTS = {
    "params of one request": {"params": DraftParams.alike(1)},
    "params of too few": {"params": DraftParams.alike(3)},
    "params of too many": {"params": DraftParams.alike(8)},
    "params of another kind": {"params": 0.5},
    "seeds of one request": {"noise": Noise(rule="gumbel", seeds=torch.arange(1), positions=torch.arange(5))},
    "seeds of too few": {"noise": Noise(rule="gumbel", seeds=torch.arange(3), positions=torch.arange(5))},
    "positions of too many": {"noise": Noise(rule="gumbel", seeds=torch.arange(5), positions=torch.arange(8))},
    "seeds that are no integers": {"noise": Noise(rule="gumbel", seeds=torch.rand(5), positions=torch.arange(5))},
    "noise of another kind": {"noise": torch.rand(5, SLOTS)},
    "uniforms of a request": {"noise": Noise(rule="inverse_cdf", uniforms=torch.rand(5))},
    "uniforms of one row": {"noise": Noise(rule="inverse_cdf", uniforms=torch.rand(1, SLOTS))},
    "uniforms in float64": {"noise": Noise(rule="inverse_cdf", uniforms=torch.rand(5, SLOTS).double())},
    "an anchor of floats": {"anchor": torch.zeros(5)},
    "an anchor in int32": {"anchor": torch.zeros(5).int()},
    "a negative anchor": {"anchor": torch.full((5,), -1)},
    "an anchor beyond the vocabulary": {"anchor": torch.full((5,), VOCAB)},
    "an anchor of too few": {"anchor": torch.zeros(3).long()},
    "no hidden states": {"hidden": None},
    "hidden states in float64": {"hidden": torch.zeros(5, SLOTS, UNITS).double()},
    "hidden states of one slot": {"hidden": torch.zeros(5, 1, UNITS)},
}


@pytest.mark.parametrize("wrong", WRONG_INPUTS)
def test_inputs_that_do_not_fit_are_refused_in_the_same_words_at_all_sizes_and_by_no_other_error(wrong):
    """Buffers would have broadcast some of them over the batch, or cut it to the first request."""
    changed, said = WRONG_INPUTS[wrong], set()
    hidden, anchor, params, noise = batch(0, REQUESTS)
    given = {"hidden": hidden, "anchor": anchor, "params": params, "noise": noise} | changed
    for sizes in ((1, 2, 4, 8), (5,), (2,)):
        with pytest.raises(SelectionError) as raised:
            sampler_of(sizes=sizes, noise=getattr(given["noise"], "rule", "gumbel")).propose(**given)
        said.add(str(raised.value))
    assert len(said) == 1 and ": give" in said.pop()


def test_hidden_states_are_read_in_the_dtype_of_the_tables_at_all_sizes():
    hidden, *rest = batch(0, REQUESTS)
    tables = TransitionTables(
        projection=TABLES.projection.bfloat16(),
        predecessor=TABLES.predecessor.bfloat16(),
        successor=TABLES.successor.bfloat16(),
    )
    head = DenseHead.from_full(WEIGHT, VocabShard.even(0, 1, VOCAB))
    found = [
        DraftSampler(head, tables, k=K, slots=SLOTS, sizes=sizes).propose(hidden * 1.0009, *rest)
        for sizes in ((8,), (2,))
    ]
    assert torch.equal(found[0].draft.q_rows, found[1].draft.q_rows) and torch.equal(found[0].ids, found[1].ids)


def test_tables_and_hidden_states_that_are_trained_leave_no_gradient_in_the_buffers():
    hidden, *rest = batch(0, 2)
    trained = replace(TABLES, projection=TABLES.projection.clone().requires_grad_())
    head = DenseHead.from_full(WEIGHT, VocabShard.even(0, 1, VOCAB))
    sampler = DraftSampler(head, trained, k=K, slots=SLOTS)
    for _ in range(2):
        proposal = sampler.propose(hidden.clone().requires_grad_(), *rest)
    assert not proposal.draft.q_rows.requires_grad


@pytest.mark.parametrize("bad", [nan, inf, 3e38])
@pytest.mark.parametrize("rule", ["gumbel", "inverse_cdf"])
def test_a_request_of_broken_hidden_states_drafts_nothing_and_is_verified_with_its_neighbours(bad, rule):
    hidden, anchor, _, _ = batch(0, 2)
    hidden[0, 1] = bad
    params = DraftParams.alike(2, temperature=1.0)
    noise = Noise(rule=rule, uniforms=torch.full((2, SLOTS), 0.5), seeds=torch.arange(2), positions=torch.arange(2))
    found = sampler_of(noise=rule).propose(hidden, anchor, params, noise)
    assert found.draft.q_rows.isfinite().all()
    q = torch.zeros(2, SLOTS, VOCAB).scatter(-1, found.ids.clamp_min(0), found.draft.q_rows)
    target = torch.full((2, SLOTS + 1, VOCAB), 1 / VOCAB)
    accepted, following = verify(target, q, found.draft.tokens, torch.zeros(2, SLOTS), torch.full((2,), 0.5))
    no_draft = found.draft.tokens[0] == -1
    assert accepted[0] <= (int(no_draft.int().argmax()) if no_draft.any() else SLOTS)
    assert (following >= 0).all() and (following < VOCAB).all()


class Launches(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_checks_launch_nothing_on_a_device():
    """A kernel that looks at values would be part of every graph, and reading its answer would wait for the device."""
    real, whole = torch.zeros(2, device="meta"), torch.zeros(2, dtype=torch.int64, device="meta")
    hidden = torch.zeros(2, SLOTS, UNITS, device="meta")
    with Launches() as launched:
        params = DraftParams(temperature=real, top_k=whole, top_p=real)
        noise = Noise(rule="gumbel", seeds=whole, positions=whole)
        check_inputs(hidden, whole, params, noise, slots=SLOTS, tables=TABLES)
    assert launched.count == 0
