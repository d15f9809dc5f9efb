"""Checkpoints: packed heads in safetensors files, under the names and metadata that the tools which pack them write."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tpbed.selector.errors import SelectionError

LM_HEAD, EMBEDDING = "lm_head", "model.embed_tokens"  # modules of most models, and of those that tie the two
QuantFormat = Literal["fp8", "fp8-tensor", "fp8-block", "int8", "nvfp4-ct", "nvfp4-modelopt"]
"""fp8: a scale per row. fp8-block: per 128x128. nvfp4-ct and nvfp4-modelopt: the layouts of compressed-tensors and of
ModelOpt. The first five are written as compressed-tensors does."""
Packed = Mapping[str, Tensor]
"""A whole packed head: its tensors by the names that a checkpoint gives them, without the module's."""

_INDEX, _FILE = "model.safetensors.index.json", "model.safetensors"
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
_PER_ROW = {"strategy": "token", "dynamic": True}
_SCHEMES: dict[QuantFormat, tuple[str, dict[str, Any], dict[str, Any] | None]] = {  # format, weights, activations
    "fp8": ("float-quantized", _FP8 | {"strategy": "channel"}, _FP8 | _PER_ROW),
    "fp8-tensor": ("float-quantized", _FP8 | {"strategy": "tensor"}, _FP8 | _PER_ROW),
    "fp8-block": (
        "float-quantized",
        _FP8 | {"strategy": "block", "block_structure": [128, 128]},
        _FP8 | {"strategy": "group", "group_size": 128, "dynamic": True},
    ),
    "int8": ("int-quantized", _FP8 | {"type": "int", "strategy": "channel"}, _FP8 | {"type": "int"} | _PER_ROW),
    "nvfp4-ct": (
        "nvfp4-pack-quantized",
        _FP8 | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
        None,
    ),
}
_FORMAT_OF_MODELOPT: dict[str, QuantFormat] = {
    "NVFP4": "nvfp4-modelopt",
    "W4A16_NVFP4": "nvfp4-modelopt",
    "FP8": "fp8-tensor",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
}
_NAMES: dict[QuantFormat, tuple[str, ...]] = {
    **dict.fromkeys(_SCHEMES, ("weight", "weight_scale")),
    "nvfp4-ct": ("weight_packed", "weight_scale", "weight_global_scale"),
    "nvfp4-modelopt": ("weight", "weight_scale", "weight_scale_2"),
}


class CheckpointError(SelectionError):
    """A checkpoint that does not hold the head that was asked for, or holds it in a format that is not known."""


def write_packed(path: Path, packed: Packed, quant_format: QuantFormat, *, name: str = LM_HEAD) -> None:
    """Write one packed module as a checkpoint of its own into the folder `path`, which is made if need be.

    Files: model.safetensors, config.json with its quantization_config, and hf_quant_config.json where ModelOpt writes
    one. An embedding (name "model.embed_tokens") that stands for the head is written as tied.
    """
    path.mkdir(parents=True, exist_ok=True)
    tensors = {f"{name}.{key}": tensor.contiguous() for key, tensor in packed.items()}
    save_file(tensors, path / _FILE, metadata={"format": "pt"})
    target = "Linear" if name == LM_HEAD else "Embedding"
    config = {"tie_word_embeddings": name != LM_HEAD, "quantization_config": quantization_config(quant_format, target)}
    (path / "config.json").write_text(json.dumps(config, indent=2))
    if quant_format == "nvfp4-modelopt":
        legacy = {"producer": {"name": "modelopt"}, "quantization": _modelopt_details()}
        (path / "hf_quant_config.json").write_text(json.dumps(legacy, indent=2))


def quantization_config(quant_format: QuantFormat, target: str = "Linear") -> dict[str, Any]:
    """The quantization_config of config.json for modules of one class, as the tool of the format writes it.

    Source: QuantizationConfig and the presets FP8_DYNAMIC, FP8_BLOCK, W8A8 and NVFP4A16 of compressed-tensors;
    convert_hf_quant_config_format of ModelOpt.
    """
    if quant_format == "nvfp4-modelopt":
        weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        details = _modelopt_details()
        group: dict[str, Any] = {"weights": weights, "targets": [target]}
        return {
            "config_groups": {"group_0": group},
            "ignore": details["exclude_modules"],
            "quant_algo": details["quant_algo"],
            "producer": {"name": "modelopt"},
            "quant_method": "modelopt",
        }
    stored, weights, activations = _SCHEMES[quant_format]
    group = {"targets": [target], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "config_groups": {"group_0": group | {"format": stored}},
        "format": stored,
        "ignore": [],
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def read_packed(
    path: Path,
    name: str = LM_HEAD,
    *,
    tied_to: str = EMBEDDING,
    formats: Sequence[str] | None = None,
) -> tuple[QuantFormat | None, dict[str, Tensor]]:
    """Read the tensors of module `name` of the checkpoint in the folder `path`, on CPU, whole.

    tied_to: the module that is read instead where the checkpoint has no weight for `name` and does not say
    "tie_word_embeddings": false. formats: those that the caller can take, None for all.
    Returns the format, None for a dense module, and the tensors by their names without the module's.
    Raises CheckpointError if a file, the module, a tensor of it or the format is missing or unknown.
    """
    config = _read_json(path / "config.json")
    file_of = _files_of(path)
    module = _present(name, tied_to if config.get("tie_word_embeddings", True) else name, file_of, path)
    tensors = {
        key.removeprefix(f"{module}."): _read_tensor(path / file, key)
        for key, file in file_of.items()
        if key.rpartition(".")[0] == module
    }
    found = format_of(config.get("quantization_config") or _legacy_config(path), module)
    if formats is not None and found not in formats:
        raise CheckpointError(f"{module} in {path} is {found or 'dense'}, not {' or '.join(formats)}: use load_head.")
    if found is not None and "weight_scale_inv" in tensors:  # DeepSeek's name: the inverse of what quantizes
        tensors["weight_scale"] = tensors.pop("weight_scale_inv")
    missing = [key for key in (_NAMES[found] if found else ("weight",)) if key not in tensors]
    if missing:
        raise CheckpointError(
            f"{module} in {path} is {found or 'dense'} and has no {', '.join(missing)}, only {', '.join(tensors)}: "
            f"the quantization_config is of another checkpoint, or the files are not complete."
        )
    return found, tensors


def format_of(config: Mapping[str, Any] | None, module: str) -> QuantFormat | None:
    """The format that a quantization_config gives a module; None if it leaves it dense, or if there is no config.

    Raises CheckpointError for a format that is not known here.
    """
    if not config or any(_matches(pattern, module) for pattern in config.get("ignore") or ()):
        return None
    known: QuantFormat | None = None
    if config.get("quant_method") == "modelopt":
        known = _FORMAT_OF_MODELOPT.get(config.get("quant_algo", ""))
    elif config.get("quant_method") == "compressed-tensors":
        weights = _weights_of(config, module)
        if weights is None:
            return None
        known = _format_of_weights(weights)
    elif config.get("quant_method") == "fp8" and config.get("weight_block_size") == [128, 128]:
        known = "fp8-block"
    if known is None:
        raise CheckpointError(
            f"quantization_config has quant_method={config.get('quant_method')!r}, format={config.get('format')!r} and "
            f"quant_algo={config.get('quant_algo')!r}, which gives {module} a format that is not known here: use one "
            f"of {', '.join(_NAMES)}."
        )
    return known


def _format_of_weights(weights: Mapping[str, Any]) -> QuantFormat | None:
    """The format whose weights are described alike; group_size says nothing where one scale covers more than a row."""
    keys = ("num_bits", "type", "symmetric", "strategy", "block_structure")
    for name, (_, known, _) in _SCHEMES.items():
        grouped = keys if known["strategy"] != "tensor_group" else (*keys, "group_size")
        if all(weights.get(key, known.get(key)) == known.get(key) for key in grouped):
            return name
    return None


def _weights_of(config: Mapping[str, Any], module: str) -> Mapping[str, Any] | None:
    kind = "Embedding" if module.endswith("embed_tokens") else "Linear"
    for group in config.get("config_groups", {}).values():
        if any(target == kind or _matches(target, module) for target in group.get("targets", ())):
            weights: Mapping[str, Any] | None = group.get("weights")
            return weights
    return None


def _matches(pattern: str, module: str) -> bool:
    return bool(re.match(pattern[3:], module)) if pattern.startswith("re:") else pattern == module


def _modelopt_details() -> dict[str, Any]:
    return {"quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": []}


def _legacy_config(path: Path) -> dict[str, Any] | None:
    """ModelOpt's own file in the words of quantization_config, where config.json is silent."""
    if not (path / "hf_quant_config.json").is_file():
        return None
    told = _read_json(path / "hf_quant_config.json")["quantization"]
    return {"quant_method": "modelopt", "quant_algo": told["quant_algo"], "ignore": told.get("exclude_modules")}


def _files_of(path: Path) -> dict[str, str]:
    """The file of every tensor: by the index of a checkpoint in parts, or the one file that there is."""
    if (path / _INDEX).is_file():
        return dict(_read_json(path / _INDEX)["weight_map"])
    if not (path / _FILE).is_file():
        raise CheckpointError(f"{path} has neither {_FILE} nor {_INDEX}: give the folder of a safetensors checkpoint.")
    with safe_open(path / _FILE, framework="pt") as file:
        return dict.fromkeys(file.keys(), _FILE)


def _present(name: str, tied_to: str, file_of: Mapping[str, str], path: Path) -> str:
    for module in (name, tied_to):
        if f"{module}.weight" in file_of or f"{module}.weight_packed" in file_of:
            return module
    looked_for = name if name == tied_to else f"{name} or {tied_to}"
    raise CheckpointError(
        f"looked for a weight of {looked_for} in {path}, which has none: name the module of the head."
    )


def _read_tensor(file: Path, key: str) -> Tensor:
    with safe_open(file, framework="pt") as opened:
        tensor: Tensor = opened.get_tensor(key)
        return tensor


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise CheckpointError(f"{file} is not there: give the folder of a checkpoint, with its config.json.")
    read: dict[str, Any] = json.loads(file.read_text())
    return read
