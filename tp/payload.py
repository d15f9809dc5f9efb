"""Payload: what a tensor brings to a collective, and which tensors gloo takes; refusals are in gloo's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from tpbed.tp.errors import TestbedError
from tpbed.tp.refusal import UnsupportedCollectiveError

_KINDS = frozenset(
    (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8)
) | {torch.bool}


class OverrunError(TestbedError):
    """A collective would go past the end of a tensor's storage, as gloo does without a word."""


def payload_bytes(tensor: Tensor, *, in_memory: bool = False) -> int:
    """Bytes that a tensor brings. Raises where gloo does, and where it should: past the end of the storage."""
    if tensor.layout is not torch.strided:
        raise UnsupportedCollectiveError(f"a tensor with layout {tensor.layout} is not simulated: use a dense one.")
    if tensor.dtype not in _KINDS:
        raise RuntimeError("Invalid scalar type")
    size = tensor.nbytes
    if in_memory and not tensor.is_contiguous():
        held = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
        if size > held:
            raise OverrunError(
                f"a collective takes {size} bytes in a row from a tensor of shape {tuple(tensor.shape)} and strides "
                f"{tensor.stride()}, whose storage ends after {held}: make the tensor contiguous."
            )
    return size


def require_alike(op: str, tensors: Sequence[Tensor], like: Tensor, of: Tensor | None = None) -> None:
    """Every tensor has the shape of `like`, and its dtype and device, or those of `of`."""
    shape, dtype, device = like.shape, (like if of is None else of).dtype, like.device
    for tensor in tensors:
        if tensor.dtype is not dtype or tensor.shape != shape or tensor.device != device:
            index = next(index for index, other in enumerate(tensors) if other is tensor)
            message = f"{op}: invalid tensor {{}} at index {index} (expected {{}}, got {{}})"
            _refuse(message, tensor, shape, dtype, device)


def _refuse(message: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> NoReturn:
    if tensor.dtype is not dtype or tensor.device != device:
        expected, given = f"{dtype} on {device}", f"{tensor.dtype} on {tensor.device}"
        raise RuntimeError(message.format("type", expected, given))
    raise RuntimeError(message.format("size", _sizes(shape), _sizes(tensor.shape)))


def require_each_alike(op: str, tensors: Sequence[Tensor], like: Sequence[Tensor]) -> None:
    """Every tensor has shape, dtype and device of its counterpart."""
    if len(tensors) != len(like):
        raise RuntimeError(f"{op}: invalid output size: (expected length {len(like)}, got {len(tensors)})")
    for index, (tensor, other) in enumerate(zip(tensors, like, strict=True)):
        if tensor.shape != other.shape:
            raise RuntimeError(
                f"{op}: invalid size of output tensor at index {index} (expected length {_sizes(other.shape)}, "
                f"got {_sizes(tensor.shape)})"
            )
        require_alike(op, [tensor], other)


def require_one_dtype(tensors: Sequence[Tensor]) -> None:
    """Of one dtype, all of them, and there is one at least."""
    if not tensors:
        raise NotImplementedError("There were no tensor arguments to this function")
    for tensor in tensors:
        if tensor.dtype is not tensors[0].dtype:
            raise RuntimeError(f"Invalid usage of tensors with different dtypes: {tensors[0].dtype}, {tensor.dtype}")


def _sizes(shape: torch.Size) -> str:
    return f"({', '.join(map(str, shape))})"


def is_channels_last(tensor: Tensor) -> bool:
    """Whether it is contiguous in the order of images or volumes whose channels come last."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])
