"""QuantFormat: the packed formats as the quantization_config of a checkpoint describes them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

from tpbed.selector.folder import CheckpointError, as_object

QuantFormat = Literal["fp8", "fp8-tensor", "fp8-block", "int8", "nvfp4-ct", "nvfp4-modelopt"]
"""fp8: a scale per row. fp8-block: per 128x128. nvfp4-ct and nvfp4-modelopt: the layouts of compressed-tensors and of
ModelOpt. The first five are written as compressed-tensors does."""

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
_LEFT_DENSE = ("ignore", "exclude_modules", "modules_to_not_convert")  # compressed-tensors, ModelOpt, transformers


def quantization_config(quant_format: QuantFormat, target: str = "Linear") -> dict[str, Any]:
    """The quantization_config of config.json for modules of one class, as the tool of the format writes it.

    Source: QuantizationConfig and the presets FP8_DYNAMIC, FP8_BLOCK, W8A8 and NVFP4A16 of compressed-tensors;
    convert_hf_quant_config_format of ModelOpt.
    """
    if quant_format == "nvfp4-modelopt":
        weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
        details = modelopt_details()
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


def modelopt_details() -> dict[str, Any]:
    """What ModelOpt writes under "quantization" into a file of its own."""
    return {"quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": []}


def format_of(config: Mapping[str, Any] | None, module: str) -> QuantFormat | None:
    """The format that a quantization_config gives a module; None if it leaves it dense, or if there is no config.

    Raises CheckpointError for a format that is not known here, and for a config that none of the tools writes.
    """
    if not config:
        return None
    config = as_object(config, "quantization_config")
    if _is_left_dense(config, module):
        return None
    known = _known_format(config, module)
    if known is None:
        raise CheckpointError(
            f"quantization_config has quant_method={config.get('quant_method')!r}, format={config.get('format')!r} and "
            f"quant_algo={config.get('quant_algo')!r}, which gives {module} a format that is not known here: use one "
            f"of {', '.join((*_SCHEMES, 'nvfp4-modelopt'))}."
        )
    return known


def _is_left_dense(config: Mapping[str, Any], module: str) -> bool:
    listed = (pattern for key in _LEFT_DENSE for pattern in _listed(config, key))
    if any(_leaves(pattern, module) for pattern in listed):
        return True
    if config.get("quant_method") == "modelopt":
        return "quant_algo" in config and config["quant_algo"] is None
    return config.get("quant_method") == "compressed-tensors" and _weights_of(config, module) is None


def _known_format(config: Mapping[str, Any], module: str) -> QuantFormat | None:
    method = config.get("quant_method")
    if method == "modelopt":
        return _FORMAT_OF_MODELOPT.get(str(config.get("quant_algo")))
    if method == "fp8" and config.get("weight_block_size") == [128, 128]:
        return "fp8-block"
    weights = _weights_of(config, module) if method == "compressed-tensors" else None
    return None if weights is None else _format_of_weights(weights)


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
    groups = as_object(config.get("config_groups", {}), "config_groups of quantization_config")
    for name, group in groups.items():
        group = as_object(group, f"config_groups.{name} of quantization_config")
        if any(target == kind or _names(target, module) for target in _listed(group, "targets")):
            weights = group.get("weights")
            return None if weights is None else as_object(weights, f"config_groups.{name}.weights")
    return None


def _listed(config: Mapping[str, Any], key: str) -> Iterable[str]:
    given = config.get(key) or ()
    if not isinstance(given, list | tuple) or not all(isinstance(entry, str) for entry in given):
        raise CheckpointError(f"{key} of quantization_config is {given!r}, but a list of module names is needed.")
    return given


def _leaves(pattern: str, module: str) -> bool:
    """By name or "re:" as in compressed-tensors, by glob as in ModelOpt, and what lies above or is its end."""
    within = module.startswith(f"{pattern}.") or module.endswith(f".{pattern}")
    return _names(pattern, module) or within or fnmatchcase(module, pattern)


def _names(pattern: str, module: str) -> bool:
    if not pattern.startswith("re:"):
        return pattern == module
    try:
        return bool(re.match(pattern[3:], module))
    except re.error as error:
        raise CheckpointError(
            f"quantization_config has {pattern!r}, which is no regular expression: {error}."
        ) from error
