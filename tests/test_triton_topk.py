"""triton_topk against canonical_topk and pack_keys, bit for bit: compiled on a GPU, else in Triton's interpreter."""

from importlib import import_module
from itertools import pairwise
from math import inf, nan

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from triton_place import COMPILED, PLACE, quiet_interpreter, require_triton

from tpbed.selector.candidates import takes_keys
from tpbed.selector.errors import SelectionError
from tpbed.selector.head import DenseHead
from tpbed.selector.packed import NO_KEY, best_candidates, pack_keys
from tpbed.selector.select import compute_candidates
from tpbed.selector.shard import VocabShard
from tpbed.selector.topk import canonical_topk
from tpbed.selector.triton_topk import MAX_K, TritonTopK, triton_topk
from tpbed.tp.simulated import SimulatedWorld

require_triton()
pytestmark = quiet_interpreter
F32 = torch.float32
DTYPES = [torch.bfloat16, torch.float16, F32]
AWKWARD = [-inf, inf, nan, -nan, 0.0, -0.0, 1.0, 1.0, -1.0, 65504.0, -65504.0]
SHAPES = ((1, 1, None), (40, 5, 32), (700, 16, 32), (700, 64, 64), (3000, 16, None))
"""Columns, k, and neighbours to a group: few, since each is compiled anew on a GPU."""


def expected_keys(logits, k, num_org, first_id):
    best = min(k, num_org)
    values, columns = canonical_topk(logits[:, :num_org].cpu(), best)
    return F.pad(pack_keys(values, columns + first_id), (0, k - best), value=NO_KEY)


def same(found, wanted):
    return found.dtype == wanted.dtype and torch.equal(found.cpu().nan_to_num(nan=9e9), wanted.nan_to_num(nan=9e9))


@st.composite
def cases(draw):
    """Rows of few distinct values, so that ties are everywhere, of noise, or of both; within a wider tensor or not."""
    columns, k, group = draw(st.sampled_from(SHAPES))
    rows, spare = draw(st.integers(0, 4)), draw(st.sampled_from([0, 16, 5]))
    noise = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    logits = torch.randn(rows, columns + spare, generator=noise)
    if draw(st.booleans()):
        logits = (logits * draw(st.sampled_from([0.5, 2.0]))).round()
    for row in range(rows):
        places = draw(st.lists(st.integers(0, columns - 1), max_size=6))
        for place in places:
            logits[row, place] = draw(st.sampled_from(AWKWARD))
        if draw(st.integers(0, 3)) == 0:
            logits[row] = draw(st.sampled_from(AWKWARD))
    num_org = draw(st.one_of(st.just(columns), st.integers(0, columns)))
    return logits.to(draw(st.sampled_from(DTYPES)))[:, :columns], k, TritonTopK(group=group), num_org


@given(case=cases(), first_id=st.sampled_from([0, 31_040, 2**31 - 4000]))
@example(case=(torch.zeros(2, 40).half(), 5, TritonTopK(group=32), 40), first_id=0)
@example(case=(torch.full((1, 700), -inf), 16, TritonTopK(group=32), 700), first_id=0)
@example(case=(torch.full((1, 700), -nan).bfloat16(), 16, TritonTopK(group=32), 3), first_id=0)
@settings(max_examples=400 if COMPILED else 40)
def test_keys_are_those_of_the_canonical_order_bit_for_bit(case, first_id):
    logits, k, kernel, num_org = case
    found = kernel.keys(logits.to(PLACE), k, num_org=num_org, first_id=first_id)
    assert torch.equal(found.cpu(), expected_keys(logits, k, num_org, first_id))


@given(case=cases())
@settings(max_examples=400 if COMPILED else 40)
def test_values_and_columns_are_those_of_canonical_topk_bit_for_bit(case):
    logits, k, kernel, _ = case
    found_values, found_columns = kernel(logits.to(PLACE), k)
    values, columns = canonical_topk(logits, k)
    assert torch.equal(found_columns.cpu(), columns)
    assert same(found_values, values)
    assert not found_values[found_values == 0].signbit().any()


@given(case=cases(), cuts=st.lists(st.integers(0, 40), max_size=3))
@settings(max_examples=100 if COMPILED else 15)
def test_the_best_of_the_shards_are_the_best_of_the_whole_wherever_it_is_cut(case, cuts):
    logits, k, kernel, _ = case
    columns = logits.shape[1]
    edges = sorted({0, columns, *(cut * columns // 40 for cut in cuts)})
    placed = logits.to(PLACE)
    parts = [kernel.keys(placed[:, a:b].contiguous(), k, num_org=b - a, first_id=a) for a, b in pairwise(edges)]
    found = kernel.best_candidates(torch.cat(parts, dim=1), k)
    wanted = best_candidates(expected_keys(logits, k, columns, 0), k)
    assert same(found[0], wanted[0]) and torch.equal(found[1].cpu(), wanted[1])


@given(
    values=st.lists(st.sampled_from([*AWKWARD, 2.5, -3.0]), min_size=16, max_size=50),
    seed=st.integers(0, 99),
    invalid=st.booleans(),
)
@settings(max_examples=100 if COMPILED else 20)
def test_the_merge_of_keys_is_that_of_the_selector(values, seed, invalid):
    row = torch.tensor([values])
    row = row if invalid else row.nan_to_num(nan=4.0)
    ids = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed)).unsqueeze(0)
    keys = pack_keys(row, ids)
    found, wanted = triton_topk.best_candidates(keys.to(PLACE), 16), best_candidates(keys, 16)
    assert same(found[0], wanted[0]) and torch.equal(found[1].cpu(), wanted[1])


@pytest.mark.parametrize("dtype", DTYPES if COMPILED else DTYPES[1:])  # the interpreter truncates to bfloat16
def test_scales_of_rows_and_columns_are_applied_before_the_one_rounding(dtype):
    draw = torch.Generator().manual_seed(1)
    raw, rows, columns = (torch.randn(*shape, generator=draw) for shape in ((3, 700), (3,), (700,)))
    wanted = (raw * columns * rows.unsqueeze(1)).to(dtype)
    found = triton_topk.keys(raw.to(PLACE), 16, num_org=690, scales=(rows.to(PLACE), columns.to(PLACE)), dtype=dtype)
    assert torch.equal(found.cpu(), expected_keys(wanted, 16, 690, 0))


@pytest.mark.parametrize(("dtype", "columns"), [(torch.bfloat16, 65_536), (torch.bfloat16, 70_000), (F32, 70_000)])
def test_rows_that_a_short_key_has_room_for_and_longer_ones_keep_the_first_of_equal_columns(dtype, columns):
    logits = torch.zeros(1, columns, dtype=dtype)
    logits[0, 100:5000:300] = 1.0  # 17 of them; the group of the best comes after theirs, and has one more
    logits[0, columns - 600], logits[0, columns - 599] = 9.0, 1.0
    found = triton_topk.keys(logits.to(PLACE), 16, num_org=columns - 5)
    assert torch.equal(found.cpu(), expected_keys(logits, 16, columns - 5, 0))


def test_columns_beyond_the_real_ones_have_no_say_even_if_they_are_nan_or_infinite():
    logits = torch.randn(2, 700, generator=torch.Generator().manual_seed(2))
    logits[:, : 16 * 32 : 32] += 9.0  # the best 16 lie in as many groups, and in none beside garbage
    for garbage in (nan, -nan, inf):
        logits[:, 650:] = garbage
        found = TritonTopK(group=32).keys(logits.to(PLACE), 16, num_org=650)
        assert torch.equal(found.cpu(), expected_keys(logits, 16, 650, 0))


def test_no_row_no_column_and_k_of_zero_have_empty_answers_or_no_tokens():
    for rows, columns, k in [(0, 700, 16), (3, 700, 0), (0, 0, 0)]:
        values, chosen = triton_topk(torch.zeros(rows, columns, device=PLACE).bfloat16(), k)
        assert values.shape == chosen.shape == (rows, k)
        assert (values.dtype, chosen.dtype) == (torch.bfloat16, torch.int64)
    for columns in (0, 700):
        found = triton_topk.keys(torch.zeros(3, columns, device=PLACE), 16, num_org=0)
        assert found.tolist() == [[NO_KEY] * 16] * 3
    assert triton_topk.keys(torch.zeros(0, 700, device=PLACE), 16, num_org=700).shape == (0, 16)


@pytest.mark.parametrize(
    ("logits", "k", "says"),
    [
        (torch.zeros(3), 1, "shape"),
        (torch.zeros(3, 8).double(), 1, "float64"),
        (torch.zeros(8, 3).t(), 1, "side by side"),
        (torch.zeros(3, 100), MAX_K + 1, "up to 64"),
        (torch.zeros(3, 8), 9, r"min\(k, width\)"),
        (torch.zeros(3, 8), -1, "up to 64"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_what_to_do(logits, k, says):
    with pytest.raises(SelectionError, match=says):
        triton_topk(logits.to(PLACE), k)


def test_scales_that_do_not_fit_and_more_real_columns_than_there_are_are_refused():
    logits = torch.zeros(3, 8, device=PLACE)
    with pytest.raises(SelectionError, match="one a row and one a column"):
        triton_topk.keys(logits, 2, num_org=8, scales=(logits[0], logits[0]))
    with pytest.raises(SelectionError, match="num_org up to the columns"):
        triton_topk.keys(logits, 2, num_org=9)


def test_logits_on_the_cpu_are_refused_unless_the_kernels_are_interpreted(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SelectionError, match="canonical_topk"):
        triton_topk(torch.zeros(2, 8), 2)


def test_without_triton_it_says_what_to_install(monkeypatch):
    module = import_module("tpbed.selector.triton_topk")  # the package has the function under its name
    monkeypatch.setattr(module, "has_triton", lambda: False)
    with pytest.raises(SelectionError, match="pip install triton"):
        triton_topk(torch.zeros(2, 8, device=PLACE), 2)


@pytest.mark.parametrize("merge", ["packed", "two_gather", "full_gather"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_candidates_are_the_canonical_ones_at_every_tp_and_merge_with_nan_in_the_padding(world_size, merge):
    draw = torch.Generator().manual_seed(3)
    weight = torch.randint(-2, 3, (150, 16), generator=draw).to(PLACE).float()  # the last rank of 4 holds no token
    hidden = torch.randint(-2, 3, (3, 16), generator=draw).to(PLACE).float()

    def program(rank: int):
        shard = VocabShard.even(rank, world_size, 150)
        head = DenseHead.from_full(weight, shard, padding=nan if merge != "full_gather" else 9.0)
        options = {"k": 16, "group": None, "merge": merge}
        found = compute_candidates(hidden, head, topk=triton_topk, **options)
        wanted = compute_candidates(hidden, head, topk=canonical_topk, **options)
        return torch.equal(found.ids, wanted.ids), torch.equal(found.values, wanted.values), found.ids.tolist()

    results = SimulatedWorld(world_size, device=PLACE).run(program).results
    assert all(ids and values for ids, values, _ in results)
    assert len({str(ids) for *_, ids in results}) == 1


def test_only_a_merge_of_keys_takes_them_and_only_from_a_top_k_that_gives_them():
    assert takes_keys(triton_topk, "packed")
    assert not takes_keys(triton_topk, "two_gather") and not takes_keys(canonical_topk, "packed")
