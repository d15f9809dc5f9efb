"""compressed-tensors as the oracle: it packs the same bytes from the same weights, and reads ours as we do."""

import pytest
import torch
from compressed_tensors import compressors
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from hypothesis import given, settings
from hypothesis import strategies as st

from tpbed.selector.checkpoint import read_packed, write_packed
from tpbed.selector.fp8 import BLOCK
from tpbed.selector.nvfp4 import GROUP
from tpbed.selector.quantized import FORMATS
from tpbed.selector.scheme import quantization_config
from tpbed.selector.shard import VocabShard

COMPRESSORS = {
    "fp8": compressors.FloatQuantizationCompressor,
    "fp8-tensor": compressors.FloatQuantizationCompressor,
    "fp8-block": compressors.FloatQuantizationCompressor,
    "int8": compressors.IntQuantizationCompressor,
    "nvfp4-ct": compressors.NVFP4PackedCompressor,
}
PRESETS = {"fp8": "FP8_DYNAMIC", "fp8-tensor": "FP8", "fp8-block": "FP8_BLOCK", "int8": "W8A8", "nvfp4-ct": "NVFP4A16"}


def scheme_of(name):
    return QuantizationScheme(**quantization_config(name)["config_groups"]["group_0"])


def weights(kind, seed):
    """(150, 160) float32: a partial block of rows and of columns."""
    made = torch.randn(150, 160, generator=torch.Generator().manual_seed(seed))
    if kind == "zero rows":
        made[::3], made[:, 16:32] = 0.0, 0.0
    elif kind == "negative zero":
        made[made < 0] = -0.0
    elif kind == "largest":
        made *= torch.finfo(torch.float32).max / made.abs().max()
    elif kind == "spread":
        made *= torch.exp(12 * torch.randn(150, 1, generator=torch.Generator().manual_seed(seed + 1)))
    elif kind == "ties":
        made = (made * 8).round() / 4
    elif kind == "all zero":
        made = torch.zeros_like(made)
    elif kind == "small":
        made *= 1e-34
    return made


KINDS = ["gaussian", "zero rows", "negative zero", "largest", "spread", "ties", "all zero", "small"]


def extremes(name, weight):
    """The least and largest entry of what shares a scale, in the shape of the scales."""
    if name == "fp8-tensor":
        return weight.amin().reshape(1), weight.amax().reshape(1)
    if name in ("fp8", "int8"):
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if name == "nvfp4-ct":
        groups = weight.unflatten(1, (-1, GROUP))
        return groups.amin(2), groups.amax(2)
    rows, units = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -units % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def compress(name, weight):
    """What the package makes of a weight, its own scales included."""
    args = scheme_of(name).weights
    state = {"weight": weight}
    if name == "nvfp4-ct":
        state["weight_global_scale"] = generate_gparam(weight.amin(), weight.amax())
    state["weight_scale"], _ = calculate_qparams(
        *extremes(name, weight), args, global_scale=state.get("weight_global_scale")
    )
    return COMPRESSORS[name].compress(state, scheme_of(name))


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", COMPRESSORS)
@given(seed=st.integers(0, 99))
@settings(deadline=None, max_examples=3)
def test_the_package_packs_the_same_bytes_and_scales(name, kind, seed):
    ours, theirs = FORMATS[name].pack(weights(kind, seed)), compress(name, weights(kind, seed))
    assert set(ours) == set(theirs)
    assert {key: same(ours[key], theirs[key]) for key in ours} == dict.fromkeys(ours, True)


@pytest.mark.parametrize("kind", [*KINDS, "subnormal scales"])
@pytest.mark.parametrize("name", COMPRESSORS)
def test_the_package_widens_packed_rows_to_the_same_bits(name, kind):
    packed = FORMATS[name].pack(weights(kind, 5))
    if kind == "subnormal scales" and name == "nvfp4-ct":
        packed["weight_global_scale"] = torch.tensor([3e38])
        packed["weight_scale"] = torch.full_like(packed["weight_scale"].float(), 2.0**-9).to(torch.float8_e4m3fn)
    elif kind == "subnormal scales":
        packed["weight_scale"] = torch.full_like(packed["weight_scale"], 3e-44)
    theirs = COMPRESSORS[name].decompress(packed, scheme_of(name))["weight"]
    head = FORMATS[name].head(packed, VocabShard.uneven(0, [150]))
    assert same(head.widen(slice(0, 150)).to(theirs.dtype), theirs)


def test_the_package_combines_the_scales_of_nvfp4_to_the_same_float32():
    """Its decompressor rounds to bfloat16; below that is its dequantize, which does not."""
    packed = FORMATS["nvfp4-ct"].pack(weights("spread", 6))
    head = FORMATS["nvfp4-ct"].head(packed, VocabShard.uneven(0, [150]))
    theirs = dequantize(
        unpack_fp4_from_uint8(packed["weight_packed"], 150, 160, dtype=torch.float32),
        packed["weight_scale"].float(),
        args=scheme_of("nvfp4-ct").weights,
        global_scale=packed["weight_global_scale"],
    )
    assert same(head.widen(slice(0, 150)), theirs)


@pytest.mark.parametrize("name", ["fp8", "fp8-tensor", "fp8-block", "int8"])
def test_the_package_packs_the_same_bytes_where_it_is_given_our_scale_of_a_tiny_row(name):
    """Its own scale of such a row is subnormal and has lost digits; ours is held at the least normal number."""
    weight = weights("gaussian", 3) * 1e-37
    ours = FORMATS[name].pack(weight)
    theirs = COMPRESSORS[name].compress({"weight": weight, "weight_scale": ours["weight_scale"]}, scheme_of(name))
    assert same(ours["weight"], theirs["weight"])


@pytest.mark.parametrize("name", COMPRESSORS)
def test_the_package_understands_the_metadata_and_means_the_same_scheme(name):
    config = QuantizationConfig.model_validate(quantization_config(name))
    group = config.config_groups["group_0"]
    assert config.format == group.format
    assert compressors.BaseCompressor.get_value_from_registry(config.format) is COMPRESSORS[name]
    assert group.weights == preset_name_to_scheme(PRESETS[name], ["Linear"]).weights
    assert COMPRESSORS[name].can_compress(torch.nn.Linear, group)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_checkpoint_of_the_package_loads_as_ours(name, tmp_path):
    theirs = compress(name, weights("gaussian", 8))
    write_packed(tmp_path, theirs, name)
    found, packed = read_packed(tmp_path)
    assert found == name
    ours = FORMATS[name].head(FORMATS[name].pack(weights("gaussian", 8)), VocabShard.even(0, 1, 150))
    head = FORMATS[name].head(packed, VocabShard.even(0, 1, 150))
    assert same(head.widen(slice(0, 150)), ours.widen(slice(0, 150)))


def test_the_package_turns_modelopt_tensors_into_the_other_layout_as_we_read_them():
    """Its converter: the bytes and group scales stay, the global scale is inverted."""
    from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter

    packed = FORMATS["nvfp4-modelopt"].pack(weights("gaussian", 4))
    named = {f"lm_head.{key}": tensor for key, tensor in packed.items()}
    turned = ModelOptNvfp4Converter(targets=["re:lm_head"]).process(named)
    ours = FORMATS["nvfp4-modelopt"].dequantise(packed)
    theirs = FORMATS["nvfp4-ct"].dequantise({key.removeprefix("lm_head."): tensor for key, tensor in turned.items()})
    assert ((ours - theirs).abs() <= 2.0**-23 * ours.abs()).all()  # of one inversion
