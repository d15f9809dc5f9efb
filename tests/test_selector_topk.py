"""Top-k: the canonical order, the contract that flashinfer holds callers to, and the guards around it."""

from math import inf, isnan, nan
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tpbed.selector import topk
from tpbed.selector.errors import SelectionError
from tpbed.selector.topk import (
    canonical_topk,
    check_topk_contract,
    contract_topk,
    default_topk,
    flashinfer_topk,
    torch_topk,
)

TIED_ROWS = st.lists(st.sampled_from([-inf, -2.0, -0.0, 0.0, 1.5, inf]), min_size=1, max_size=12)


@given(row=TIED_ROWS, data=st.data())
@example(row=[-0.0, 0.0, -0.0, 0.0], data=None)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@settings(deadline=None)
def test_canonical_order_is_value_descending_then_column_ascending_with_both_zeros_equal(dtype, row, data):
    k = data.draw(st.integers(1, len(row))) if data else 3
    values, columns = canonical_topk(torch.tensor([row], dtype=dtype), k)
    expected = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
    assert columns.tolist() == [expected]
    assert values.dtype == dtype
    assert values.tolist() == [[row[i] for i in expected]]
    assert not values[values == 0].signbit().any()


def test_canonical_order_holds_in_rows_too_long_for_a_simple_sort():
    row = torch.randint(0, 3, (1, 5000), generator=torch.Generator().manual_seed(1)).float()
    _, columns = canonical_topk(row, 4000)
    assert columns[0].tolist() == sorted(range(5000), key=lambda i: (-row[0, i].item(), i))[:4000]


@given(row=TIED_ROWS, data=st.data())
@settings(deadline=None)
def test_torchs_top_k_gives_the_same_values_and_columns_that_hold_them(row, data):
    k = data.draw(st.integers(1, len(row)))
    logits = torch.tensor([row])
    values, columns = torch_topk(logits, k)
    assert values.tolist() == canonical_topk(logits, k)[0].tolist()
    assert torch.equal(logits.gather(1, columns), values)
    assert len(set(columns[0].tolist())) == k


@given(
    row=st.lists(st.sampled_from([-inf, -2.0, -0.0, 0.0, 1.5, inf, nan, -nan]), min_size=1, max_size=12), data=st.data()
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_contract_ranks_by_bits_and_in_float32_a_nan_of_either_sign_survives(dtype, row, data):
    logits, k = torch.tensor([row], dtype=dtype), data.draw(st.integers(1, len(row)))

    def rank(column):
        value, negative = logits[0, column].item(), logits[0, column].signbit().item()
        return (
            (inf if isnan(value) else abs(value), isnan(value), 1)
            if not negative
            else (-inf if isnan(value) else value, -isnan(value), 0)
        )

    def survives(column):
        return dtype is torch.float32 and isnan(row[column]), rank(column)

    values, columns = contract_topk(logits, k)
    chosen = sorted(sorted(range(len(row)), key=survives, reverse=True)[:k])
    assert columns.tolist() == [sorted(chosen, key=rank, reverse=True)]
    assert torch.equal(values.view(torch.uint8), logits.gather(1, columns).view(torch.uint8))


@pytest.mark.parametrize(("rows", "width", "survives"), [(1, 16_384, True), (15, 16_385, False), (16, 16_385, True)])
def test_a_negative_nan_of_float32_survives_where_one_block_filters_a_row(rows, width, survives):
    logits = torch.zeros(rows, width)
    logits[:, 300] = torch.tensor(nan).copysign(torch.tensor(-1.0))
    assert (contract_topk(logits, 2)[1] == 300).any(1).tolist() == [survives] * rows


@pytest.mark.parametrize("kernel", [canonical_topk, torch_topk])
def test_a_nan_always_survives_so_that_its_row_can_be_found_invalid(kernel):
    for bad in [nan, -nan]:
        values, columns = kernel(torch.tensor([[5.0, bad, 7.0], [5.0, 6.0, 7.0]]), 1)
        assert values[0].isnan().all()
        assert columns.tolist() == [[1], [2]]


WIDE = torch.zeros(3, 8)
REFUSED = {
    "cropped view": (WIDE[:, :4], 2, RuntimeError, "input must be contiguous"),
    "transposed view": (torch.zeros(8, 3).t(), 2, RuntimeError, "input must be contiguous"),
    "every second column": (WIDE[:, ::2], 2, RuntimeError, "input must be contiguous"),
    "every second column of one row": (WIDE[:1, ::2], 2, RuntimeError, "input must be contiguous"),
    "float64": (WIDE.double(), 2, AssertionError, "Unsupported dtype"),
    "fp8": (WIDE.to(torch.float8_e4m3fn), 2, AssertionError, "Unsupported dtype"),
    "one dimension": (torch.zeros(8), 2, RuntimeError, "2-D"),
    "three dimensions": (torch.zeros(2, 3, 4), 2, RuntimeError, "2-D"),
    "no row": (torch.zeros(0, 8), 2, RuntimeError, "invalid argument"),
    "no column": (torch.zeros(3, 0), 1, SelectionError, "k=1 is out of range for the 0 columns"),
    "k above width": (WIDE, 9, SelectionError, "k=9"),
    "k of zero": (WIDE, 0, SelectionError, "k=0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_contract_refuses(case):
    logits, k, error, text = REFUSED[case]
    for refusing in (check_topk_contract, contract_topk):
        with pytest.raises(error, match=text):
            refusing(logits, k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_contract_passes_contiguous_logits_a_crop_of_one_row_and_k_of_the_whole_width(dtype):
    logits = torch.arange(16).reshape(2, 8).to(dtype)
    for fine, k in [(logits, 3), (logits[:1, :5], 2), (logits[:0, :0].new_zeros(1, 1), 1), (logits, 8)]:
        values, columns = contract_topk(fine, k)
        assert torch.equal(values, torch_topk(fine, k)[0])
        assert columns.dtype == torch.int64


@pytest.mark.parametrize(("width", "k"), [(8, 9), (0, 1), (8, -1)])
def test_the_contract_and_the_call_refuse_k_alike(width, k):
    raised = []
    for kernel in (contract_topk, flashinfer_topk):
        with pytest.raises(SelectionError) as error:
            kernel(torch.zeros(3, width), k)
        raised.append((error.type, str(error.value)))
    assert raised[0] == raised[1]


def test_flashinfer_is_not_called_where_it_would_crash_or_corrupt(monkeypatch):
    monkeypatch.setattr(topk, "import_module", lambda name: pytest.fail("flashinfer was called"))
    for rows, width, k in [(0, 8, 4), (3, 0, 0), (0, 0, 0), (3, 8, 0)]:
        values, columns = flashinfer_topk(torch.zeros(rows, width).bfloat16(), k)
        assert values.shape == columns.shape == (rows, k)
        assert (values.dtype, columns.dtype) == (torch.bfloat16, torch.int64)
    for rows, width, k in [(3, 8, 9), (0, 8, 9), (3, 0, 1), (3, 8, -1)]:
        with pytest.raises(SelectionError, match=r"ask for min\(k, width\)"):
            flashinfer_topk(torch.zeros(rows, width), k)


def test_flashinfer_is_asked_for_sorted_deterministic_answers_on_the_logits_own_device(monkeypatch):
    calls, inside = [], []

    class Device:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            inside.append(self.device)

        def __exit__(self, *error):
            inside.pop()

    def top_k(logits, k, **options):
        calls.append((k, options, list(inside)))
        return torch_topk(logits, k)

    monkeypatch.setattr(topk, "import_module", {"flashinfer": SimpleNamespace(top_k=top_k)}.__getitem__)
    monkeypatch.setattr(topk.torch.cuda, "device", Device)
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    assert flashinfer_topk(logits, 2)[1].tolist() == [[1, 2]]
    assert calls == [(2, {"sorted": True, "deterministic": True}, [logits.device])]
    assert inside == []


def test_the_default_is_canonical_on_cpu_and_flashinfer_on_cuda_unless_it_is_missing(monkeypatch):
    monkeypatch.setattr(topk, "has_flashinfer", lambda: True)
    assert default_topk(torch.device("cpu")) is canonical_topk
    assert default_topk(torch.device("cuda", 1)) is flashinfer_topk
    monkeypatch.setattr(topk, "has_flashinfer", lambda: False)
    assert default_topk(torch.device("cuda")) is torch_topk
