"""Lattice, draft distribution, noise, walk, packet and verification: against plain loops, and by statistics.

Statistical tests are repeatable (seeded). Each rejects a right distribution with a chance below ERROR_RATE over all
seeds, by the bound of Laurent and Massart (2000) on the tail of chi-square: P(X >= d + 2 sqrt(d t) + 2 t) <= exp(-t).
"""

from math import inf, log, nan, sqrt

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tpbed.selector.errors import SelectionError
from tpbed.selector.lattice import TransitionTables, lattice_scores
from tpbed.selector.noise import keyed_uniforms
from tpbed.selector.packet import agree_on_draft, pack_draft, unpack_draft
from tpbed.selector.verify import accept_probability, residual, verify
from tpbed.selector.walk import Draft, DraftParams, Noise, draft_distribution, walk
from tpbed.tp.simulated import SimulatedWorld

ERROR_RATE = 1e-6


def fits(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Whether counts may come from the expected ones; cells with nothing expected must be empty."""
    live = expected > 0
    statistic = ((counts[live] - expected[live]) ** 2 / expected[live]).sum()
    degrees, t = live.sum() - 1, -log(ERROR_RATE)
    return not counts[~live].any() and statistic <= degrees + 2 * sqrt(degrees * t) + 2 * t


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def some_lattice(requests=2, slots=3, k=4, tokens=11, units=5, r=3):
    ids = torch.stack(
        [torch.randperm(tokens, generator=torch.Generator().manual_seed(n))[:k] for n in range(requests * slots)]
    )
    tables = TransitionTables(
        projection=draw(1, r, units), predecessor=draw(2, tokens, r), successor=draw(3, tokens, r)
    )
    return ids.view(requests, slots, k), draw(4, requests, slots, k), draw(5, requests, slots, units), tables


def test_lattice_scores_are_those_of_five_nested_loops():
    ids, unary, hidden, tables = some_lattice()
    ids[1, 1, 2] = -1
    anchor = torch.tensor([7, 0])
    scores = lattice_scores(ids, unary, hidden, anchor, tables).double().numpy()
    a, s, p = (t.double().numpy() for t in (tables.predecessor, tables.successor, tables.projection))
    for b, e, i, j in np.ndindex(scores.shape):
        before = anchor[b] if e == 0 else ids[b, e - 1, i]
        projected = p @ hidden[b, e].double().numpy()
        expected = float(unary[b, e, j]) + sum(a[max(before, 0)] * projected * s[ids[b, e, j]])
        if ids[b, e, j] == -1:
            assert scores[b, e, i, j] == -inf
        else:
            assert scores[b, e, i, j] == pytest.approx(expected, abs=1e-5)
    assert scores.shape == (2, 3, 4, 4)
    assert (scores[:, 0] == scores[:, 0, :1]).all()  # before slot 0 there is but the anchor


@pytest.mark.parametrize("shapes", [((3, 5), (11, 3), (12, 3)), ((3, 5), (11, 4), (11, 4)), ((3,), (11, 3), (11, 3))])
def test_tables_that_do_not_fit_each_other_are_refused(shapes):
    with pytest.raises(SelectionError, match="of one r and one vocabulary"):
        TransitionTables(**dict(zip(("projection", "predecessor", "successor"), map(torch.zeros, shapes), strict=True)))


def plain_q(scores: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """softmax, top-k, top-p, by the book."""
    if temperature == 0 or top_k == 1:
        return [float(j == scores.index(max(scores))) for j in range(len(scores))]
    if max(scores) == -inf:
        return [float(j == 0) for j in range(len(scores))]
    weights = np.exp((np.array(scores) - max(scores)) / temperature)
    order = sorted(range(len(scores)), key=lambda j: (-weights[j], j))[: top_k or None]
    total, kept, reached = sum(weights[j] for j in order), [], 0.0
    for j in order:
        if kept and reached >= top_p:
            break
        kept.append(j)
        reached += weights[j] / total
    return [weights[j] / sum(weights[i] for i in kept) if j in kept else 0.0 for j in range(len(scores))]


@given(
    scores=st.lists(st.sampled_from([-inf, -3.0, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=6),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    top_k=st.integers(0, 7),
    top_p=st.sampled_from([0.05, 0.4, 0.77, 1.0]),
)
def test_the_draft_distribution_is_that_of_the_book(scores, temperature, top_k, top_p):
    params = DraftParams.alike(1, temperature=temperature, top_k=top_k, top_p=top_p)
    q = draft_distribution(torch.tensor([[[scores]]]), params)
    assert q.flatten().tolist() == pytest.approx(plain_q(scores, temperature, top_k, top_p), abs=1e-6)


def test_greedy_and_sampled_requests_stand_in_one_batch():
    scores = draw(0, 2, 1, 3, 3)
    mixed = DraftParams(
        temperature=torch.tensor([0.0, 1.0]), top_k=torch.tensor([0, 2]), top_p=torch.tensor([1.0, 0.9])
    )
    q = draft_distribution(scores, mixed)
    alone = [DraftParams.alike(1), DraftParams.alike(1, temperature=1.0, top_k=2, top_p=0.9)]
    for request in range(2):
        assert torch.equal(q[request : request + 1], draft_distribution(scores[request : request + 1], alone[request]))
    assert mixed.greedy.tolist() == [True, False]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"temperature": value} for value in (-1.0, inf, nan)),
        {"top_k": -1},
        *({"top_p": value} for value in (0.0, 1.5, nan)),
    ],
)
def test_parameters_out_of_range_are_refused_as_numbers_and_as_tensors(wrong):
    name, value = next(iter(wrong.items()))
    with pytest.raises(SelectionError, match=name):
        DraftParams.alike(0, **wrong)
    sound = {"temperature": torch.ones(2), "top_k": torch.zeros(2).long(), "top_p": torch.ones(2)}
    sound[name][1] = value
    with pytest.raises(SelectionError, match=f"{name} holds {value}"):
        DraftParams(**sound)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": torch.ones(2).double()},
        {"top_k": torch.ones(2)},
        {"top_p": torch.ones(3)},
        {"temperature": torch.ones(2, 1)},
        {"top_p": 0.9},
    ],
)
def test_parameters_of_another_shape_or_dtype_are_refused(wrong):
    sound = {"temperature": torch.ones(2), "top_k": torch.zeros(2).long(), "top_p": torch.ones(2)}
    with pytest.raises(SelectionError, match=next(iter(wrong))):
        DraftParams(**sound | wrong)


def test_a_distribution_and_a_walk_take_parameters_of_as_many_requests_only():
    scores, ids = draw(0, 3, 1, 2, 2), torch.zeros(3, 1, 2).long()
    noise = Noise(rule="inverse_cdf", uniforms=torch.zeros(3, 1))
    for params in (DraftParams.alike(1), DraftParams.alike(2)):
        with pytest.raises(SelectionError, match="one for each request"):
            draft_distribution(scores, params)
        with pytest.raises(SelectionError, match="one for each request"):
            walk(ids, scores, params, noise)
    with pytest.raises(SelectionError, match="uniforms"):
        walk(ids, scores, DraftParams.alike(3), Noise(rule="inverse_cdf", uniforms=torch.zeros(1, 1)))


def test_a_noise_rule_that_is_not_known_is_refused():
    with pytest.raises(SelectionError, match="'foo' is none of inverse_cdf, gumbel"):
        Noise(rule="foo")


BROKEN_ROWS = [  # scores, q if greedy, q if sampled
    ([inf, 0.0, -inf], [1, 0, 0], [1, 0, 0]),
    ([0.0, inf, inf], [0, 1, 0], [0, 0.5, 0.5]),
    ([-inf, -inf, -inf], [1, 0, 0], [1, 0, 0]),
    ([0.0, nan, 5.0], [1, 0, 0], [1, 0, 0]),
    ([0.0, nan, inf], [1, 0, 0], [1, 0, 0]),
    ([0.0, 1e35, -inf], [0, 1, 0], [0, 1, 0]),
    ([-3e38, 3e38, 0.0], [0, 1, 0], [0, 1, 0]),
]


@pytest.mark.parametrize("scores, greedy, sampled", BROKEN_ROWS)
def test_rows_that_are_not_finite_have_a_distribution_by_a_stated_rule(scores, greedy, sampled):
    for temperature, expected in ((0.0, greedy), (1.0, sampled), (1e-6, sampled)):
        q = draft_distribution(torch.tensor([[[scores]]]), DraftParams.alike(1, temperature=temperature))
        assert q.flatten().tolist() == expected


@pytest.mark.parametrize("anchor", [torch.tensor([-1, 0]), torch.tensor([0, 11]), torch.zeros(2), torch.tensor([0])])
def test_an_anchor_without_a_row_in_the_tables_is_refused(anchor):
    ids, unary, hidden, tables = some_lattice()
    with pytest.raises(SelectionError, match="anchor"):
        lattice_scores(ids, unary, hidden, anchor, tables)


def test_a_greedy_walk_follows_the_best_of_the_row_that_was_chosen():
    ids = torch.tensor([[[5, 6], [7, 8]]])
    scores = torch.tensor([[[[0.0, 1.0], [9.0, 9.0]], [[1.0, 0.0], [0.0, 1.0]]]])  # of slot 0 only row 0 counts
    params = DraftParams.alike(1)
    draft = walk(ids, draft_distribution(scores, params), params, Noise(rule="inverse_cdf", uniforms=torch.zeros(1, 2)))
    assert draft.tokens.tolist() == [[6, 8]]  # 6 is candidate 1, so row 1 of slot 1
    assert draft.q_rows.tolist() == [[[0.0, 1.0], [0.0, 1.0]]]


def test_the_inverse_cdf_counts_what_it_has_passed_and_never_leaves_the_support():
    ids, q = torch.tensor([[[3, 4, 5]]]).expand(4, 1, 3), torch.tensor([[[[0.25, 0.75, 0.0]] * 3]]).expand(4, 1, 3, 3)
    params = DraftParams.alike(4, temperature=1.0)
    uniforms = torch.tensor([[0.0], [0.25], [0.999], [1.0]])
    draft = walk(ids, q, params, Noise(rule="inverse_cdf", uniforms=uniforms))
    assert draft.tokens.flatten().tolist() == [3, 4, 4, 4]


RULES = ["inverse_cdf", "gumbel"]


def noise_for(rule: str, requests: int, slots: int) -> Noise:
    if rule == "inverse_cdf":
        uniforms = torch.rand(requests, slots, generator=torch.Generator().manual_seed(8))
        return Noise(rule="inverse_cdf", uniforms=uniforms)
    return Noise(rule="gumbel", seeds=torch.arange(requests), positions=torch.full((requests,), 17))


@pytest.mark.parametrize("rule", RULES)
def test_sampled_paths_come_as_often_as_their_probability_says(rule):
    requests, slots, k = 40_000, 2, 3
    ids = torch.tensor([[4, 9, 2], [1, 8, 3]]).expand(requests, slots, k)
    scores = draw(3, 1, slots, k, k).expand(requests, -1, -1, -1)
    params = DraftParams.alike(requests, temperature=0.8)
    q = draft_distribution(scores[:1], DraftParams.alike(1, temperature=0.8))[0]
    draft = walk(ids, q.expand(requests, -1, -1, -1), params, noise_for(rule, requests, slots))
    place = (draft.tokens.unsqueeze(-1) == ids).int().argmax(-1)
    counts = np.bincount((place[:, 0] * k + place[:, 1]).numpy(), minlength=k * k)
    expected = (q[0, 0].unsqueeze(1) * q[1]).flatten().double().numpy() * requests
    assert fits(counts, expected)
    assert not fits(counts, np.roll(expected, 1))  # the test can fail


def permuted(ids, scores, order):
    return ids[..., order], scores[..., order][:, :, order]


def test_gumbel_drafts_do_not_depend_on_the_order_of_candidates_and_those_of_the_inverse_cdf_do():
    requests, slots, k = 200, 3, 4
    ids = torch.arange(k).expand(requests, slots, k)
    scores = draw(6, requests, slots, k, k)
    scores[:, 0] = scores[:, 0, :1]
    params, order = DraftParams.alike(requests, temperature=1.0), torch.tensor([2, 0, 3, 1])
    other_ids, other_scores = permuted(ids, scores, order)
    other_scores[:, 0] = other_scores[:, 0, :1]
    for rule in RULES:
        noise = noise_for(rule, requests, slots)
        one = walk(ids, draft_distribution(scores, params), params, noise).tokens
        other = walk(other_ids, draft_distribution(other_scores, params), params, noise).tokens
        assert torch.equal(one, other) == (rule == "gumbel")


def test_keyed_uniforms_are_uniform_and_no_part_of_the_key_is_idle():
    key = torch.arange(50_000)
    for uniforms in (
        keyed_uniforms(key, torch.tensor(3), torch.tensor(5)),
        keyed_uniforms(torch.tensor(3), key, torch.tensor(5)),
        keyed_uniforms(torch.tensor(3), torch.tensor(5), key),
    ):
        assert uniforms.min() > 0 and uniforms.max() < 1
        assert fits(np.histogram(uniforms.numpy(), bins=64, range=(0, 1))[0], np.full(64, 50_000 / 64))
        pairs = (uniforms[:-1] * 8).long() * 8 + (uniforms[1:] * 8).long()  # neighbours tell nothing of each other
        assert fits(np.bincount(pairs.numpy(), minlength=64), np.full(64, 49_999 / 64))
    one = keyed_uniforms(torch.tensor(1), torch.tensor(2), torch.tensor(3))
    assert one != keyed_uniforms(torch.tensor(1), torch.tensor(3), torch.tensor(2))


def test_noise_that_is_not_there_is_named():
    ids, q, params = torch.zeros(1, 1, 2).long(), torch.full((1, 1, 2, 2), 0.5), DraftParams.alike(1, temperature=1.0)
    with pytest.raises(SelectionError, match="uniforms"):
        walk(ids, q, params, Noise(rule="inverse_cdf"))
    with pytest.raises(SelectionError, match="seeds and positions"):
        walk(ids, q, params, Noise(rule="gumbel", seeds=torch.zeros(1)))


def some_draft(seed: int, requests=2, slots=3, k=4):
    ids = torch.randint(0, 2**31, (requests, slots, k), generator=torch.Generator().manual_seed(seed))
    q = torch.softmax(draw(seed, requests, slots, k), -1)
    return Draft(tokens=ids[..., 0].contiguous(), q_rows=q), ids


def test_a_packet_holds_every_bit():
    draft, ids = some_draft(0)
    draft.q_rows[0, 0, :3] = torch.tensor([-0.0, float("nan"), 2.0**-149])
    found, found_ids = unpack_draft(pack_draft(draft, ids))
    assert torch.equal(found.tokens, draft.tokens) and torch.equal(found_ids, ids)
    assert torch.equal(found.q_rows.view(torch.int32), draft.q_rows.view(torch.int32))


def test_all_ranks_hold_the_first_ranks_draft_after_one_broadcast():
    def program(rank: int):
        draft, ids = some_draft(rank)
        found, found_ids = agree_on_draft(draft, ids, group=dist.group.WORLD)
        return found.tokens.tolist(), found.q_rows.tolist(), found_ids.tolist()

    run = SimulatedWorld(3).run(program)
    draft, ids = some_draft(0)
    assert run.results == ((draft.tokens.tolist(), draft.q_rows.tolist(), ids.tolist()),) * 3
    assert [[(c.op, c.payload_bytes) for c in ledger.collectives] for ledger in run.ledgers] == [
        [("broadcast", 2 * 3 * 9 * 8)]
    ] * 3


def test_what_makes_no_packet_is_refused_before_the_broadcast():
    draft, ids = some_draft(0)
    with pytest.raises(SelectionError, match="do not make a packet"):
        agree_on_draft(Draft(tokens=draft.tokens, q_rows=draft.q_rows.half()), ids, group=None)


distributions = (
    st.lists(st.integers(0, 5), min_size=4, max_size=4).filter(any).map(lambda w: torch.tensor(w).double() / sum(w))
)


@given(target=distributions, q=distributions)
def test_accepted_and_redrawn_tokens_together_follow_the_target_exactly(target, q):
    every = torch.arange(4)
    rows = (t.expand(4, 4) for t in (target, q))
    accepted = q * accept_probability(*rows, every)
    rejected = 1 - accepted.sum()
    assert torch.allclose(accepted + rejected * residual(target[None], q[None])[0], target, atol=1e-12)


def test_what_verification_lets_through_follows_the_target_token_by_token():
    requests, slots, tokens = 40_000, 2, 3
    target = torch.softmax(draw(1, slots + 1, tokens), -1)
    q = torch.softmax(draw(2, slots, tokens), -1)
    chance = torch.Generator().manual_seed(4)
    drafted = torch.stack([torch.multinomial(row, requests, replacement=True, generator=chance) for row in q], 1)
    uniforms, redraw = torch.rand(requests, slots, generator=chance), torch.rand(requests, generator=chance)
    every = (t.expand(requests, -1, -1) for t in (target, q))
    accepted, last = verify(*every, drafted, uniforms, redraw)
    first = torch.where(accepted > 0, drafted[:, 0], last)
    assert fits(np.bincount(first.numpy(), minlength=tokens), target[0].double().numpy() * requests)
    second = torch.where(accepted > 1, drafted[:, 1], last)[accepted >= 1]
    assert fits(np.bincount(second.numpy(), minlength=tokens), target[1].double().numpy() * len(second))
    third = last[accepted == 2]
    assert fits(np.bincount(third.numpy(), minlength=tokens), target[2].double().numpy() * len(third))
    assert not fits(np.bincount(first.numpy(), minlength=tokens), q[0].double().numpy() * requests)


def test_a_slot_without_a_draft_is_rejected_and_the_targets_own_token_follows():
    requests = 20_000
    target = torch.softmax(draw(1, 3, 4), -1)
    q = torch.softmax(draw(2, 2, 4), -1)
    drafted = torch.tensor([[2, -1]]).expand(requests, -1)
    uniforms, redraw = torch.zeros(requests, 2), torch.rand(requests, generator=torch.Generator().manual_seed(3))
    for noise_in_q in (q, torch.stack([q[0], torch.full((4,), nan)])):
        every = (t.expand(requests, -1, -1) for t in (target, noise_in_q))
        accepted, following = verify(*every, drafted, uniforms, redraw)
        assert accepted.unique().tolist() == [1]
        assert fits(np.bincount(following.numpy(), minlength=4), target[1].double().numpy() * requests)
        assert not fits(
            np.bincount(following.numpy(), minlength=4), residual(target, target.roll(1, 1))[1].numpy() * requests
        )


def test_a_request_without_a_draft_leaves_its_neighbours_as_they_are():
    target, q = torch.softmax(draw(1, 2, 3, 4), -1), torch.softmax(draw(2, 2, 2, 4), -1)
    drafted, uniforms, redraw = torch.tensor([[-1, 3], [1, 2]]), torch.full((2, 2), 0.4), torch.full((2,), 0.6)
    both = verify(target, q, drafted, uniforms, redraw)
    alone = verify(target[1:], q[1:], drafted[1:], uniforms[1:], redraw[1:])
    assert both[0][0] == 0 and [t[1].item() for t in both] == [t.item() for t in alone]


def test_without_a_slot_the_targets_token_is_all_that_comes():
    target = torch.tensor([[[0.2, 0.8]], [[0.6, 0.4]]])
    nothing = torch.zeros(2, 0)
    accepted, following = verify(target, torch.zeros(2, 0, 2), nothing.long(), nothing, torch.tensor([0.5, 0.5]))
    assert (accepted.tolist(), following.tolist()) == ([0, 0], [1, 0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"drafted": torch.tensor([[4]])},
        {"drafted": torch.tensor([[-2]])},
        {"drafted": torch.tensor([[0.0]])},
        {"target": torch.full((1, 1, 4), 0.25)},
        {"q": torch.full((1, 1, 3), 0.25)},
        {"uniforms": torch.zeros(1)},
        {"redraw": torch.zeros(2)},
    ],
)
def test_what_cannot_be_verified_is_refused_by_name(wrong):
    sound = {
        "target": torch.full((1, 2, 4), 0.25),
        "q": torch.full((1, 1, 4), 0.25),
        "drafted": torch.tensor([[0]]),
        "uniforms": torch.zeros(1, 1),
        "redraw": torch.zeros(1),
    }
    verify(**sound)
    with pytest.raises(SelectionError, match=next(iter(wrong))):
        verify(**sound | wrong)
