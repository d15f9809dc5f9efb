"""Degenerate configurations: a right answer on every rank, or the same refusal on every rank; never a hang."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tpbed.selector.errors import SelectionError
from tpbed.selector.head import DenseHead
from tpbed.selector.packed import keyed_topk
from tpbed.selector.reference import reference_topk
from tpbed.selector.select import compute_candidates
from tpbed.selector.shard import VocabShard
from tpbed.tp.simulated import SimulatedWorld

MERGES = ["two_gather", "packed", "full_gather"]


def answers(logits: torch.Tensor, org: int, added: int, world_size: int, k: int, pad_to: int, merge: str, units: int):
    """What each rank gets: (ids, values), or the refusal."""
    rows = len(logits)

    def program(rank: int):
        try:
            shard = VocabShard.even(rank, world_size, org, added_vocab_size=added, pad_to=pad_to)
            weight = torch.zeros(org + added, units).index_copy(1, torch.arange(rows), logits.T)
            head = DenseHead.from_full(weight, shard, padding=1e9)
            found = compute_candidates(torch.eye(units)[:rows], head, k=k, group=None, merge=merge)
        except SelectionError as error:
            return str(error)
        return found.ids.tolist(), found.values.tolist()

    run = SimulatedWorld(world_size).run(program)
    assert run.stuck == () and [ledger.end.how for ledger in run.ledgers] == ["returned"] * world_size
    return run.results


@st.composite
def configurations(draw):
    org, added = draw(st.integers(1, 40)), draw(st.integers(0, 6))
    rows = draw(st.integers(0, 3))
    value = st.sampled_from([-2.0, 0.0, 1.0, 3.0])
    logits = [draw(st.lists(value, min_size=org + added, max_size=org + added)) for _ in range(rows)]
    return {
        "logits": torch.tensor(logits).view(rows, org + added),
        "org": org,
        "added": added,
        "world_size": draw(st.sampled_from([1, 2, 3, 4])),
        "k": draw(st.integers(0, 45)),
        "pad_to": draw(st.sampled_from([1, 4, 8])),
        "merge": draw(st.sampled_from(MERGES)),
        "units": 4,
    }


def case(org: int, k: int, world_size: int, *, added: int = 0, rows: int = 2, pad_to: int = 8, merge: str = "packed"):
    logits = torch.arange(rows * (org + added)).remainder(5).float().view(rows, org + added)
    return {
        "logits": logits, "org": org, "added": added, "world_size": world_size, "k": k, "pad_to": pad_to,
        "merge": merge, "units": 4,
    }  # fmt: skip


def divides(config) -> bool:
    """Whether org columns, padded, and those that added tokens take beyond them, both divide by the ranks."""
    unit, ranks = config["pad_to"], config["world_size"]
    org = -(-config["org"] // unit) * unit
    added = -(-(org + config["added"]) // unit) * unit - org
    return org % ranks == 0 and added % ranks == 0


@given(config=configurations())
@example(config=case(org=10, k=11, world_size=4))  # k above org
@example(config=case(org=10, k=9, world_size=4))  # k above what a shard holds, and ranks with nothing at all
@example(config=case(org=1, k=1, world_size=4, merge="full_gather"))
@example(config=case(org=10, k=10, world_size=2, added=6))  # k = V, and added tokens that must not be chosen
@example(config=case(org=10, k=3, world_size=2, rows=0))  # no row
@example(config=case(org=10, k=3, world_size=3))  # 16 columns that three ranks cannot share
@settings(max_examples=150)
def test_every_configuration_is_answered_rightly_or_refused_alike(config):
    found = answers(**config)
    assert all(answer == found[0] for answer in found)
    org, k = config["org"], config["k"]
    assert isinstance(found[0], str) == (not 1 <= k <= org or not divides(config))
    if isinstance(found[0], str):
        return
    expected_ids, expected_values = reference_topk(config["logits"][:, :org], k)
    assert found[0] == (expected_ids.tolist(), expected_values.tolist())


@pytest.mark.parametrize("merge", MERGES)
def test_ids_above_2_to_the_24_stay_exact(merge):
    org = 2**24 + 10
    best = [2**24 + 1, 2**24 + 3, 5]

    def program(rank: int):
        weight = torch.zeros(org, 1, dtype=torch.bfloat16)
        weight[best] = torch.tensor([[3.0], [3.0], [2.0]], dtype=torch.bfloat16)
        head = DenseHead.from_full(weight, VocabShard.even(rank, 2, org))
        found = compute_candidates(torch.ones(1, 1), head, k=3, group=None, merge=merge, topk=keyed_topk)
        return found.ids.tolist()

    assert SimulatedWorld(2).run(program).results == ([best],) * 2


def test_rows_that_no_token_stands_for_are_masked_by_the_vocabulary_that_is_given():
    """A config may call dead rows its vocabulary: with the decodable size as org they are padding like any other."""
    rows, decodable, k = 16, 11, 11
    logits = torch.arange(rows).float().view(1, -1)  # the dead rows score best

    def program(rank: int):
        shard = VocabShard.even(rank, 2, decodable, pad_to=rows)
        head = DenseHead(weight=logits.T[rank * 8 : rank * 8 + 8].contiguous(), shard=shard)
        return compute_candidates(torch.ones(1, 1), head, k=k, group=None, merge="packed").ids.tolist()

    best_first = list(range(decodable))[::-1]
    assert SimulatedWorld(2).run(program).results == ([best_first],) * 2
