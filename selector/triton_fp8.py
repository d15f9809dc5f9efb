"""Around an FP8 product without scales: activations quantized in one launch, and scales applied to logits in one."""

from __future__ import annotations

import torch
from torch import Tensor

from tpbed.selector.triton_topk import device_of, power_of_two, triton_kernels

_TILE = 1024  # columns of a program
_WARPS_OF_ROW = 8


def quantise_rows(x: Tensor, *, largest: float) -> tuple[Tensor, Tensor]:
    """pack_fp8_per_channel in one launch, for finite rows: packed (rows, units) float8_e4m3fn, scales (rows,) float32.

    x: (rows, hidden units) of any floating dtype on CUDA, the units of a row side by side.
    """
    info, (rows, units) = torch.finfo(torch.float32), x.shape
    packed = torch.empty((rows, units), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    if packed.numel():
        with device_of(x):
            triton_kernels().quantise_row[(rows,)](
                x, packed, scales, x.stride(0), units,
                LARGEST=largest, TINY=info.tiny, EPS=info.eps, UNITS=power_of_two(units), num_warps=_WARPS_OF_ROW,
            )  # fmt: skip
    return packed, scales


def scale_logits(raw: Tensor, row_scales: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """raw * row_scales * scale in float32, rounded once to dtype: (rows, columns), contiguous.

    raw: (rows, columns) of any floating dtype on CUDA; row_scales: (rows,) and scale: (columns,) float32.
    """
    logits, tiles = torch.empty(raw.shape, dtype=dtype, device=raw.device), -(-raw.shape[1] // _TILE)
    if logits.numel():
        kernels = triton_kernels()
        value = getattr(kernels.tl, str(dtype).removeprefix("torch."))
        with device_of(raw):
            kernels.scale_tile[(len(raw) * tiles,)](
                raw, row_scales, scale, logits, raw.stride(0), raw.shape[1], tiles, VALUE=value, TILE=_TILE
            )
    return logits
