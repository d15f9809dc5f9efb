"""Local top-k: flashinfer's radix kernel, torch's, the canonical one, and the contract that callers are held to."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from tpbed.selector.errors import SelectionError

TopK = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""Logits (rows, width) and k to values (rows, k) in the logits' dtype and columns (rows, k) int64, best first.

The caller's side, which flashinfer needs and `check_topk_contract` states: two dimensions, contiguous, float16,
bfloat16 or float32, at least one row, and k from 1 to width. Which of equal values comes first, or survives at all, is
the kernel's own.
"""


@runtime_checkable
class KeyedTopK(Protocol):
    """A TopK that can hand packed keys to a merge of them, and needs no mask then: it never reads what is not real."""

    def __call__(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As any TopK."""
        ...

    def keys(self, logits: Tensor, k: int, *, num_org: int, first_id: int) -> Tensor:
        """The k best of the first num_org columns as pack_keys has them, best first: (rows, k) int64."""
        ...

    def best_candidates(self, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As tpbed.selector.packed.best_candidates."""
        ...


TOPK_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def torch_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """torch.topk, sorted; every NaN ranks first, the order among equals is open (PyTorch documentation, torch.topk)."""
    values, columns = torch.topk(logits, k, dim=-1, sorted=True)
    return values, columns


def canonical_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Value descending, then column ascending, -0 equal to +0, NaN first: the one order that sharding cannot change.

    Cost: a stable sort of the whole row.
    """
    values, columns = torch.sort(logits + 0.0, dim=-1, descending=True, stable=True)  # -0 + 0 is +0
    return values[:, :k], columns[:, :k]


def flashinfer_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """flashinfer.top_k, sorted and deterministic: repeatable, but neither canonical nor TP-invariant among equals.

    logits: (rows, width) on CUDA, contiguous; no row or k=0 gives empty tensors without a launch (0.7.2 leaves a CUDA
    error behind for no row and ends the process for no column). NaN ranks first or last, by its sign bit.
    Keeps the current CUDA device, which flashinfer changes.
    Raises SelectionError as check_k does, and RuntimeError for a strided view.
    Source: flashinfer.top_k, measured on one H200 with flashinfer-python 0.7.2.
    """
    check_k(k, logits.shape[-1], least=0)
    if k == 0 or logits.shape[0] == 0:
        return empty_topk(logits, k)
    top_k = import_module("flashinfer").top_k  # slow to import, and absent on CPU machines
    with torch.cuda.device(logits.device):
        values, columns = top_k(logits, k, sorted=True, deterministic=True)
    return values, columns


def empty_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The answer where there is nothing to rank, k=0 or no row: (rows, k) tensors without an element."""
    shape = (logits.shape[0], k)
    return logits.new_empty(shape), torch.empty(shape, dtype=torch.int64, device=logits.device)


def check_k(k: int, width: int, *, least: int) -> None:
    """Raise SelectionError unless k is within least to width; above, flashinfer returns garbage or ends the process.

    flashinfer_topk and check_topk_contract both refuse k with this, so that a rank fails alike on any device.
    """
    if not least <= k <= width:
        raise SelectionError(f"k={k} is out of range for the {width} columns of this shard: ask for min(k, width).")


def contract_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Refuse what flashinfer refuses, then answer as it does: stands in for flashinfer on CPU tensors.

    Values rank by their bits: NaN first or last by its sign, +0 before -0. Of equal ones the lower column comes first,
    which flashinfer does not promise. float32 has an exception: where flashinfer first looks at logits rounded to
    float16, which loses the sign of a NaN, a NaN of either sign is among the k, and there its sign counts again.
    """
    check_topk_contract(logits, k)
    bits = logits.view(torch.int32 if logits.dtype is torch.float32 else torch.int16)
    order = torch.where(bits < 0, torch.iinfo(bits.dtype).min - 1 - bits.long(), bits.long())
    by_half = logits.dtype is torch.float32 and _filters(*logits.shape)
    columns = _largest(order + logits.isnan() * 2**32 if by_half else order)[:, :k]
    columns = columns.gather(-1, _largest(order.gather(-1, columns)))
    return logits.gather(-1, columns), columns


def _largest(order: Tensor) -> Tensor:
    return order.sort(dim=-1, descending=True, stable=True).indices


def _filters(rows: int, width: int) -> bool:
    """Whether flashinfer gives a row of float32 to one block, which filters it by float16 (topk.cuh, 0.7.2)."""
    return width <= 16_384 or rows >= min(max(width // 4096, 16), 64)


def check_topk_contract(logits: Tensor, k: int) -> None:
    """Raise what flashinfer.top_k raises for the same tensor on CUDA; a CPU tensor itself is allowed here.

    AssertionError for another dtype, RuntimeError for other than two dimensions, for a strided view (a cropped view of
    one row is contiguous and passes) and for no row. Where flashinfer ends the process (no column) or returns garbage
    without an error (k above the width), SelectionError, as flashinfer_topk.
    Source: measured on one H200, flashinfer-python 0.7.2.
    """
    if logits.dtype not in TOPK_DTYPES:
        raise AssertionError(f"Unsupported dtype {logits.dtype}: give float16, bfloat16 or float32 logits.")
    if logits.ndim != 2:
        raise RuntimeError(f"input must be 2-D, but has shape {tuple(logits.shape)}: reshape it to (rows, columns).")
    if not logits.is_contiguous():
        raise RuntimeError(
            f"input must be contiguous, but {tuple(logits.shape)} has strides {logits.stride()}: mask, do not crop."
        )
    if logits.shape[0] == 0:
        raise RuntimeError(
            f"invalid argument: shape {tuple(logits.shape)} has nothing to rank: answer it without a call."
        )
    check_k(k, logits.shape[1], least=1)


def default_topk(device: torch.device) -> TopK:
    """The top-k for a device: canonical on CPU; on CUDA flashinfer, or torch where flashinfer is not installed."""
    if device.type != "cuda":
        return canonical_topk
    return flashinfer_topk if has_flashinfer() else torch_topk


@cache
def has_flashinfer() -> bool:
    """Whether flashinfer is installed; whether its kernel can be built is seen at its first call."""
    return find_spec("flashinfer") is not None
