"""triton_topk: the canonical top-k for a small k in two kernels; masked columns never read; packed keys if asked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from tpbed.selector.errors import SelectionError
from tpbed.selector.packed import NO_KEY
from tpbed.selector.topk import TOPK_DTYPES, check_k, empty_topk

MAX_K = 64
_NARROW = 1 << 16  # places that a 32-bit key of a 16-bit value can tell apart
_LEAST_GROUP = 32  # columns
_TILE = 2048  # logits that a program of the first kernel looks through


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonTopK:
    """A TopK that equals canonical_topk bit for bit for k up to 64, and packed keys where the merge takes them.

    Two launches, whatever the rows: the best of each group of neighbours, then the k best of the k best groups. Scratch
    is new in every call, so that streams and CUDA graphs share nothing. Does not wait for the device.
    group, warps, overlap: what to tune, as `tpbed bench gpu --part sweep` does.
    Source: the two steps are ours; the key is pack_keys'.
    """

    group: int | None = None  # neighbours, a power of two; None: about sqrt(columns / k)
    warps: int = 8  # of a program of the second kernel
    overlap: bool = True  # where the device can: a launch begins while the kernel before ends (compute capability 9.0)

    def __call__(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As canonical_topk: values (rows, k) in the logits' dtype, columns (rows, k) int64; NaN first, and -0 is +0.

        logits: (rows, columns) float16, bfloat16 or float32 on CUDA; rows may lie at any distance of each other.
        Raises SelectionError for other logits, k above 64 or the columns, and where triton is not installed.
        """
        _check(logits, k, logits.shape[-1], None)
        check_k(k, logits.shape[1], least=0)
        values, columns = empty_topk(logits, k)
        if values.numel():
            self._launch(_Request(logits, k, logits.shape[1], logits.dtype), values=values, columns=columns)
        return values, columns

    def keys(
        self,
        logits: Tensor,
        k: int,
        *,
        num_org: int,
        first_id: int = 0,
        scales: tuple[Tensor, Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The k best of the first num_org columns as pack_keys has them, best first: (rows, k) int64.

        first_id: the token id of column 0. Columns from num_org on are never read: they need no mask. Where fewer than
        k columns are better than -inf, the keys at the end stand for no token.
        scales: (rows,) and (columns,) float32 that multiply the logits, in float32, with one rounding to dtype at the
        end; dtype: the logits' own if None. The head's own product then needs no scales: what is chosen, and its
        values, are those of a head that rounds once, if the unscaled logits are float32.
        Raises as a call does; k may exceed the columns.
        """
        _check(logits, k, num_org, scales)
        shape = (logits.shape[0], k)
        if num_org == 0:
            return torch.full(shape, NO_KEY, device=logits.device)
        keys = torch.empty(shape, dtype=torch.int64, device=logits.device)
        if keys.numel():
            self._launch(_Request(logits, k, num_org, dtype or logits.dtype, first_id, scales), keys=keys)
        return keys

    def best_candidates(self, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """As tpbed.selector.packed.best_candidates, in one launch, for keys (rows, k or more) that differ."""
        if not 0 <= k <= min(MAX_K, keys.shape[1]):
            raise SelectionError(f"k={k} of {keys.shape[1]} keys: give k up to {MAX_K}, and up to the keys.")
        values = keys.new_empty((len(keys), k), dtype=torch.float32)
        ids = torch.empty_like(values, dtype=torch.int64)
        if ids.numel():
            count, picks = keys.shape[1], _picks(k)
            with device_of(keys):
                triton_kernels().best_of_keys[(len(keys),)](
                    keys.contiguous(), values, ids, count, K=k, COUNT=max(picks, power_of_two(count)), PICKS=picks
                )
        return values, ids

    def _launch(
        self,
        asked: _Request,
        *,
        keys: Tensor | None = None,
        values: Tensor | None = None,
        columns: Tensor | None = None,
    ) -> None:
        kernels, logits = triton_kernels(), asked.logits
        group = self.group or asked.balanced_group()
        groups, picks = -(-asked.num_org // group), _picks(asked.k)
        wide = asked.dtype is torch.float32 or max(groups, picks * group) > _NARROW
        overlap = self.overlap and logits.is_cuda and _overlaps(logits.device.index)
        common = {
            "VALUE": getattr(kernels.tl, str(asked.dtype).removeprefix("torch.")),
            "SCALED": asked.scales is not None,
            "WIDE": wide,
            "GROUP": group,
            "OVERLAP": overlap,
            **({"launch_pdl": True} if overlap else {}),
        }
        row_scales, scale = asked.scales or (None, None)
        best = logits.new_empty((len(logits), groups), dtype=torch.int64 if wide else torch.int32)
        tile = max(1, _TILE // group)
        tiles = -(-groups // tile)
        with device_of(logits):
            kernels.group_keys[(len(logits) * tiles,)](
                logits, scale, row_scales, best, logits.stride(0), asked.num_org, groups, tiles, TILE=tile, **common
            )
            kernels.best_of_groups[(len(logits),)](
                logits, scale, row_scales, best, keys, values, columns, logits.stride(0), asked.num_org, groups,
                asked.first_id, PACKED=keys is not None, DIRECT=wide or asked.num_org <= _NARROW, K=asked.k,
                GROUPS=max(picks, power_of_two(groups)), PICKS=picks, num_warps=self.warps, **common,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Request:
    """What is chosen from what."""

    logits: Tensor
    k: int
    num_org: int
    dtype: torch.dtype
    first_id: int = 0
    scales: tuple[Tensor, Tensor] | None = None

    def balanced_group(self) -> int:
        """As many groups as there are members of the k best groups, nearly: the second kernel looks at both."""
        return max(_LEAST_GROUP, power_of_two(isqrt(self.num_org // self.k)))


triton_topk = TritonTopK()


def has_triton() -> bool:
    """Whether triton is installed; a torch that is built for CUDA brings it along."""
    return find_spec("triton") is not None


def triton_kernels() -> Any:
    """The module of kernels. Raises SelectionError where triton is not installed."""
    if not has_triton():
        raise SelectionError("triton is not installed: install a torch that is built for CUDA, or pip install triton.")
    return import_module("tpbed.selector.triton_kernels")


def _check(logits: Tensor, k: int, num_org: int, scales: tuple[Tensor, Tensor] | None) -> None:
    if not logits.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise SelectionError(f"logits are on {logits.device}, and triton_topk runs on CUDA: use canonical_topk there.")
    if logits.ndim != 2 or logits.dtype not in TOPK_DTYPES or (logits.shape[1] > 1 and logits.stride(1) != 1):
        raise SelectionError(
            f"logits are {logits.dtype} with shape {tuple(logits.shape)} and strides {logits.stride()}: give (rows, "
            f"columns) in float16, bfloat16 or float32, the columns of a row side by side."
        )
    if not (0 <= k <= MAX_K and 0 <= num_org <= logits.shape[1]):
        raise SelectionError(
            f"k={k} of num_org={num_org} of {logits.shape[1]} columns: give k up to {MAX_K}, num_org up to the columns."
        )
    shapes = None if scales is None else [tuple(scale.shape) for scale in scales]
    if shapes is not None and shapes != [(logits.shape[0],), (logits.shape[1],)]:
        raise SelectionError(f"scales have shapes {shapes}: give one a row and one a column of {tuple(logits.shape)}.")


def device_of(tensor: Tensor) -> torch.cuda.device:
    """Kernels are launched on the current device: make it the tensor's; a CPU tensor is for triton's interpreter."""
    return torch.cuda.device(tensor.device if tensor.is_cuda else -1)


@cache
def _overlaps(device: int) -> bool:
    """Whether this device and this triton know programmatic dependent launches."""
    knows = hasattr(triton_kernels().tl.extra.cuda, "gdc_wait")
    return knows and torch.cuda.get_device_capability(device) >= (9, 0)


def _picks(k: int) -> int:
    """What a kernel sorts out to have the k best: a power of two, and no scalar."""
    return max(2, power_of_two(k))


def power_of_two(number: int) -> int:
    """The least power of two that is no less than number, which is 1 or more."""
    return 1 << (number - 1).bit_length()
