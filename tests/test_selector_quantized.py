"""Packed heads of every format: the error bound holds, shards keep their scales, and no head is widened whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tpbed.selector import fp8, tiles
from tpbed.selector.fp8 import Fp8Head, fits_scaled_mm
from tpbed.selector.head import HeadError
from tpbed.selector.int8 import Int8Head, pack_int8
from tpbed.selector.nvfp4 import E2M1, Nvfp4Head, dequantise_nvfp4, pack_nvfp4, unpack_e2m1
from tpbed.selector.quantized import FORMATS
from tpbed.selector.reference import error_bound, reference_logits
from tpbed.selector.select import compute_candidates
from tpbed.selector.shard import ShardError, VocabShard
from tpbed.selector.tiles import TiledMethod
from tpbed.tp.simulated import SimulatedWorld


def gaussian(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("name", FORMATS)
@given(
    seed=st.integers(0, 999),
    units=st.sampled_from([16, 144, 512]),
    exponent=st.sampled_from([-20, 0, 15]),
    spread=st.sampled_from([0.0, 3.0]),
    logits_dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    tp=st.sampled_from([1, 2, 4]),
)
@settings(deadline=None, max_examples=12)
def test_the_logits_of_all_shards_are_within_the_bound_of_the_float64_product(
    name, seed, units, exponent, spread, logits_dtype, tp
):
    weight = gaussian(1000, units, seed=seed, scale=10.0**exponent)
    weight *= torch.exp(spread * gaussian(1000, 1, seed=seed + 1))
    packed, hidden = FORMATS[name].pack(weight), gaussian(3, units, seed=seed + 2).bfloat16()
    found = []
    for rank in range(tp):
        head = FORMATS[name].head(packed, VocabShard.even(rank, tp, 1000))
        object.__setattr__(head, "logits_dtype", logits_dtype)
        found.append(TiledMethod().apply(head, hidden)[:, : head.shard.num_org])
    full = FORMATS[name].dequantise(packed)
    error = (torch.cat(found, 1).double() - reference_logits(hidden, full)).abs()
    assert (error <= error_bound(hidden, full, logits_dtype)).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("exponent", [-37, -20, 0, 30])
def test_packing_keeps_a_weight_within_the_steps_of_its_format(name, exponent):
    weight = gaussian(130, 160, seed=3, scale=10.0**exponent)
    back = FORMATS[name].dequantise(FORMATS[name].pack(weight))
    amax = weight.double().abs().amax()
    # half of the widest step: 2 of 6 codes in E2M1 and the 1/16 of its scale, 1 of 16 in E4M3, 1 of 127.5
    step = {"fp8": 1 / 16, "int8": 1 / 255, "nvfp4": 1 / 6 + 1 / 16}[name.split("-")[0]]
    if exponent > -37 or name != "nvfp4-ct":  # its global scale overflows there, and is 1 by definition
        allowed = torch.clamp(amax * step, min=2.0**-127)  # half of the least scale that the 8-bit formats use
        assert ((back - weight.double()).abs() <= allowed * (1 + 1e-4)).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(0, 16), (3, 0), (0, 0)])
def test_packing_takes_weights_without_rows_or_without_units(name, shape):
    assert FORMATS[name].dequantise(FORMATS[name].pack(torch.zeros(shape))).shape == shape


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_pack_to_zeros(name):
    weight = torch.tensor([0.0, -0.0]).repeat(3, 64)
    back = FORMATS[name].dequantise(FORMATS[name].pack(weight))
    assert back.shape == weight.shape
    assert not back.any()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rank", range(4))
def test_the_rows_of_a_shard_widen_to_the_rows_of_the_whole_head(name, rank):
    """Scales follow their rows: each row has another magnitude, and each block."""
    weight = gaussian(1000, 144, seed=5) * torch.arange(1, 1001).unsqueeze(1) * torch.arange(1, 145)
    packed, shard = FORMATS[name].pack(weight), VocabShard.even(rank, 4, 1000)
    whole = FORMATS[name].head(packed, VocabShard.even(0, 1, 1000)).widen(slice(0, 1000))
    head = FORMATS[name].head(packed, shard)
    pieces = [head.widen(slice(start, min(start + 50, shard.num_org))) for start in range(0, shard.num_org, 50)]
    assert torch.equal(torch.cat(pieces), whole[shard.org_start :][: shard.num_org])
    full = FORMATS[name].dequantise(packed)
    assert ((whole.double() - full).abs() <= 2.0**-22 * full.abs()).all()


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest tensor that any operation made, views of what was there left out."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = [a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)]
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in given:
            self.largest = max(self.largest, result.numel() * result.element_size())
        return result


@pytest.mark.parametrize("name", FORMATS)
def test_no_head_is_widened_whole_and_tiles_do_not_change_the_logits(name, monkeypatch):
    weight = torch.randint(-6, 7, (1000, 144), generator=torch.Generator().manual_seed(1)).float()
    head = FORMATS[name].head(FORMATS[name].pack(weight), VocabShard.even(0, 1, 1000))
    hidden = torch.randint(-2, 3, (1, 144), generator=torch.Generator().manual_seed(2)).float()
    object.__setattr__(head, "logits_dtype", torch.float32)
    whole = TiledMethod().apply(head, hidden)
    monkeypatch.setattr(tiles, "TILE_BYTES", 4 * 144 * 7)  # 7 rows, which divides neither 1,024 nor a block
    with LargestTensor() as made:
        tiled = TiledMethod().apply(head, hidden)
    assert made.largest <= 4 * 7 * 256  # a tile of 7 rows, padded to blocks; the logits have 4,096 bytes
    assert torch.allclose(tiled, whole, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("tp, org", [(4, 600), (2, 64), (8, 1024 - 64)])
def test_an_edge_that_cuts_a_block_is_refused_on_every_rank_in_the_same_words(tp, org):
    told = set()
    for rank in range(tp):
        with pytest.raises(ShardError, match=f"pad_to={128 * tp}") as caught:
            Fp8Head.from_full(torch.ones(org, 16), VocabShard.even(rank, tp, org), granularity="block")
        told.add(str(caught.value))
        Fp8Head.from_full(torch.ones(org, 16), VocabShard.even(rank, tp, org, pad_to=128 * tp), granularity="block")
    assert len(told) == 1


@pytest.mark.parametrize("widths", [[100, 284], [128, 128, 1, 127], [0, 64, 320], [383, 1]])
@pytest.mark.parametrize("units", [16, 144])
def test_uneven_shares_that_cut_a_block_are_refused_on_every_rank_in_the_same_words(widths, units):
    told = set()
    for rank in range(len(widths)):
        with pytest.raises(ShardError, match="which cuts a block of 128 rows") as caught:
            Fp8Head.from_full(torch.ones(384, units), VocabShard.uneven(rank, widths), granularity="block")
        told.add(str(caught.value))
    assert len(told) == 1


@pytest.mark.parametrize("widths", [[384], [128, 256], [0, 384], [128, 0, 256, 0], [0, 0, 0, 384]])
@pytest.mark.parametrize("units", [16, 144])
@pytest.mark.parametrize("admission", ["rank_local", "agreed"])
def test_uneven_shares_that_end_where_blocks_do_are_served(widths, units, admission):
    weight, hidden = gaussian(384, units, seed=1), gaussian(3, units, seed=2).bfloat16()
    full = FORMATS["fp8-block"].pack(weight)

    def program(rank: int):
        head = Fp8Head.from_packed(full, VocabShard.uneven(rank, widths))
        assert head.granularity == "block"
        return compute_candidates(hidden, head, k=9, group=None, merge="packed", admission=admission)

    alone = Fp8Head.from_packed(full, VocabShard.even(0, 1, 384))
    expected = compute_candidates(hidden, alone, k=9, group=None, merge="packed")
    for found in SimulatedWorld(len(widths)).run(program).results:
        assert torch.equal(found.ids, expected.ids) and torch.equal(found.values, expected.values)


def test_a_share_of_a_part_of_a_block_cuts_nothing_if_one_rank_holds_all_tokens():
    held = [Fp8Head.from_full(torch.ones(30, 16), VocabShard.even(r, 2, 30), granularity="block") for r in range(2)]
    assert [head.shard.num_org for head in held] == [30, 0]


def test_blocks_refuse_added_tokens():
    for rank in range(2):
        with pytest.raises(ShardError, match="added_vocab_size=64"):
            Fp8Head.from_full(torch.ones(320, 16), VocabShard.even(rank, 2, 256, 64), granularity="block")


@pytest.mark.parametrize("name", ["fp8", "fp8-tensor", "fp8-block", "int8"])
def test_scales_that_are_whole_numbers_are_refused(name):
    packed = FORMATS[name].pack(gaussian(384, 144))
    with pytest.raises(HeadError, match="weight_scale is torch.int32, but a scale is a fraction"):
        FORMATS[name].head(packed | {"weight_scale": packed["weight_scale"].int()}, VocabShard.even(0, 1, 384))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("weight", [torch.ones(32), torch.ones(2, 3, 32), torch.tensor(1.0)])
def test_packing_refuses_what_has_no_rows_and_units(name, weight):
    with pytest.raises(HeadError, match=r"give \(rows, hidden units\)"):
        FORMATS[name].pack(weight)


@pytest.mark.parametrize("units", [8, 17, 100])
def test_nvfp4_refuses_rows_that_do_not_divide_into_groups(units):
    with pytest.raises(HeadError, match="groups of 16"):
        pack_nvfp4(torch.ones(4, units))


def test_a_block_at_the_edge_has_the_scale_of_the_entries_that_it_has():
    weight = torch.ones(130, 129)
    weight[129, 128] = 896.0
    _, scale = fp8.pack_fp8_per_block(weight)
    assert (scale * 448).round().tolist() == [[1, 1], [1, 896]]


def test_int8_uses_its_whole_range_and_rounds_ties_to_even():
    packed = pack_int8(torch.tensor([[127.5, -127.5, 0.5, 1.5, 2.5, -0.5]]))
    assert packed["weight_scale"].item() == 1.0
    assert packed["weight"].tolist() == [[127, -128, 0, 2, 2, 0]]


def test_every_e2m1_byte_is_its_low_half_and_then_its_high_half():
    codes = [(-1.0) ** (code >> 3) * E2M1[code & 7] for code in range(16)]
    found = unpack_e2m1(torch.arange(256, dtype=torch.uint8).reshape(4, 64)).reshape(256, 2)
    assert found.tolist() == [[codes[byte % 16], codes[byte // 16]] for byte in range(256)]


@given(seed=st.integers(0, 999), exponent=st.integers(-30, 30))
@settings(deadline=None, max_examples=30)
def test_modelopt_bytes_mean_what_a_decoder_in_plain_numbers_says(seed, exponent):
    """ModelOpt is not here: a decoder of its documented layout that shares nothing with ours."""
    weight = gaussian(3, 32, seed=seed, scale=10.0**exponent)
    packed = pack_nvfp4(weight, "modelopt")
    overall = packed["weight_scale_2"].item()
    assert overall == pytest.approx(weight.abs().max().item() / (448 * 6), rel=1e-6)
    full = dequantise_nvfp4(packed, "modelopt")
    for row, pairs in enumerate(packed["weight"].tolist()):
        for at, byte in enumerate(pairs):
            scale = plain_e4m3(packed["weight_scale"].view(torch.uint8)[row, at // 8].item()) * overall
            wanted = [plain_e2m1(byte & 15) * scale, plain_e2m1(byte >> 4) * scale]
            assert full[row, 2 * at : 2 * at + 2].tolist() == wanted


def plain_e2m1(code):
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (0.5 * mantissa if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def plain_e4m3(byte):
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def test_no_e2m1_code_would_be_nearer_to_a_weight_than_the_one_it_was_packed_in():
    weight = gaussian(8, 64, seed=9)
    for layout in ("compressed-tensors", "modelopt"):
        head = Nvfp4Head.from_full(weight, VocabShard.uneven(0, [8]), layout=layout)
        back = head.widen(slice(0, 8)).double()
        scale = head.weight_scale.double().repeat_interleave(16, 1)
        scale = scale / head.global_scale if layout == "compressed-tensors" else scale * head.global_scale
        values = torch.tensor([sign * value for value in E2M1 for sign in (1, -1)], dtype=torch.float64)
        nearest = (values * scale.unsqueeze(2) - weight.double().unsqueeze(2)).abs().amin(2)
        assert ((back - weight.double()).abs() <= nearest + 1e-6).all()


def test_the_cuda_kernel_takes_one_scale_for_all_and_never_blocks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    class OnCuda:
        is_cuda, shape, device = True, (2, 16), None

    heads = {g: Fp8Head.from_full(torch.ones(64, 16), VocabShard.even(0, 1, 64), granularity=g) for g in GRANULARITIES}
    assert {g: fits_scaled_mm(head, OnCuda) for g, head in heads.items()} == {
        "channel": True,
        "tensor": True,
        "block": False,
    }


GRANULARITIES = ("channel", "tensor", "block")


def test_w8a8_with_one_scale_is_the_product_of_activations_packed_with_one_scale():
    weight, hidden = gaussian(64, 32, seed=1), gaussian(5, 32, seed=2).bfloat16()
    head = Fp8Head.from_full(weight, VocabShard.even(0, 1, 64), granularity="tensor")
    states = fp8.dequantise_fp8(*fp8.pack_fp8_per_tensor(hidden))
    full = fp8.dequantise_fp8(head.weight, head.weight_scale)
    error = (fp8.apply_scaled_mm(head, hidden).double() - reference_logits(states, full)).abs()
    assert (error <= error_bound(states, full, torch.bfloat16)).all()


SHARD = VocabShard.even(0, 2, 100)
E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    "build",
    [
        lambda: Int8Head(weight=torch.zeros(50, 4).char(), weight_scale=torch.ones(50, 1), shard=SHARD),
        lambda: Int8Head(weight=torch.zeros(64, 4), weight_scale=torch.ones(64, 1), shard=SHARD),
        lambda: Int8Head(weight=torch.zeros(64, 4).char(), weight_scale=torch.ones(64, 2), shard=SHARD),
        lambda: nvfp4(weight=torch.zeros(64, 8).char()),
        lambda: nvfp4(weight=torch.zeros(64, 9).byte()),
        lambda: nvfp4(weight_scale=torch.ones(64, 2).to(E4M3)),
        lambda: nvfp4(weight_scale=torch.ones(64, 1)),
        lambda: nvfp4(global_scale=torch.ones(2)),
        lambda: nvfp4(layout="marlin"),
    ],
)
def test_parameters_that_contradict_the_shard_or_the_format_are_refused_with_advice(build):
    with pytest.raises(HeadError, match=r": (lay|give|pack)"):
        build()


def nvfp4(**changed):
    sound = {
        "weight": torch.zeros(64, 8).byte(),
        "weight_scale": torch.ones(64, 1).to(E4M3),
        "global_scale": torch.ones(1),
        "layout": "compressed-tensors",
    }
    return Nvfp4Head(shard=SHARD, **(sound | changed))


def test_the_parameters_that_the_refusals_start_from_are_sound():
    assert nvfp4().hidden_size == 16
