"""Checkpoints: packed heads in safetensors files, under the names and metadata that the tools which pack them write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from tpbed.selector.folder import CONFIG_FILE, TENSOR_FILE, CheckpointError, CheckpointFolder, CheckpointPath, as_object
from tpbed.selector.head import DENSE_DTYPES
from tpbed.selector.scheme import QuantFormat, format_of, modelopt_details, quantization_config

LM_HEAD, EMBEDDING = "lm_head", "model.embed_tokens"  # modules of most models, and of those that tie the two
Packed = Mapping[str, Tensor]
"""A whole packed head: its tensors by the names that a checkpoint gives them, without the module's."""

_LEGACY = "hf_quant_config.json"  # ModelOpt's own
_PACKED_NAMES = ("weight", "weight_packed", "qweight")


class Part(NamedTuple):
    """A tensor of a packed module: the dtypes and the shape that it may have, None for what the head itself checks."""

    dtypes: tuple[torch.dtype, ...]
    shape: Literal["(rows, hidden units)", "one entry"] | None = None


def _matrix(*dtypes: torch.dtype) -> Part:
    return Part(dtypes, "(rows, hidden units)")


_SCALE = Part((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_GROUP_SCALE, _ONE_SCALE = Part((torch.float8_e4m3fn,)), Part((torch.float32,), "one entry")
_FP8 = {"weight": _matrix(torch.float8_e4m3fn), "weight_scale": _SCALE}
_PARTS: dict[QuantFormat | None, dict[str, Part]] = {
    None: {"weight": _matrix(*DENSE_DTYPES)},
    "fp8": _FP8,
    "fp8-tensor": _FP8,
    "fp8-block": _FP8,
    "int8": {"weight": _matrix(torch.int8), "weight_scale": _SCALE},
    "nvfp4-ct": {
        "weight_packed": _matrix(torch.uint8),
        "weight_scale": _GROUP_SCALE,
        "weight_global_scale": _ONE_SCALE,
    },
    "nvfp4-modelopt": {"weight": _matrix(torch.uint8), "weight_scale": _GROUP_SCALE, "weight_scale_2": _ONE_SCALE},
}


def write_packed(path: CheckpointPath, packed: Packed, quant_format: QuantFormat, *, name: str = LM_HEAD) -> None:
    """Write one packed module as a checkpoint of its own into the folder `path`, which is made if need be.

    Files: model.safetensors, config.json with its quantization_config, and hf_quant_config.json where ModelOpt writes
    one. An embedding (name "model.embed_tokens") that stands for the head is written as tied.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{name}.{key}": tensor.contiguous() for key, tensor in packed.items()}
    save_file(tensors, folder / TENSOR_FILE, metadata={"format": "pt"})
    target = "Linear" if name == LM_HEAD else "Embedding"
    config = {"tie_word_embeddings": name != LM_HEAD, "quantization_config": quantization_config(quant_format, target)}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2))
    if quant_format == "nvfp4-modelopt":
        legacy = {"producer": {"name": "modelopt"}, "quantization": modelopt_details()}
        (folder / _LEGACY).write_text(json.dumps(legacy, indent=2))


def read_packed(
    path: CheckpointPath,
    name: str = LM_HEAD,
    *,
    tied_to: str = EMBEDDING,
    formats: Sequence[str] | None = None,
) -> tuple[QuantFormat | None, dict[str, Tensor]]:
    """Read the tensors of module `name` of the checkpoint in the folder `path`, on CPU, whole.

    tied_to: the module that is read instead where the checkpoint has no weight for `name` and does not say
    "tie_word_embeddings": false. formats: those that the caller can take, None for all.
    Returns the format, None for a dense module, and the tensors by their names without the module's.
    A float16, bfloat16 or float32 weight alone is dense, whatever the config says of other modules; anything else is
    what the config says, and must have the tensors and dtypes of that.
    Raises CheckpointError if a file, the module, a tensor of it or the format is missing, broken or unknown.
    """
    folder = CheckpointFolder.at(path)
    config, file_of = folder.read_json(CONFIG_FILE), folder.files()
    module = _present(name, tied_to if config.get("tie_word_embeddings", True) else name, file_of, folder.path)
    where = f"{module} in {folder.path}"
    tensors = _tensors_of(module, file_of, folder)
    found = None if _is_dense(tensors) else format_of(_quantization(config, folder), module)
    if formats is not None and found not in formats:
        raise CheckpointError(f"{where} is {found or 'dense'}, not {' or '.join(formats)}: use load_head.")
    _check_tensors(tensors, found, where)
    return found, tensors


def _tensors_of(module: str, file_of: Mapping[str, str], folder: CheckpointFolder) -> dict[str, Tensor]:
    tensors = {
        key.removeprefix(f"{module}."): folder.tensor(file, key)
        for key, file in file_of.items()
        if key.rpartition(".")[0] == module
    }
    if "weight_scale_inv" in tensors:  # DeepSeek's name: the inverse of what quantizes
        tensors["weight_scale"] = tensors.pop("weight_scale_inv")
    return tensors


def _is_dense(tensors: Packed) -> bool:
    return set(tensors) <= {"weight", "bias"} and tensors["weight"].dtype in DENSE_DTYPES


def _check_tensors(tensors: Packed, found: QuantFormat | None, where: str) -> None:
    missing = [key for key in _PARTS[found] if key not in tensors]
    if missing:
        raise CheckpointError(
            f"{where} is {found or 'dense'} and has no {', '.join(missing)}, only {', '.join(tensors)}: "
            f"the quantization_config is of another checkpoint, or the files are not complete."
        )
    for key, part in _PARTS[found].items():
        _check_part(f"{key} of {where}", tensors[key], part, found or "dense")
    if "bias" in tensors:
        raise CheckpointError(f"{where} has a bias, which no head here adds: give a checkpoint without one.")
    if found is None and len(tensors) > 1:
        raise CheckpointError(
            f"{where} is dense by its config and has {', '.join(tensors)}: give a quantization_config that says what "
            f"these mean."
        )


def _check_part(where: str, tensor: Tensor, part: Part, found: str) -> None:
    if tensor.dtype not in part.dtypes:
        raise CheckpointError(
            f"{where} is {tensor.dtype}, but a {found} head needs {' or '.join(map(str, part.dtypes))}: the "
            f"quantization_config is of another checkpoint, or leaves this module out."
        )
    fits = {"one entry": tensor.numel() == 1, "(rows, hidden units)": tensor.ndim == 2, None: True}
    if not fits[part.shape]:
        raise CheckpointError(
            f"{where} has shape {tuple(tensor.shape)}, but a {found} head needs {part.shape}: pack it again."
        )


def _quantization(config: Mapping[str, Any], folder: CheckpointFolder) -> dict[str, Any] | None:
    """The quantization_config, or ModelOpt's own file in its words where config.json is silent."""
    told = config.get("quantization_config")
    if told:
        return as_object(told, f"quantization_config of {folder.path / CONFIG_FILE}")
    if not folder.has(_LEGACY):
        return None
    details = as_object(folder.read_json(_LEGACY).get("quantization"), f"quantization of {folder.path / _LEGACY}")
    return {"quant_method": "modelopt", "quant_algo": None} | details


def _present(name: str, tied_to: str, file_of: Mapping[str, str], path: Path) -> str:
    for module in (name, tied_to):
        if any(f"{module}.{key}" in file_of for key in _PACKED_NAMES):
            return module
    looked_for = name if name == tied_to else f"{name} or {tied_to}"
    raise CheckpointError(
        f"looked for a weight of {looked_for} in {path}, which has none: name the module of the head."
    )
