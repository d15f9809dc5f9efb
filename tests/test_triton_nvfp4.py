"""triton_nvfp4 against the weight that a packed head stands for: compiled on a GPU, else in Triton's interpreter."""

from math import nan

import pytest
import torch
from triton_place import COMPILED, PLACE, quiet_interpreter, require_triton

from tpbed.selector.nvfp4 import E2M1, GROUP, Nvfp4Head, dequantise_nvfp4, fits_triton, pack_nvfp4
from tpbed.selector.shard import VocabShard
from tpbed.selector.tiles import apply_in_tiles
from tpbed.selector.triton_nvfp4 import TILINGS, Tiling, TritonNvfp4, triton_nvfp4

require_triton()
pytestmark = quiet_interpreter
BF16, F32 = torch.bfloat16, torch.float32
ONE = torch.ones(1, device=PLACE)
SMALL = Tiling(columns=32, units=64, warps=4, stages=2)
PAIRS = [True, False] if COMPILED else [False]  # the interpreter knows no assembly
needs_cuda = pytest.mark.skipif(not COMPILED, reason="needs a CUDA device")


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def exact_case(seed: int, rows: int, width: int, units: int):
    """Activations, packed codes and scales whose sums float32 holds exactly, in whatever order they are taken."""
    x = torch.randint(-4, 5, (rows, units), generator=draw(seed)).to(BF16)
    packed = torch.randint(0, 256, (width, units // 2), generator=draw(seed + 1)).to(torch.uint8)
    exponents = torch.randint(-2, 3, (width, units // GROUP), generator=draw(seed + 2))
    return x.to(PLACE), packed.to(PLACE), torch.exp2(exponents.float()).to(torch.float8_e4m3fn).to(PLACE)


def weight_of(packed, scale, global_scale, layout):
    name, overall = ("weight_packed", "weight_global_scale") if layout == "compressed-tensors" else (
        "weight", "weight_scale_2",
    )  # fmt: skip
    return dequantise_nvfp4({name: packed, "weight_scale": scale, overall: global_scale}, layout)


@pytest.mark.parametrize("pairs", PAIRS)
def test_every_code_times_every_finite_scale_is_exact(pairs):
    """Of subnormal scales, too, and of 0.5, whose bits are those of a subnormal bfloat16."""
    scale = torch.arange(256, device=PLACE).to(torch.uint8).view(torch.float8_e4m3fn).unsqueeze(1)
    scale = scale[~scale.float().isnan().squeeze(1)]
    codes = torch.arange(16, device=PLACE).to(torch.uint8)
    packed = (codes[0::2] | codes[1::2] << 4).expand(len(scale), 8).contiguous()
    kernel = TritonNvfp4(tiling=SMALL, pairs=pairs)
    found = kernel(torch.eye(16, device=PLACE).to(BF16), packed, scale, ONE, divides=False, dtype=F32)
    entries = torch.tensor([*E2M1, *(-size for size in E2M1)], device=PLACE)
    assert len(scale) == 254 and torch.equal(found, entries.unsqueeze(1) * scale.float().squeeze(1))


@pytest.mark.parametrize(("layout", "overall"), [("compressed-tensors", 8.0), ("modelopt", 0.125)])
@pytest.mark.parametrize(
    ("rows", "width", "units"), [(1, 1, 16), (7, 100, 144), (9, 33, 64), (17, 70, 80), (33, 40, 64), (70, 40, 32)]
)
def test_where_sums_are_exact_the_logits_are_those_of_the_dequantised_weight(rows, width, units, layout, overall):
    x, packed, scale = exact_case(rows, rows, width, units)
    global_scale = torch.tensor([overall], device=PLACE)
    kernel = TritonNvfp4(tiling=SMALL, pairs=COMPILED)
    found = kernel(x, packed, scale, global_scale, divides=layout == "compressed-tensors", dtype=F32)
    wanted = x.double() @ weight_of(packed, scale, global_scale, layout).t()
    assert torch.equal(found.double(), wanted) and found.abs().max() > 0


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_real_weights_stay_within_the_rounding_of_float32_sums(layout):
    weight = torch.randn(200, 256, generator=draw(1)) * 0.02
    x = torch.randn(7, 256, generator=draw(2)).to(BF16)
    head = Nvfp4Head.from_full(weight, VocabShard.even(0, 1, 200), layout=layout)
    found = triton_nvfp4(
        x.to(PLACE),
        head.weight.to(PLACE),
        head.weight_scale.to(PLACE),
        head.global_scale.to(PLACE),
        divides=layout == "compressed-tensors",
        dtype=F32,
    ).cpu()[:, :200]
    exact = dequantise_nvfp4(pack_nvfp4(weight, layout), layout)
    bound = 256 * 2.0**-22 * (x.double().abs() @ exact.abs().t())
    assert ((found.double() - x.double() @ exact.t()).abs() <= bound).all()


def test_a_column_of_nan_spoils_no_other_and_a_row_no_other():
    x, packed, scale = exact_case(5, 3, 40, 64)
    wanted = triton_nvfp4(x, packed, scale, ONE, divides=False, dtype=F32)
    scale[39], x[1] = nan, nan
    found = triton_nvfp4(x, packed, scale, ONE, divides=False, dtype=F32)
    assert torch.equal(found[::2, :39], wanted[::2, :39])
    assert found[1].isnan().all()
    assert not COMPILED or found[:, 39].isnan().all()  # the interpreter reads a NaN of float8_e4m3fn as 480


def test_rows_of_a_wider_tensor_are_read_where_they_lie():
    x, packed, scale = exact_case(6, 4, 40, 64)
    wide = torch.full((4, 96), nan, device=PLACE, dtype=BF16)
    wide[:, :64] = x
    found = triton_nvfp4(wide[:, :64], packed, scale, ONE, divides=False, dtype=F32)
    assert torch.equal(found, triton_nvfp4(x, packed, scale, ONE, divides=False, dtype=F32))


def test_no_row_and_no_column_give_empty_logits():
    for rows, width in [(0, 40), (3, 0)]:
        x, packed, scale = exact_case(7, rows, width, 64)
        assert triton_nvfp4(x, packed, scale, ONE, divides=False, dtype=BF16).shape == (rows, width)


@needs_cuda
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 16, 17, 56, 64, 65, 448])
def test_every_tiling_gives_the_exact_sums_with_units_that_it_divides_and_others(rows):
    for units in (1024, 1040):
        x, packed, scale = exact_case(rows, rows, 1000, units)
        wanted = x.double() @ weight_of(packed, scale, ONE, "modelopt").t()
        found = triton_nvfp4(x, packed, scale, ONE, divides=False, dtype=BF16)
        assert torch.equal(found, wanted.to(F32).to(BF16))
    assert set(TILINGS) == {8, 16, 32, 64}


@needs_cuda
@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_a_head_on_a_device_takes_the_kernel_for_bfloat16_and_else_tiles_and_they_are_close(layout):
    weight = torch.randn(1000, 512, generator=draw(3))
    head = Nvfp4Head.from_full(weight.to(PLACE), VocabShard.even(0, 1, 1000), layout=layout)
    x = torch.randn(7, 512, generator=draw(4)).to(PLACE)
    assert fits_triton(head, x.to(BF16)) and not fits_triton(head, x)
    found, wanted = head.quant_method.apply(head, x.to(BF16)), apply_in_tiles(head, x.to(BF16))
    assert (found != wanted).float().mean() < 0.02  # a rounding to bfloat16 that falls the other way
    assert torch.allclose(found.float(), wanted.float(), rtol=2.0**-7, atol=2.0**-7)
    bias = torch.ones(head.shard.width, device=PLACE, dtype=BF16)
    assert torch.equal(head.quant_method.apply(head, x.to(BF16), bias), found + bias)
    assert head.quant_method.apply(head, x).shape == found.shape


@needs_cuda
def test_a_replayed_graph_multiplies_new_activations():
    x, packed, scale = exact_case(8, 7, 1000, 512)
    graph = torch.cuda.CUDAGraph()
    triton_nvfp4(x, packed, scale, ONE, divides=False, dtype=F32)
    with torch.cuda.graph(graph):
        found = triton_nvfp4(x, packed, scale, ONE, divides=False, dtype=F32)
    for seed in range(3):
        x.copy_(exact_case(20 + seed, 7, 1000, 512)[0])
        graph.replay()
        assert torch.equal(found.double(), x.double() @ weight_of(packed, scale, ONE, "modelopt").t())


def test_on_the_cpu_a_head_is_multiplied_in_tiles():
    head = Nvfp4Head.from_full(torch.randn(64, 32, generator=draw(5)), VocabShard.even(0, 1, 64))
    x = torch.randn(2, 32, generator=draw(6)).to(BF16)
    assert not fits_triton(head, x)
    assert torch.equal(head.quant_method.apply(head, x), apply_in_tiles(head, x))
