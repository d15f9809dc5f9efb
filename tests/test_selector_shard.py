"""VocabShard: the arithmetic of who holds which token, and the layout of a rank's rows."""

import pickle
from math import gcd, lcm

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tpbed.selector.shard import NO_TOKEN, ShardError, VocabShard

GEOMETRIES = {  # name: (world_size, org, added, pad_to), width, num_org per rank, num_added per rank
    "GA": ((2, 1001, 0, 64), 512, [512, 489], [0, 0]),
    "GB": ((4, 1000, 0, 64), 256, [256, 256, 256, 232], [0, 0, 0, 0]),
    "GC": ((4, 130, 0, 64), 48, [48, 48, 34, 0], [0, 0, 0, 0]),
    "GD": ((8, 65, 0, 64), 16, [16, 16, 16, 16, 1, 0, 0, 0], [0] * 8),
    "GE": ((4, 1024, 16, 64), 256 + 16, [256] * 4, [16, 0, 0, 0]),
    "GF": ((2, 1024, 0, 64), 512, [512, 512], [0, 0]),
    "GG": ((3, 1000, 0, 192), 384, [384, 384, 232], [0, 0, 0]),
}
WORKED = {  # world_size, org_vocab_size -> width, num_org of the last rank
    (1, 248320): (248320, 248320),
    (2, 248320): (124160, 124160),
    (4, 248320): (62080, 62080),
    (8, 248320): (31040, 31040),
    (8, 151936): (18992, 18992),
    (4, 32003): (8016, 7955),
    (3, 130): (64, 2),
}


@st.composite
def divisible_cases(draw):
    """(world_size, org, added, pad_to) that `even` accepts: pad_to is a multiple of world_size."""
    world_size = draw(st.integers(1, 9))
    pad_to = world_size * draw(st.integers(1, 20))
    return world_size, draw(st.integers(1, 700)), draw(st.integers(0, 150)), pad_to


def shards(world_size, org, added=0, pad_to=64):
    return [VocabShard.even(rank, world_size, org, added, pad_to) for rank in range(world_size)]


@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_geometries_of_the_fault_list_have_the_widths_and_real_rows_given_there(name):
    case, width, num_org, num_added = GEOMETRIES[name]
    held = shards(*case)
    assert [s.width for s in held] == [width] * case[0]
    assert [s.num_org for s in held] == num_org
    assert [s.num_added for s in held] == num_added
    assert [s.org_start for s in held] == [sum(num_org[:rank]) for rank in range(case[0])]


def test_geometry_gh_is_uneven_and_unpadded():
    held = [VocabShard.uneven(rank, [501, 500]) for rank in range(2)]
    assert [(s.org_start, s.num_org, s.width, s.org_vocab_size) for s in held] == [
        (0, 501, 501, 1001),
        (501, 500, 500, 1001),
    ]
    assert not any(s.equal_widths for s in held)


@pytest.mark.parametrize(("world_size", "org"), WORKED)
def test_worked_examples_of_real_vocabularies(world_size, org):
    last = shards(world_size, org)[-1]
    assert (last.width, last.num_org) == WORKED[world_size, org]


@given(case=divisible_cases())
@example(case=(8, 65, 0, 64))  # three ranks hold padding only
@example(case=(4, 1024, 16, 64))  # added rows on one rank only
@settings(deadline=None)
def test_every_token_is_held_exactly_once_and_org_tokens_in_rank_order(case):
    _world_size, org, added, _ = case
    held = shards(*case)
    org_ids = [i for s in held for i in s.token_ids()[: s.num_org].tolist()]
    all_ids = sorted(i for s in held for i in s.token_ids().tolist() if i != NO_TOKEN)
    assert org_ids == list(range(org))
    assert all_ids == list(range(org + added))


@given(case=divisible_cases())
@settings(deadline=None)
def test_rows_come_as_real_org_then_org_padding_then_real_added_then_added_padding(case):
    _world_size, org, _added, _pad_to = case
    for s in shards(*case):
        kinds = ["pad" if i == NO_TOKEN else "org" if i < org else "added" for i in s.token_ids().tolist()]
        org_padding, added_padding = s.num_org_padded - s.num_org, s.width - s.num_org_padded - s.num_added
        assert kinds == ["org"] * s.num_org + ["pad"] * org_padding + ["added"] * s.num_added + ["pad"] * added_padding


@given(case=divisible_cases())
@settings(deadline=None)
def test_widths_are_equal_and_padded_to_the_unit_and_not_a_unit_more(case):
    _world_size, org, added, pad_to = case
    held = shards(*case)
    total = sum(s.width for s in held)
    assert len({s.width for s in held}) == 1
    assert all(s.equal_widths for s in held)
    assert total % pad_to == 0
    assert sum(s.num_org_padded for s in held) - org < pad_to
    assert total - sum(s.num_org_padded for s in held) - added < pad_to


@given(case=divisible_cases())
@settings(deadline=None)
def test_the_edges_between_ranks_are_multiples_of_one_number_that_all_ranks_know(case):
    held = shards(*case)
    edges = [s.org_start for s in held if 0 < s.org_start < case[1]]
    assert {s.edge_divisor for s in held} == {gcd(*edges)}


@given(widths=st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any))
@settings(deadline=None)
def test_uneven_shards_hold_every_token_exactly_once_without_padding(widths):
    held = [VocabShard.uneven(rank, widths) for rank in range(len(widths))]
    assert [i for s in held for i in s.token_ids().tolist()] == list(range(sum(widths)))
    assert [s.width for s in held] == widths
    assert {s.edge_divisor for s in held} == {gcd(*(s.org_start for s in held if s.org_start < sum(widths)))}


@given(case=divisible_cases(), padding=st.sampled_from([0.0, float("nan"), float("inf"), -3.0]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@settings(deadline=None, max_examples=30)
def test_local_rows_are_the_rows_of_their_tokens_and_padding_is_what_the_caller_gave(dtype, case, padding):
    _, org, added, _ = case
    full = (torch.arange((org + added) * 3).reshape(-1, 3) % 200 - 100).to(dtype)
    expected_padding = torch.full((3,), padding).to(dtype).float()
    for s in shards(*case):
        local = s.shard_rows(full, padding=padding)
        assert local.shape == (s.width, 3)
        assert local.dtype == dtype
        for row, token in zip(local.float(), s.token_ids().tolist(), strict=True):
            expected = expected_padding if token == NO_TOKEN else full[token].float()
            torch.testing.assert_close(row, expected, rtol=0, atol=0, equal_nan=True)


def test_padding_may_be_a_tensor_of_garbage():
    s = VocabShard.even(3, 4, 130)
    garbage = torch.randn(s.width, 5)
    assert torch.equal(s.shard_rows(torch.zeros(130, 5), padding=garbage), garbage)


def test_a_shard_keeps_no_view_of_the_full_weight():
    full = torch.zeros(64, 2)
    VocabShard.even(0, 1, 64).shard_rows(full).fill_(7.0)
    assert not full.any()


@pytest.mark.parametrize(("world_size", "org", "added"), [(3, 1000, 0), (6, 200, 0), (24, 1000, 0), (3, 192 - 5, 70)])
def test_a_vocabulary_that_does_not_divide_is_refused_on_every_rank_alike_with_a_pad_to_that_works(
    world_size, org, added
):
    errors = set()
    for rank in range(world_size):
        with pytest.raises(ShardError, match="cannot share equally") as raised:
            VocabShard.even(rank, world_size, org, added)
        errors.add(str(raised.value))
    assert len(errors) == 1
    advice = int(errors.pop().rsplit("pad_to=", 1)[1].rstrip("."))
    assert advice == lcm(64, world_size)
    assert sum(s.num_org for s in shards(world_size, org, added, advice)) == org


@pytest.mark.parametrize(
    "build",
    [
        lambda: VocabShard.even(4, 4, 1000),
        lambda: VocabShard.even(-1, 4, 1000),
        lambda: VocabShard.even(0, 0, 1000),
        lambda: VocabShard.even(0, 1, 0),
        lambda: VocabShard.even(0, 1, 10, -1),
        lambda: VocabShard.even(0, 1, 10, 0, 0),
        lambda: VocabShard.uneven(0, []),
        lambda: VocabShard.uneven(0, [0, 0]),
        lambda: VocabShard.uneven(0, [5, -1]),
        lambda: VocabShard.uneven(2, [5, 5]),
        lambda: VocabShard.uneven(-1, [5, 5]),
        lambda: VocabShard.uneven(0, [1.5, 2]),
        lambda: VocabShard.uneven(0, [True, 2]),
        lambda: VocabShard.uneven(0.0, [1, 2]),
        lambda: VocabShard.even(0, 2, 1000.0),
        lambda: VocabShard.even(0, 2.0, 1000),
        lambda: VocabShard.even(0.0, 2, 1000),
        lambda: VocabShard.even("0", 2, 1000),
        lambda: VocabShard.even(0, 2, 1000, pad_to="64"),
        lambda: VocabShard.even(0, 2, 1000, 4.0),
        lambda: VocabShard(rank=0, world_size=1, org_vocab_size=9, org_start=0, num_org=9, num_org_padded=8, width=8),
    ],
)
def test_what_is_no_shard_is_refused_with_advice(build):
    with pytest.raises(ShardError, match=r": (use|give|list|build|added_vocab_size must)"):
        build()


@pytest.mark.parametrize("rows", [0, 129, 131, 192])
def test_a_weight_with_another_number_of_rows_is_refused_on_every_rank(rows):
    for s in shards(4, 130):
        with pytest.raises(ShardError, match="130 tokens"):
            s.shard_rows(torch.zeros(rows, 2))


def test_shards_and_their_errors_survive_pickling():
    s = VocabShard.even(1, 2, 1001)
    assert pickle.loads(pickle.dumps(s)) == s
    assert str(pickle.loads(pickle.dumps(ShardError("text")))) == "text"
