"""Checkpoints: real safetensors files with the names and metadata of their tools, whole, in parts, tied, or refused."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tpbed.harness.smollm2 import head_weight, hidden_states, missing_checkpoint
from tpbed.selector.checkpoint import CheckpointError, format_of, quantization_config, read_packed, write_packed
from tpbed.selector.fp8 import Fp8Head
from tpbed.selector.head import DenseHead
from tpbed.selector.int8 import Int8Head
from tpbed.selector.nvfp4 import Nvfp4Head
from tpbed.selector.quantized import FORMATS, load_head
from tpbed.selector.reference import error_bound, reference_logits
from tpbed.selector.shard import VocabShard

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
    write_packed(tmp_path, {"weight": torch.zeros(4, 4)}, "fp8")
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
