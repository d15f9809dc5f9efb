"""DenseHead and Fp8Head: what they accept, how fp8 rows are packed, and that products stay within rigorous bounds."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tpbed.selector import fp8, tiles
from tpbed.selector.fp8 import Fp8Head, Fp8Method, dequantise_fp8, fits_scaled_mm, pack_fp8_per_channel
from tpbed.selector.head import DenseHead, HeadError
from tpbed.selector.reference import error_bound, reference_logits
from tpbed.selector.shard import VocabShard

FP8 = torch.float8_e4m3fn

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def gaussian(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@given(
    rows=st.integers(1, 12),
    units=st.integers(1, 40),
    seed=st.integers(0, 999),
    exponent=st.integers(-44, 37),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(deadline=None)
def test_a_packed_row_is_within_half_a_step_of_the_weight_at_any_magnitude(rows, units, seed, exponent, dtype):
    weight = gaussian(rows, units, seed=seed, scale=10.0**exponent).to(dtype)
    packed, scale = pack_fp8_per_channel(weight)
    assert packed.dtype == FP8
    assert scale.dtype == torch.float32
    assert scale.shape == (rows, 1)
    error = (dequantise_fp8(packed, scale) - weight.double()).abs()
    half_step = torch.maximum(weight.double().abs() / 16, 2.0**-10 * scale.double())
    assert (error <= half_step * (1 + 1e-6)).all()


def test_no_fp8_value_would_be_nearer_to_a_weight_than_the_one_it_was_packed_in():
    weight = gaussian(20, 300)
    packed, scale = pack_fp8_per_channel(weight)
    values = torch.arange(256, dtype=torch.uint8).view(FP8).double()
    distances = (values[values.isfinite()] * scale.double().unsqueeze(2) - weight.double().unsqueeze(2)).abs()
    error = (dequantise_fp8(packed, scale) - weight.double()).abs()
    assert (error <= distances.amin(dim=2) + 1e-7 * weight.double().abs()).all()


@given(seed=st.integers(0, 999), exponent=st.integers(-30, 30))
@settings(deadline=None)
def test_the_largest_entry_of_each_row_packs_to_448(seed, exponent):
    packed, _ = pack_fp8_per_channel(gaussian(6, 9, seed=seed, scale=10.0**exponent))
    assert packed.float().abs().amax(dim=1).tolist() == [448.0] * 6


def test_a_row_of_zeros_packs_to_zeros_with_a_finite_scale():
    packed, scale = pack_fp8_per_channel(torch.tensor([[0.0, -0.0], [1.0, 2.0]]))
    assert packed[0].float().tolist() == [0.0, 0.0]
    assert scale.isfinite().all()
    assert (scale > 0).all()
    assert dequantise_fp8(packed, scale)[1].tolist() == pytest.approx([1.0, 2.0], rel=1e-7)


def test_the_largest_floats_saturate_and_do_not_become_nan():
    largest = torch.finfo(torch.float32).max
    packed, scale = pack_fp8_per_channel(torch.tensor([[largest, -largest, 1.0]]))
    assert packed.float()[0].tolist() == [448.0, -448.0, 0.0]
    assert dequantise_fp8(packed, scale)[0, 0].item() == pytest.approx(largest, rel=1e-6)


def test_a_row_with_nan_packs_to_nan_and_leaves_its_neighbours_alone():
    packed, scale = pack_fp8_per_channel(torch.tensor([[float("nan"), 1.0], [1.0, 448.0]]))
    assert packed[0].float().isnan().all()
    assert (packed[1].float().tolist(), scale[1].item()) == ([1.0, 448.0], 1.0)


def test_packing_takes_weights_without_rows_or_without_units():
    for shape in [(0, 8), (3, 0), (0, 0)]:
        packed, scale = pack_fp8_per_channel(torch.zeros(shape))
        assert packed.shape == shape
        assert scale.shape == (shape[0], 1)


@given(seed=st.integers(0, 99), rank=st.integers(0, 3))
@settings(deadline=None, max_examples=20)
def test_scales_follow_their_rows_so_that_sharding_and_packing_commute(seed, rank):
    shard = VocabShard.even(rank, 4, 130)
    weight = gaussian(130, 8, seed=seed) * torch.arange(1, 131).unsqueeze(1)
    head = Fp8Head.from_full(weight, shard)
    packed, scale = pack_fp8_per_channel(shard.shard_rows(weight))
    real = slice(0, shard.num_org)
    assert torch.equal(head.weight[real].view(torch.uint8), packed[real].view(torch.uint8))
    assert torch.equal(head.weight_scale[real], scale[real])


@given(
    seed=st.integers(0, 999),
    units=st.sampled_from([1, 7, 64, 513]),
    spread=st.sampled_from([0.0, 4.0]),
    logits_dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float16]),
    hidden_dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
@settings(deadline=None, max_examples=40)
def test_fp8_logits_are_within_the_error_bound_of_the_float64_product(seed, units, spread, logits_dtype, hidden_dtype):
    shard = VocabShard.even(0, 1, 100)
    weight = gaussian(100, units, seed=seed) * torch.exp(spread * gaussian(100, 1, seed=seed + 1))
    packed, scale = pack_fp8_per_channel(weight)
    head = Fp8Head(
        weight=shard.shard_rows(packed), weight_scale=shard.shard_rows(scale), shard=shard, logits_dtype=logits_dtype
    )
    hidden = gaussian(5, units, seed=seed + 2).to(hidden_dtype)
    logits = head.quant_method.apply(head, hidden)
    assert logits.dtype == logits_dtype
    assert logits.shape == (5, 128)
    full = dequantise_fp8(packed, scale)
    error = (logits[:, :100].double() - reference_logits(hidden, full)).abs()
    assert (error <= error_bound(hidden, full, logits_dtype)).all()


@given(
    seed=st.integers(0, 999),
    units=st.sampled_from([1, 33, 512, 2048]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float16]),
    rows=st.sampled_from([1, 2, 9]),
)
@settings(deadline=None, max_examples=40)
def test_dense_logits_are_within_the_error_bound_of_the_float64_product(seed, units, dtype, rows):
    hidden, weight = gaussian(rows, units, seed=seed).to(dtype), gaussian(50, units, seed=seed + 1).to(dtype)
    logits = torch.nn.functional.linear(hidden, weight)
    error = (logits.double() - reference_logits(hidden, weight)).abs()
    assert (error <= error_bound(hidden, weight, dtype)).all()


class LargestWidened(TorchDispatchMode):
    """Records the most elements that any one conversion from fp8 produced."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        packed = [a for a in args if isinstance(a, torch.Tensor) and a.dtype == FP8]
        if packed and isinstance(result, torch.Tensor) and result.dtype != FP8:
            self.largest = max(self.largest, result.numel())
        return result


def test_the_whole_head_is_never_widened_at_once_and_tiles_do_not_change_the_logits(monkeypatch):
    shard = VocabShard.even(0, 1, 200)
    weight = torch.randint(-8, 9, (200, 16), generator=torch.Generator().manual_seed(1)).float()
    head = Fp8Head.from_full(weight, shard)
    hidden = torch.randint(-8, 9, (3, 16), generator=torch.Generator().manual_seed(2)).bfloat16()
    whole = head.quant_method.apply(head, hidden)
    monkeypatch.setattr(tiles, "TILE_BYTES", 4 * 16 * 7)  # 7 rows, which does not divide 256
    with LargestWidened() as widened:
        tiled = head.quant_method.apply(head, hidden)
    assert 0 < widened.largest <= 7 * 16
    assert torch.equal(tiled, whole)


def test_a_bias_is_added_per_row_of_the_vocabulary_and_keeps_the_logits_dtype():
    head = Fp8Head.from_full(torch.ones(64, 4), VocabShard.even(0, 1, 64))
    bias = torch.arange(64).float()
    logits = Fp8Method().apply(head, torch.ones(2, 4), bias)
    assert logits.dtype == torch.bfloat16
    assert logits.float()[1].tolist() == (4 + bias).bfloat16().float().tolist()


@pytest.mark.parametrize("rows", [0, 3])
def test_heads_without_rows_multiply_to_logits_without_columns(rows):
    shard = VocabShard.uneven(0, [0, 10])
    head = Fp8Head.from_full(torch.ones(10, 4), shard)
    assert head.quant_method.apply(head, torch.ones(rows, 4)).shape == (rows, 0)


def on_cuda(*shape):
    return SimpleNamespace(is_cuda=True, shape=shape, device=torch.device("cuda", 0))


def test_the_cuda_kernel_is_chosen_from_sizes_dtype_and_capability_and_never_for_uneven_shards(monkeypatch):
    capability = [(9, 0)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[0])
    head = Fp8Head.from_full(torch.ones(64, 16), VocabShard.even(0, 1, 64))
    assert fits_scaled_mm(head, on_cuda(2, 16))
    assert not fits_scaled_mm(head, torch.ones(2, 16, dtype=torch.bfloat16))
    assert not fits_scaled_mm(head, on_cuda(0, 16))
    assert not fits_scaled_mm(replace(head, logits_dtype=torch.float32), on_cuda(2, 16))
    for shard, units in [
        (VocabShard.even(0, 1, 64), 24),
        (VocabShard.even(0, 8, 64), 16),
        (VocabShard.uneven(0, [48, 16]), 16),
    ]:
        assert not fits_scaled_mm(Fp8Head.from_full(torch.ones(64, units), shard), on_cuda(2, units))
    capability[0] = (8, 9)
    assert not fits_scaled_mm(head, on_cuda(2, 16))


@pytest.mark.skipif(
    TORCH < (2, 13), reason="before torch 2.13 the CPU kernel of _scaled_mm takes one scale, not one per row"
)
def test_w8a8_is_the_product_of_activations_that_are_packed_like_weights():
    weight, hidden = gaussian(64, 32, seed=1), gaussian(5, 32, seed=2).bfloat16()
    head = Fp8Head.from_full(weight, VocabShard.even(0, 1, 64))
    packed_hidden, full = dequantise_fp8(*pack_fp8_per_channel(hidden)), dequantise_fp8(head.weight, head.weight_scale)
    error = (fp8.apply_scaled_mm(head, hidden).double() - reference_logits(packed_hidden, full)).abs()
    assert (error <= error_bound(packed_hidden, full, torch.bfloat16)).all()


def test_a_method_that_may_not_quantize_activations_never_takes_w8a8(monkeypatch):
    monkeypatch.setattr(fp8, "fits_scaled_mm", lambda layer, x: True)
    monkeypatch.setattr(fp8, "apply_scaled_mm", lambda layer, x: "w8a8")
    head = Fp8Head.from_full(gaussian(64, 32, seed=1), VocabShard.even(0, 1, 64))
    hidden = gaussian(5, 32, seed=2).bfloat16()
    assert Fp8Method().apply(head, hidden) == "w8a8"
    careful = Fp8Method(quantize_activations=False).apply(head, hidden)
    assert torch.equal(careful, tiles.apply_in_tiles(head, hidden))


def test_heads_say_the_dtype_of_their_logits_and_not_of_their_storage():
    shard = VocabShard.even(0, 1, 64)
    assert Fp8Head.from_full(torch.ones(64, 4), shard).logits_dtype == torch.bfloat16
    assert DenseHead.from_full(torch.ones(64, 4), shard).logits_dtype == torch.float32
    assert DenseHead.from_full(torch.ones(64, 4), shard).hidden_size == 4


SHARD = VocabShard.even(0, 2, 100)


@pytest.mark.parametrize(
    "build",
    [
        lambda: DenseHead(weight=torch.zeros(50, 4), shard=SHARD),  # the unpadded share
        lambda: DenseHead(weight=torch.zeros(64), shard=SHARD),
        lambda: DenseHead(weight=torch.zeros(64, 4, dtype=torch.uint8), shard=SHARD),
        lambda: DenseHead(weight=torch.zeros(64, 4).to(FP8), shard=SHARD),
        lambda: Fp8Head(weight=torch.zeros(64, 4), weight_scale=torch.ones(64, 1), shard=SHARD),
        lambda: Fp8Head(weight=torch.zeros(64, 4).to(FP8), weight_scale=torch.ones(128, 1), shard=SHARD),
        lambda: Fp8Head(weight=torch.zeros(64, 4).to(FP8), weight_scale=torch.ones(64, 2), shard=SHARD),
        lambda: Fp8Head(weight=torch.zeros(64, 4).to(FP8), weight_scale=torch.ones(64, 1).half(), shard=SHARD),
    ],
)
def test_parameters_that_contradict_the_shard_or_the_format_are_refused_with_advice(build):
    with pytest.raises(HeadError, match=r": (lay|give|pack)"):
        build()
