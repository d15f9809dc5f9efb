"""The reference: its order against a plain sort, its bound against real arithmetic, its judgement against mistakes."""

from fractions import Fraction
from math import inf, nan

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tpbed.selector.reference import Discrepancy, error_bound, explain_candidates, reference_logits, reference_topk

VALUES = st.sampled_from([-inf, -3.0, -0.0, 0.0, 1.0, 2.5, inf])
ROWS = st.lists(VALUES, min_size=1, max_size=10)


def answer(logits, k):
    ids, values = reference_topk(logits, k)
    return ids, values.float()


@given(row=ROWS, data=st.data())
@settings(deadline=None)
def test_the_reference_order_is_a_plain_sort_by_value_and_then_id(row, data):
    k = data.draw(st.integers(1, len(row)))
    ids, values = reference_topk(torch.tensor([row]), k)
    expected = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
    assert values.tolist() == [[row[i] for i in expected]]
    assert ids.tolist() == [[i if row[i] > -inf else -1 for i in expected]]


def test_a_row_with_nan_is_invalid_and_no_rows_give_no_rows():
    ids, values = reference_topk(torch.tensor([[1.0, nan], [1.0, 2.0]]), 2)
    assert ids.tolist() == [[-1, -1], [1, 0]]
    assert values[0].isnan().all()
    ids, values = reference_topk(torch.zeros(0, 5), 3)
    assert ids.shape == values.shape == (0, 3)


@pytest.mark.parametrize("k", [0, 3])
def test_a_k_that_the_vocabulary_does_not_have_is_refused(k):
    with pytest.raises(ValueError, match="within 1 to 2"):
        reference_topk(torch.zeros(1, 2), k)


@given(seed=st.integers(0, 999), dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
@settings(deadline=None, max_examples=20)
def test_reference_logits_are_the_exact_products_rounded_once_where_the_caller_says(seed, dtype):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randint(-50, 51, (2, 9), generator=draw).float()
    weight = torch.randint(-50, 51, (4, 9), generator=draw).float()
    exact = [
        [sum(Fraction(a) * Fraction(b) for a, b in zip(h, w, strict=True)) for w in weight.tolist()]
        for h in hidden.tolist()
    ]
    assert reference_logits(hidden, weight).tolist() == [[float(x) for x in row] for row in exact]
    rounded = reference_logits(hidden, weight, logits_dtype=dtype)
    assert rounded.dtype == torch.float64
    assert rounded.tolist() == torch.tensor(exact, dtype=torch.float32).to(dtype).double().tolist()


@given(
    seed=st.integers(0, 9999),
    units=st.integers(1, 300),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    exponent=st.integers(-20, 2),
)
@example(seed=3, units=5, dtype=torch.float16, exponent=-18)  # logits among the subnormals of float16
@settings(deadline=None, max_examples=60)
def test_the_bound_covers_sums_in_any_order_and_is_not_much_wider_than_one_rounding(seed, units, dtype, exponent):
    draw = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(3, units, generator=draw) * 2.0**exponent).to(dtype)
    weight = torch.randn(5, units, generator=draw).to(dtype)
    exact, bound = reference_logits(hidden, weight), error_bound(hidden, weight, dtype)
    products = (hidden.float().unsqueeze(1) * weight.float())[..., torch.randperm(units, generator=draw)]
    one_by_one = torch.zeros(3, 5)
    for unit in range(units):
        one_by_one = one_by_one + products[..., unit]
    for computed in (one_by_one, products.sum(-1), products.flip(-1).cumsum(-1)[..., -1]):
        assert ((computed.to(dtype).double() - exact).abs() <= bound).all()
    magnitudes = hidden.double().abs() @ weight.double().abs().T
    half_ulp = (
        torch.finfo(dtype).eps / 2 * exact.abs() + torch.finfo(dtype).smallest_normal * 2 * torch.finfo(dtype).eps
    )
    assert (bound <= half_ulp * 1.001 + magnitudes * (units + 2) * 2.0**-23 + 1e-30).all()


def test_the_bound_is_zero_where_the_caller_knows_that_the_arithmetic_is_exact_or_an_input_is_not_finite():
    hidden, weight = torch.ones(2, 3), torch.ones(4, 3)
    assert not error_bound(hidden, weight, torch.bfloat16, exact=True).any()
    assert (error_bound(hidden, weight, torch.bfloat16) > 0).all()
    weight[1, 0], hidden[1, 0] = inf, nan
    bound = error_bound(hidden, weight, torch.float32)
    assert (bound[0] > 0).tolist() == [True, False, True, True]
    assert not bound[1].any()


def test_the_bound_is_infinite_where_the_logits_dtype_or_the_sum_may_overflow():
    wide = torch.tensor([[1.0, 1e5]])
    assert error_bound(torch.ones(1, 2), wide, torch.float16).item() == inf
    assert error_bound(torch.ones(1, 2), wide, torch.bfloat16).item() < 1e3
    cancels = torch.tensor([[2e38, 2e38, -2e38]])
    assert error_bound(torch.ones(1, 3), cancels, torch.float32).item() == inf
    computed = wide.sum(-1, keepdim=True).half().float()  # inf in float16
    exact = reference_logits(torch.ones(1, 2), wide)
    assert (
        explain_candidates(
            torch.tensor([[0]]), computed, exact, error_bound(torch.ones(1, 2), wide, torch.float16), k=1
        )
        == []
    )


@given(
    rows=st.lists(st.lists(VALUES | st.just(nan), min_size=4, max_size=4), min_size=1, max_size=3), k=st.integers(1, 4)
)
@settings(deadline=None)
def test_the_reference_answer_is_accepted_under_both_rules(rows, k):
    logits = torch.tensor(rows)
    for ties in ("canonical", "equivalent"):
        assert explain_candidates(*answer(logits, k), logits.double(), 0.0, k=k, ties=ties) == []


@given(row=st.lists(VALUES, min_size=2, max_size=6), k=st.integers(1, 4), data=st.data())
@example(row=[1.0, 1.0], k=1, data=[(1, 1.0)])  # a tie at the end of the list
@example(row=[1.0, 1.0, 1.0], k=2, data=[(0, 1.0), (2, 1.0)])
@example(row=[1.0, -inf], k=2, data=[(0, 1.0), (-1, 0.0)])
@example(row=[1.0, -inf], k=2, data=[(0, 1.0), (-1, nan)])
@settings(deadline=None, max_examples=300)
def test_with_a_bound_of_zero_the_canonical_rule_accepts_nothing_but_the_reference_answer(row, k, data):
    assume(k <= len(row))
    logits = torch.tensor([row], dtype=torch.float64)
    slots = st.tuples(st.integers(-1, len(row)), VALUES | st.just(nan))
    listed = data if isinstance(data, list) else data.draw(st.lists(slots, min_size=k, max_size=k))
    ids, values = torch.tensor([[i for i, _ in listed]]), torch.tensor([[v for _, v in listed]])
    right_ids, right_values = answer(logits, k)
    is_right = torch.equal(ids, right_ids) and bool((values == right_values).all())
    assert (explain_candidates(ids, values, logits, 0.0, k=k) == []) == is_right


@given(row=st.lists(st.sampled_from([0.0, 1.0, 2.0, -inf]), min_size=1, max_size=7), data=st.data())
@settings(deadline=None, max_examples=200)
def test_the_equivalent_rule_accepts_exactly_the_answers_whose_values_are_the_k_best(row, data):
    k = data.draw(st.integers(1, len(row)))
    picked = data.draw(st.permutations(range(len(row))))[:k]
    ids = torch.tensor([[i if row[i] > -inf else -1 for i in picked]])
    values = torch.tensor([[row[i] for i in picked]])
    logits = torch.tensor([row], dtype=torch.float64)
    is_right = values[0].tolist() == sorted(row, reverse=True)[:k]
    assert (explain_candidates(ids, values, logits, 0.0, k=k, ties="equivalent") == []) == is_right


LOGITS = [5.0, 4.0, 4.0, 3.0, -inf]
MISTAKES = {  # ids, values -> (slot, kind) of each discrepancy, and words of the first message
    "padding id": ([0, 7], [5.0, 4.5], [(1, "wrong_ids")], "ids 0 to 4"),
    "negative id": ([0, -2], [5.0, 4.0], [(1, "wrong_ids")], "ids 0 to 4"),
    "duplicate": ([0, 0], [5.0, 5.0], [(1, "wrong_ids")], "listed before"),
    "left out": ([0, 3], [5.0, 3.0], [(1, "wrong_ids")], "token 1 with logit 4.0 was left out"),
    "value of another id": ([0, 1], [5.0, 3.0], [(1, "wrong_ids"), (1, "wrong_ids")], "the logit of this id is 4.0"),
    "masked token": ([0, 4], [5.0, -inf], [(1, "wrong_ids"), (1, "wrong_ids")], "a token of -inf is no candidate"),
    "slot left empty": ([0, -1], [5.0, -inf], [(1, "wrong_ids")], "token 1 with logit 4.0 is left"),
    "worst first": ([1, 0], [4.0, 5.0], [(1, "order")], "above the 4.0 of id 1"),
    "tie to the higher id": ([0, 2], [5.0, 4.0], [(1, "order")], "ties with it and has the lower id"),
    "marked invalid": ([-1, -1], [nan, nan], [(0, "wrong_ids"), (1, "wrong_ids")], "token 0 with logit 5.0 is left"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_its_kind_row_slot_id_and_both_values(name):
    ids, values, expected, words = MISTAKES[name]
    logits = torch.tensor([LOGITS, LOGITS], dtype=torch.float64)
    right_ids, right_values = answer(logits[:1], 2)
    found = explain_candidates(
        torch.cat([right_ids, torch.tensor([ids])]), torch.cat([right_values, torch.tensor([values])]), logits, 0.0, k=2
    )
    assert [(d.row, d.slot, d.kind) for d in found] == [(1, slot, kind) for slot, kind in expected]
    assert words in found[0].message
    assert found[0].message.startswith(f"row 1, slot {expected[0][0]}: id {ids[expected[0][0]]} with value ")


def test_ties_within_the_list_go_to_the_lower_id_only_under_the_canonical_rule():
    logits, ids, values = torch.tensor([LOGITS]).double(), torch.tensor([[0, 2, 1]]), torch.tensor([[5.0, 4.0, 4.0]])
    assert [(d.slot, d.kind) for d in explain_candidates(ids, values, logits, 0.0, k=3)] == [(2, "order")]
    assert explain_candidates(ids, values, logits, 0.0, k=3, ties="equivalent") == []


def test_an_invalid_row_must_be_marked_throughout():
    logits = torch.tensor([[1.0, nan, 3.0]]).double()
    assert explain_candidates(torch.tensor([[-1, -1]]), torch.tensor([[nan, nan]]), logits, 0.0, k=2) == []
    found = explain_candidates(torch.tensor([[2, -1]]), torch.tensor([[3.0, 1.0]]), logits, 0.0, k=2)
    assert [(d.slot, d.kind) for d in found] == [(0, "wrong_ids"), (1, "wrong_ids")]
    found = explain_candidates(torch.tensor([[-1, 2]]), torch.tensor([[nan, nan]]), logits, 0.0, k=2)
    assert [(d.slot, d.kind) for d in found] == [(1, "wrong_ids")]


def test_values_and_choices_within_the_bound_are_right_and_beyond_it_wrong():
    logits, bound = torch.tensor([[2.0, 1.75, 1.0]]).double(), torch.tensor([[0.25, 0.25, 0.0]]).double()
    explain = lambda ids, values, k: explain_candidates(  # noqa: E731
        torch.tensor([ids]), torch.tensor([values], dtype=torch.float64), logits, bound, k=k
    )
    assert explain([1], [1.875], 1) == []  # token 0 may have scored as little as 1.75
    assert [d.kind for d in explain([1], [1.625], 1)] == ["wrong_ids"]  # and not less
    assert [d.kind for d in explain([0], [2.375], 1)] == ["wrong_ids"]  # it cannot have scored that
    assert [d.kind for d in explain([2], [1.0], 1)] == ["wrong_ids"]
    assert explain([0], [2.25], 1) == []
    assert [d.kind for d in explain([0], [2.25 + 1e-9], 1)] == ["wrong_ids"]
    assert explain([1, 0], [2.0, 1.875], 2) == []  # rounding swapped them
    assert explain([0, 1], [1.875, 1.875], 2) == []
    assert [d.kind for d in explain([1, 0], [1.875, 1.875], 2)] == ["order"]  # a tie, to the higher id
    assert [d.kind for d in explain([1, 0], [1.875, 2.0], 2)] == ["order"]


def test_a_tie_that_the_bound_leaves_open_is_not_held_against_the_answer():
    logits = torch.tensor([[2.0, 2.0]]).double()
    assert explain_candidates(torch.tensor([[1]]), torch.tensor([[2.0]]), logits, 0.25, k=1) == []


def test_a_bound_does_not_soften_infinities():
    logits = torch.tensor([[inf, 1.0, -inf]]).double()
    ids, values = torch.tensor([[0, 1, -1]]), torch.tensor([[inf, 7.0, -inf]])
    assert explain_candidates(ids, values, logits, inf, k=3) == []
    assert explain_candidates(torch.tensor([[0, 1, 2]]), values, logits, inf, k=3) != []
    assert explain_candidates(ids[:, 1:], values[:, 1:], logits, inf, k=2) != []


def test_an_answer_of_another_shape_is_one_finding_about_the_whole():
    logits = torch.zeros(2, 5).double()
    (found,) = explain_candidates(torch.zeros(2, 3).long(), torch.zeros(2, 3), logits, 0.0, k=4)
    assert found == Discrepancy(-1, -1, "wrong_ids", found.message)
    assert "(2, 3)" in found.message


def test_no_rows_have_no_discrepancies():
    assert explain_candidates(torch.zeros(0, 4).long(), torch.zeros(0, 4), torch.zeros(0, 9).double(), 0.0, k=4) == []
