"""unary_transform: multiply, then cap, in float32, and no slot without a token becomes one."""

from math import inf, nan, tanh

import pytest
import torch

from tpbed.selector.errors import SelectionError
from tpbed.selector.unary import unary_transform


def test_values_are_multiplied_first_and_capped_then():
    scores = unary_transform(torch.tensor([[10.0, -4.0]]), multiplier=0.5, softcap=3.0)
    assert scores.tolist() == [pytest.approx([3 * tanh(5 / 3), 3 * tanh(-2 / 3)], rel=1e-6)]


@pytest.mark.parametrize("softcap", [None, 0.0, -30.0])
def test_no_cap_and_a_cap_that_is_not_above_zero_leave_the_product(softcap):
    values = torch.tensor([[1e4, 2.0]], dtype=torch.bfloat16)
    scores = unary_transform(values, multiplier=2.0, softcap=softcap)
    assert scores.dtype == torch.float32
    assert scores.tolist() == [[2 * values[0, 0].item(), 4.0]]
    assert torch.equal(unary_transform(values, softcap=softcap), values.float())


def test_the_cap_is_computed_in_float32_and_not_in_the_dtype_of_the_logits():
    values = torch.tensor([[20.25]], dtype=torch.bfloat16)
    assert unary_transform(values, softcap=30.0).item() == pytest.approx(30 * tanh(20.25 / 30), rel=1e-6)


def test_order_is_kept_an_empty_slot_stays_minus_inf_and_an_invalid_row_stays_nan():
    scores = unary_transform(torch.tensor([[inf, 5.0, 4.0, -inf], [nan] * 4]), multiplier=3.0, softcap=9.0)
    assert scores[0].tolist() == sorted(scores[0].tolist(), reverse=True)
    assert scores[0, 0] == 9.0
    assert scores[0, 3] == -inf
    assert scores[1].isnan().all()


@pytest.mark.parametrize("multiplier", [0.0, -1.0, nan])
def test_a_multiplier_that_would_not_keep_the_order_is_refused(multiplier):
    with pytest.raises(SelectionError, match="use one above 0"):
        unary_transform(torch.zeros(1, 2), multiplier=multiplier)
