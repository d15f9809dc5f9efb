"""What flashinfer.top_k really does on this GPU, fact by fact, and that the contract of CPU tests does the same."""

import signal
from math import inf, nan

import pytest
import torch
from alone import run_alone
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tpbed.selector.topk import canonical_topk, contract_topk, flashinfer_topk, has_flashinfer

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not has_flashinfer(), reason="flashinfer is not installed: pip install 'tpbed[gpu]'"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PREAMBLE = "import torch, flashinfer\nlogits = torch.zeros(3, 4096, device='cuda', dtype=torch.bfloat16)\n"


def top_k(logits, k, **options):
    from flashinfer import top_k as kernel

    return kernel(logits, k, **{"sorted": True, "deterministic": True, **options})


def outcome(kernel, logits, k):
    """The class of the error, or what came out."""
    try:
        values, columns = kernel(logits, k)
    except Exception as error:  # noqa: BLE001 - whatever it is, the two must agree
        return type(error).__name__
    return values.cpu(), columns.cpu()


def rows_of(*values, dtype=torch.bfloat16, columns=1000, fill=-5.0):
    """A row that holds these values from column 100 on, a hundred columns apart."""
    row = torch.full((1, columns), fill, dtype=dtype)
    for place, value in enumerate(values):
        row[0, 100 * (place + 1)] = value
    return row.cuda()


@st.composite
def requests(draw):
    """Logits of few distinct values or many, in every form that a caller may hand over, and k."""
    rows, columns = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 40, 1000, 5000]))
    noise = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    logits = torch.randn(rows, columns, generator=noise)
    logits = logits.round() if draw(st.booleans()) else logits
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))
        logits[place] = draw(st.sampled_from([nan, -nan, inf, -inf, 0.0, -0.0]))
    logits = logits.to(draw(st.sampled_from([*DTYPES, torch.float64])))
    form = draw(st.sampled_from(["plain", "plain", "cropped", "transposed", "every second", "1-D", "3-D"]))
    shaped = {
        "plain": lambda: logits,
        "cropped": lambda: logits[:, : max(1, columns - 3)],
        "transposed": lambda: logits.t().contiguous().t(),
        "every second": lambda: logits[:, ::2],
        "1-D": lambda: logits[0],
        "3-D": lambda: logits.unsqueeze(0),
    }[form]()
    return shaped, draw(st.integers(1, min(64, shaped.shape[-1])))


@given(request=requests())
@example(request=(torch.zeros(2, 300)[:, :200], 5))
@example(request=(torch.zeros(1, 300)[:, :200], 5))
@example(request=(torch.full((2, 300), -inf).bfloat16(), 16))
@example(request=(torch.tensor([[0.0, -nan, nan, inf, -nan, 1.0]]), 3))
@settings(max_examples=300)
def test_the_contract_refuses_and_returns_what_the_kernel_does(request):
    logits, k = request
    placed = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device="cuda").copy_(logits)
    found, wanted = outcome(top_k, placed, k), outcome(contract_topk, placed, k)
    if isinstance(wanted, str):
        assert found == wanted
        return
    values, columns = found
    bits = torch.int32 if logits.dtype is torch.float32 else torch.int16
    assert torch.equal(values.view(bits), wanted[0].view(bits))
    assert torch.equal(placed.cpu().gather(1, columns).view(bits), values.view(bits))
    assert all(len(set(row)) == k for row in columns.tolist())


def row_with_nan_of_either_sign(dtype, columns):
    """Infinity at 100, zero at 200, NaN at 300, NaN with the sign set at 400."""
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    row = rows_of(inf, 0.0, nan, nan, dtype=dtype, columns=columns)
    row.view(bits)[0, 400] |= torch.iinfo(bits).min
    return row


@pytest.mark.parametrize(
    ("dtype", "columns"),
    [(torch.bfloat16, 1000), (torch.bfloat16, 31_040), (torch.float16, 1000), (torch.float32, 31_040)],
)
def test_nan_with_a_positive_sign_comes_first_and_with_a_negative_one_last(dtype, columns):
    row = row_with_nan_of_either_sign(dtype, columns)
    assert top_k(row, 2)[1].tolist() == contract_topk(row, 2)[1].tolist() == [[300, 100]]
    if columns == 1000:
        assert top_k(row, 1000)[1][0, -1].item() == contract_topk(row, 1000)[1][0, -1].item() == 400


def test_in_float32_rows_of_one_block_a_negative_nan_survives_before_infinity_and_comes_last_of_the_k():
    """Such a row is first filtered by its logits rounded to float16, which loses the sign of a NaN."""
    row = row_with_nan_of_either_sign(torch.float32, 1000)
    for k, wanted in [(1, [300]), (2, [300, 400]), (3, [300, 100, 400])]:
        assert top_k(row, k)[1].tolist() == contract_topk(row, k)[1].tolist() == [wanted]


@pytest.mark.parametrize("dtype", DTYPES)
def test_plus_zero_comes_before_minus_zero(dtype):
    assert top_k(rows_of(-0.0, 0.0, -0.0, 0.0, dtype=dtype), 4)[1][0, :2].sort().values.tolist() == [200, 400]


@pytest.mark.parametrize(("tie_break", "kept"), [(1, [100, 200]), (2, [300, 400])])
def test_a_tie_break_keeps_the_smallest_or_the_largest_columns(tie_break, kept):
    row = rows_of(1.0, 1.0, 1.0, 1.0)
    assert top_k(row, 2, tie_break=tie_break)[1][0].sort().values.tolist() == kept


@pytest.mark.parametrize("columns", [31_040, 248_320])
def test_tie_break_1_sorted_and_deterministic_is_the_canonical_order(columns):
    logits = torch.randn(7, columns, generator=torch.Generator().manual_seed(1)).bfloat16()
    found, wanted = top_k(logits.cuda(), 16, tie_break=1), canonical_topk(logits, 16)
    assert torch.equal(found[0].cpu(), wanted[0]) and torch.equal(found[1].cpu(), wanted[1])


@pytest.mark.parametrize("columns", [31_040, 248_320])
def test_deterministic_repeats_itself_bit_for_bit(columns):
    logits = torch.randn(7, columns, generator=torch.Generator().manual_seed(2)).bfloat16().cuda()
    first = top_k(logits, 16)
    for _ in range(20):
        again = top_k(logits, 16)
        assert torch.equal(again[0], first[0]) and torch.equal(again[1], first[1])


def test_a_row_of_minus_infinity_has_columns_of_its_own():
    values, columns = top_k(torch.full((2, 1000), -inf, device="cuda", dtype=torch.bfloat16), 16)
    assert values.isneginf().all()
    assert all(len(set(row)) == 16 and min(row) >= 0 and max(row) < 1000 for row in columns.tolist())


def test_k_of_the_whole_width_returns_everything():
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(3)).bfloat16().cuda()
    values, columns = top_k(logits, 500)
    assert torch.equal(values, logits.sort(descending=True).values)
    assert all(sorted(row) == list(range(500)) for row in columns.tolist())


def test_a_tensor_on_the_cpu_is_a_value_error():
    with pytest.raises(ValueError):
        top_k(torch.zeros(2, 100).bfloat16(), 2)


def test_rows_of_one_block_are_right_on_two_streams_at_a_time():
    """31,040 bf16 columns fit one block, which needs none of the buffer that all streams of a device share."""
    draw = torch.Generator().manual_seed(4)
    placed = [torch.randn(56, 31_040, generator=draw).bfloat16().cuda() for _ in range(2)]
    wanted = [top_k(logits, 16)[0] for logits in placed]
    streams = [torch.cuda.Stream() for _ in placed]
    torch.cuda.synchronize()
    found = [[], []]
    for _ in range(50):
        for which, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[which].append(top_k(placed[which], 16)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(values, wanted[which]) for which in range(2) for values in found[which])


def test_it_can_be_captured_after_a_call_that_warms_it_up_and_answers_for_new_logits():
    static = torch.zeros(7, 31_040, device="cuda", dtype=torch.bfloat16)
    top_k(static, 16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values, _ = top_k(static, 16)
    for seed in range(3):
        logits = torch.randn(7, 31_040, generator=torch.Generator().manual_seed(seed)).bfloat16()
        static.copy_(logits)
        graph.replay()
        assert torch.equal(values.cpu(), canonical_topk(logits, 16)[0])


def test_k_above_the_width_is_not_refused_and_has_columns_that_there_are_not():
    """Why check_topk_contract refuses it, and flashinfer_topk too."""
    ended = run_alone(
        PREAMBLE + "_, columns = flashinfer.top_k(logits[:, :8].contiguous(), 16, sorted=True, deterministic=True)\n"
        "rows = columns.tolist()\n"
        "print(all(len(set(row)) == 16 and 0 <= min(row) and max(row) < 8 for row in rows))"
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, "False"), ended.stderr


def test_no_row_is_an_error_that_the_next_call_reports_too():
    """Why flashinfer_topk answers it without a launch."""
    ended = run_alone(
        PREAMBLE + "try:\n    flashinfer.top_k(logits[:0], 16, sorted=True, deterministic=True)\n"
        "except RuntimeError as error:\n    print('invalid argument' in str(error))\n"
        "try:\n    torch.zeros(3, device='cuda').sum().item()\n    print('well')\n"
        "except RuntimeError:\n    print('spoilt')"
    )
    assert ended.stdout.split() == ["True", "spoilt"], ended.stderr


def test_no_column_ends_the_process():
    """Why flashinfer_topk answers it without a launch."""
    ended = run_alone(PREAMBLE + "flashinfer.top_k(logits[:, :0], 0, sorted=True, deterministic=True)")
    assert ended.returncode == -signal.SIGFPE, ended


def test_what_spoils_or_ends_a_process_is_answered_by_flashinfer_topk_and_the_next_call_is_well():
    for rows, columns, k in [(0, 4096, 16), (3, 0, 0), (3, 4096, 0)]:
        values, chosen = flashinfer_topk(torch.zeros(rows, columns, device="cuda").bfloat16(), k)
        assert values.shape == chosen.shape == (rows, k)
    assert torch.ones(3, device="cuda").sum().item() == 3
