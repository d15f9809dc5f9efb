"""Tensor arguments: their shape, dtype and values, refused before any rank goes on with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tpbed.selector.errors import SelectionError


def check_tensor(name: str, given: object, shape: Sequence[int | None], dtype: torch.dtype, *, each: str) -> None:
    """Raise SelectionError unless given is a tensor of shape, None for any number, and dtype.

    each: what its entries are for, such as "(requests,)", which the message repeats.
    """
    if not isinstance(given, Tensor):
        raise SelectionError(f"{name} is {type(given).__name__}, but a tensor is needed: give {each} {dtype}.")
    fits = given.ndim == len(shape) and all(
        wanted in (None, size) for size, wanted in zip(given.shape, shape, strict=True)
    )
    if not fits or given.dtype is not dtype:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise SelectionError(
            f"{name} is {given.dtype} with sizes {', '.join(map(str, given.shape)) or 'none'}, but {dtype} with sizes "
            f"{wanted} is needed: give {each}."
        )


def check_values(name: str, given: Tensor, right: Callable[[Tensor], Tensor], allowed: str) -> None:
    """Raise SelectionError with the first value for which right is false; on the CPU only.

    On another device nothing is launched and nothing read: that would wait for it, and a graph capture cannot.
    """
    if given.device.type == "cpu" and not bool((stands := right(given)).all()):
        raise SelectionError(f"{name} holds {given[~stands][0].item()}: give {allowed}.")
