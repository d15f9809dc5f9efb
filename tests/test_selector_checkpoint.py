"""Checkpoints: real safetensors files with the names and metadata of their tools, whole, in parts, tied, or refused."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tpbed.harness.smollm2 import head_weight, hidden_states, missing_checkpoint
from tpbed.selector.checkpoint import read_packed, write_packed
from tpbed.selector.folder import CheckpointError
from tpbed.selector.fp8 import Fp8Head
from tpbed.selector.head import DenseHead
from tpbed.selector.int8 import Int8Head
from tpbed.selector.nvfp4 import Nvfp4Head
from tpbed.selector.quantized import FORMATS, load_head
from tpbed.selector.reference import error_bound, reference_logits
from tpbed.selector.scheme import format_of, quantization_config
from tpbed.selector.shard import ShardError, VocabShard

HEADS = {"fp8": Fp8Head, "int8": Int8Head, "nvfp4": Nvfp4Head}
NAMES = {
    **dict.fromkeys(["fp8", "fp8-tensor", "fp8-block", "int8"], frozenset({"weight", "weight_scale"})),
    "nvfp4-ct": {"weight_packed", "weight_scale", "weight_global_scale"},
    "nvfp4-modelopt": {"weight", "weight_scale", "weight_scale_2"},
}
WEIGHT = torch.randn(300, 144, generator=torch.Generator().manual_seed(1))
SHARD = VocabShard.even(1, 2, 300, pad_to=256)


def edit(path, **changed):
    config = json.loads((path / "config.json").read_text()) | changed
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", FORMATS)
def test_a_head_comes_back_from_its_file_bit_for_bit(name, tmp_path):
    packed = FORMATS[name].pack(WEIGHT)
    write_packed(tmp_path, packed, name)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == {f"lm_head.{key}" for key in NAMES[name]}
    head_class, written = HEADS[name.split("-")[0]], FORMATS[name].head(packed, SHARD)
    for head in (load_head(tmp_path, SHARD), head_class.from_checkpoint(tmp_path, SHARD)):
        assert isinstance(head, head_class)
        rows = slice(0, SHARD.num_org)
        assert torch.equal(head.widen(rows), written.widen(rows))


@pytest.mark.parametrize("name", FORMATS)
def test_a_head_that_is_tied_to_the_embedding_is_read_from_there(name, tmp_path):
    write_packed(tmp_path, FORMATS[name].pack(WEIGHT), name, name="model.embed_tokens")
    head = load_head(tmp_path, SHARD)
    assert torch.equal(
        head.widen(slice(0, 9)), FORMATS[name].head(FORMATS[name].pack(WEIGHT), SHARD).widen(slice(0, 9))
    )


def test_a_head_of_its_own_goes_before_the_embedding(tmp_path):
    save_file(
        {"lm_head.weight": WEIGHT.contiguous(), "model.embed_tokens.weight": -WEIGHT}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text("{}")
    head = load_head(tmp_path, SHARD)
    assert isinstance(head, DenseHead)
    assert torch.equal(head.weight[: SHARD.num_org], WEIGHT[256:])


def test_an_untied_checkpoint_without_a_head_is_refused(tmp_path):
    write_packed(tmp_path, FORMATS["fp8"].pack(WEIGHT), "fp8", name="model.embed_tokens")
    edit(tmp_path, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match="looked for a weight of lm_head in"):
        load_head(tmp_path, SHARD)


def test_a_checkpoint_in_parts_is_read_through_its_index(tmp_path):
    write_packed(tmp_path, FORMATS["nvfp4-ct"].pack(WEIGHT), "nvfp4-ct")
    whole = load_head(tmp_path, SHARD).widen(slice(0, 9))
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    places = {key: f"model-{at}-of-3.safetensors" for at, key in enumerate(tensors)}
    for key, place in places.items():
        save_file({key: tensors[key]}, tmp_path / place)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert torch.equal(load_head(tmp_path, SHARD).widen(slice(0, 9)), whole)


def test_an_ignored_head_is_dense(tmp_path):
    save_file({"lm_head.weight": WEIGHT.contiguous()}, tmp_path / "model.safetensors")
    config = {"quantization_config": quantization_config("nvfp4-ct") | {"ignore": ["re:.*lm_head"]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert isinstance(load_head(tmp_path, SHARD), DenseHead)


def test_blocks_under_the_name_and_config_of_deepseek_are_the_same_head(tmp_path):
    packed = FORMATS["fp8-block"].pack(WEIGHT)
    write_packed(tmp_path, {"weight": packed["weight"], "weight_scale_inv": packed["weight_scale"]}, "fp8-block")
    edit(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert torch.equal(load_head(tmp_path, SHARD).weight_scale, FORMATS["fp8-block"].head(packed, SHARD).weight_scale)


def test_modelopts_own_file_is_read_where_the_config_is_silent(tmp_path):
    write_packed(tmp_path, FORMATS["nvfp4-modelopt"].pack(WEIGHT), "nvfp4-modelopt")
    edit(tmp_path, quantization_config=None)
    assert read_packed(tmp_path)[0] == "nvfp4-modelopt"


@pytest.mark.parametrize(
    "name, key, layout",
    [("nvfp4-ct", "input_global_scale", "compressed-tensors"), ("nvfp4-modelopt", "input_scale", "modelopt")],
)
def test_the_scale_of_activations_is_kept_and_not_needed(name, key, layout, tmp_path):
    write_packed(tmp_path, FORMATS[name].pack(WEIGHT) | {key: torch.tensor([0.5])}, name)
    head = load_head(tmp_path, SHARD)
    assert (head.input_scale.item(), head.layout) == (0.5, layout)


def test_scales_in_bfloat16_are_widened_as_they_are(tmp_path):
    packed = FORMATS["int8"].pack(WEIGHT)
    write_packed(tmp_path, packed | {"weight_scale": packed["weight_scale"].bfloat16()}, "int8")
    scale = load_head(tmp_path, SHARD).weight_scale[: SHARD.num_org]
    assert torch.equal(scale, packed["weight_scale"][256:].bfloat16().float())


def test_files_and_tensors_that_are_missing_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json is not there"):
        load_head(tmp_path, SHARD)
    write_packed(tmp_path, {"weight": torch.zeros(4, 4).to(torch.float8_e4m3fn)}, "fp8")
    with pytest.raises(CheckpointError, match="is fp8 and has no weight_scale, only weight"):
        load_head(tmp_path, SHARD)
    with pytest.raises(CheckpointError, match="is fp8, not int8"):
        Int8Head.from_checkpoint(tmp_path, SHARD)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor"):
        load_head(tmp_path, SHARD)


def changed_weights(name, **changed):
    config = quantization_config(name)
    config["config_groups"]["group_0"]["weights"] = config["config_groups"]["group_0"]["weights"] | changed
    return config


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq"},
        {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"},
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        changed_weights("int8", symmetric=False),
        changed_weights("int8", num_bits=4),
        changed_weights("nvfp4-ct", group_size=32),
        changed_weights("fp8-block", block_structure=[64, 128]),
    ],
)
def test_a_format_that_is_not_known_is_refused_and_never_guessed(config):
    with pytest.raises(CheckpointError, match="a format that is not known here: use one of"):
        format_of(config, "lm_head")


@pytest.mark.skipif(bool(missing_checkpoint()), reason=missing_checkpoint())
@pytest.mark.parametrize("name", FORMATS)
def test_the_tied_head_of_a_real_model_is_served_from_its_packed_file(name, tmp_path):
    """SmolLM2 has no lm_head: its first 4,000 embeddings packed, written, read by four ranks."""
    packed = FORMATS[name].pack(head_weight()[:4000])
    write_packed(tmp_path, packed, name, name="model.embed_tokens")
    hidden, found = hidden_states()[:5], []
    for rank in range(4):
        head = load_head(tmp_path, VocabShard.even(rank, 4, 4000, pad_to=512))
        found.append(head.quant_method.apply(head, hidden)[:, : head.shard.num_org])
    full = FORMATS[name].dequantise(packed)
    error = (torch.cat(found, 1).double() - reference_logits(hidden, full)).abs()
    assert (error <= error_bound(hidden, full, torch.bfloat16)).all()


DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
DENSE_IN_QUANTIZED = {
    "fp8 blocks, no list": DEEPSEEK,
    "transformers": DEEPSEEK | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": False},
    "awq": {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["lm_head"]},
    "modelopt, glob behind": MODELOPT | {"ignore": ["lm_head*"]},
    "modelopt, globs around": MODELOPT | {"ignore": ["*lm_head*"]},
    "modelopt, cache alone": {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
    "compressed-tensors": quantization_config("fp8") | {"ignore": ["lm_head"]},
}


def write_head(path, config, **tensors):
    save_file({f"lm_head.{key}": value.contiguous() for key, value in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"tie_word_embeddings": False, "quantization_config": config}))


@pytest.mark.parametrize("name", DENSE_IN_QUANTIZED)
def test_a_plain_weight_in_a_quantized_checkpoint_is_a_dense_head(name, tmp_path):
    write_head(tmp_path, DENSE_IN_QUANTIZED[name], weight=WEIGHT.bfloat16())
    head = load_head(tmp_path, SHARD)
    assert isinstance(head, DenseHead)
    assert torch.equal(head.weight[: SHARD.num_org], WEIGHT[256:].bfloat16())


@pytest.mark.parametrize(
    "told", [{"quant_algo": "NVFP4", "exclude_modules": ["lm_head*"]}, {"quant_algo": None}, {"quant_algo": "FP8"}]
)
def test_a_plain_weight_beside_modelopts_own_file_is_a_dense_head(told, tmp_path):
    write_head(tmp_path, None, weight=WEIGHT)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": told}))
    assert isinstance(load_head(tmp_path, SHARD), DenseHead)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8, torch.float64])
@pytest.mark.parametrize("name", DENSE_IN_QUANTIZED)
def test_a_packed_weight_without_its_scales_is_never_taken_for_a_head(name, dtype, tmp_path):
    write_head(tmp_path, DENSE_IN_QUANTIZED[name], weight=WEIGHT.to(dtype))
    with pytest.raises(CheckpointError, match="another checkpoint|not known here"):
        load_head(tmp_path, SHARD)


@pytest.mark.parametrize(
    ("config", "module", "dense"),
    [
        (DEEPSEEK | {"modules_to_not_convert": ["lm_head"]}, "lm_head", True),
        (DEEPSEEK | {"modules_to_not_convert": ["lm_head"]}, "language_model.lm_head", True),
        (DEEPSEEK | {"modules_to_not_convert": ["language_model"]}, "language_model.lm_head", True),
        (DEEPSEEK | {"modules_to_not_convert": ["head", "lm", "lm_head.gate"]}, "lm_head", False),
        (MODELOPT | {"ignore": ["lm_head*"]}, "lm_head", True),
        (MODELOPT | {"ignore": ["lm_head*"]}, "language_model.lm_head", False),
        (MODELOPT | {"exclude_modules": ["*lm_head"]}, "language_model.lm_head", True),
        (MODELOPT | {"quant_algo": None}, "lm_head", True),
        (quantization_config("fp8") | {"ignore": ["re:.*head$"]}, "lm_head", True),
        (quantization_config("fp8") | {"ignore": ["re:head$"]}, "lm_head", False),
        (None, "lm_head", True),
    ],
)
def test_the_lists_of_all_tools_say_which_module_is_left_dense(config, module, dense):
    assert (format_of(config, module) is None) == dense


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("embedding", [False, True])
def test_a_head_packed_by_a_tool_that_is_not_known_is_refused_by_its_name(method, embedding, tmp_path):
    """Its names are not ours, and an embedding beside it is not the head."""
    packed = {"lm_head.qweight": torch.zeros(8, 8).int(), "lm_head.scales": torch.zeros(1, 8).half()}
    beside = {"model.embed_tokens.weight": WEIGHT} if embedding else {}
    save_file(packed | beside, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method}}))
    with pytest.raises(CheckpointError, match=f"quant_method='{method}'.*not known here"):
        load_head(tmp_path, SHARD)


def test_a_dense_weight_with_more_beside_it_than_its_config_explains_is_refused(tmp_path):
    write_head(
        tmp_path, quantization_config("fp8") | {"ignore": ["lm_head"]}, weight=WEIGHT, weight_scale=WEIGHT[:, :1]
    )
    with pytest.raises(CheckpointError, match="is dense by its config and has weight, weight_scale"):
        load_head(tmp_path, SHARD)
    write_head(tmp_path, None, weight=WEIGHT, bias=WEIGHT[:, 0])
    with pytest.raises(CheckpointError, match="has a bias, which no head here adds"):
        load_head(tmp_path, SHARD)


def whole(path) -> bytes:
    return (path / "model.safetensors").read_bytes()


def cut(size):
    return lambda path: (path / "model.safetensors").write_bytes(whole(path)[:size])


def config_text(text):
    return lambda path: (path / "config.json").write_bytes(text)


def quantization(config):
    return lambda path: edit(path, quantization_config=config)


def index_text(content):
    return lambda path: (path / "model.safetensors.index.json").write_text(content)


def index_of(place):
    return index_text(json.dumps({"weight_map": {"lm_head.weight": place, "lm_head.weight_scale": "part.safetensors"}}))


def legacy(content):
    def break_it(path):
        edit(path, quantization_config=None)
        (path / "hf_quant_config.json").write_text(content)

    return break_it


def groups(group):
    return quantization({"quant_method": "compressed-tensors", "config_groups": group})


def stored(**tensors):
    return lambda path: save_file(
        {f"lm_head.{key}": value for key, value in tensors.items()}, path / "model.safetensors"
    )


FP8 = FORMATS["fp8"].pack(WEIGHT)
BROKEN = {
    "cut by a byte": (cut(-1), r"model\.safetensors \(\d+ bytes\) is no whole safetensors file"),
    "cut in the header": (cut(100), "is no whole safetensors file"),
    "empty": (cut(0), r"\(0 bytes\) is no whole"),
    "garbage": (lambda path: (path / "model.safetensors").write_bytes(b"x" * 5000), "is no whole"),
    "config is no JSON": (config_text(b"{"), r"config\.json is not readable as JSON"),
    "config is no text": (config_text(b"\xff\xfe{}"), r"config\.json is not readable as JSON"),
    "config is a list": (config_text(b"[]"), r"config\.json is list, but a JSON object is needed"),
    "quantization is a word": (quantization("fp8"), r"quantization_config of .*config\.json is str"),
    "groups are a list": (groups([{}]), "config_groups of quantization_config is list"),
    "a group is a list": (groups({"g": [1]}), r"config_groups\.g of quantization_config is list"),
    "targets are a number": (groups({"g": {"targets": 3}}), "targets of quantization_config is 3"),
    "weights are a list": (
        groups({"g": {"targets": ["Linear"], "weights": [8]}}),
        r"config_groups\.g\.weights is list",
    ),
    "a pattern is broken": (groups({"g": {"targets": ["re:("]}}), r"'re:\(', which is no regular expression"),
    "ignore holds numbers": (quantization({"ignore": [1]}), r"ignore of quantization_config is \[1\]"),
    "index is no JSON": (index_text("{"), r"index\.json is not readable as JSON"),
    "index without a map": (index_text("{}"), r"weight_map of .*index\.json is NoneType"),
    "index leads out": (index_of("../../elsewhere"), r"index\.json has lm_head\.weight in '\.\./\.\./elsewhere'"),
    "index names a number": (index_of(3), r"has lm_head\.weight in 3"),
    "a part is missing": (index_of("gone.safetensors"), r"gone\.safetensors is not there, but .*index\.json names it"),
    "a wrong part": (index_of("part.safetensors"), r"part\.safetensors has no lm_head\.weight, where .*index\.json"),
    "legacy without details": (legacy("{}"), r"quantization of .*hf_quant_config\.json is NoneType"),
    "legacy is no JSON": (legacy("nothing"), r"hf_quant_config\.json is not readable as JSON"),
    "a flat weight": (
        stored(**FP8 | {"weight": FP8["weight"].flatten()}),
        r"weight of lm_head in .* has shape \(43200,\)",
    ),
    "whole scales": (
        stored(**FP8 | {"weight_scale": FP8["weight_scale"].int()}),
        "weight_scale of lm_head in .* is torch.int32",
    ),
    "a weight of another format": (
        stored(**FP8 | {"weight": WEIGHT.char()}),
        "is torch.int8, but a fp8 head needs torch.float8",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_in_a_checkpoint_is_told_in_one_line_with_the_place(name, tmp_path):
    write_packed(tmp_path, FP8, "fp8")
    save_file({"lm_head.weight_scale": FP8["weight_scale"]}, tmp_path / "part.safetensors")
    break_it, told = BROKEN[name]
    break_it(tmp_path)
    with pytest.raises(CheckpointError, match=told) as raised:
        load_head(tmp_path, SHARD)
    assert "\n" not in str(raised.value)


def test_a_global_scale_without_an_entry_is_refused(tmp_path):
    packed = FORMATS["nvfp4-ct"].pack(WEIGHT)
    for name, scale in (("nvfp4-ct", "weight_global_scale"), ("nvfp4-modelopt", "weight_scale_2")):
        packed = FORMATS[name].pack(WEIGHT)
        write_packed(tmp_path, packed | {scale: torch.zeros(0)}, name)
        with pytest.raises(CheckpointError, match=f"{scale} of lm_head in .* needs one entry"):
            load_head(tmp_path, SHARD)


def test_a_path_may_be_a_str_and_nothing_else_but_a_path(tmp_path):
    write_packed(str(tmp_path), FP8, "fp8")
    assert torch.equal(load_head(str(tmp_path), SHARD).weight_scale, load_head(tmp_path, SHARD).weight_scale)
    assert isinstance(Fp8Head.from_checkpoint(str(tmp_path), SHARD), Fp8Head)
    with pytest.raises(CheckpointError, match="path=None is NoneType: give the folder"):
        load_head(None, SHARD)
    with pytest.raises(ShardError, match="shard=None is NoneType: give VocabShard"):
        load_head(tmp_path, None)
