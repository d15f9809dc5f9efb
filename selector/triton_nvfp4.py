"""TritonNvfp4: the product with an NVFP4 head in one kernel, which widens its weight in registers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tpbed.selector.triton_topk import device_of, power_of_two, triton_kernels

_MOST_ROWS = 64  # of a program


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """What a program of the product does at a time. columns, units: of the weight; stages: of loads under way."""

    columns: int
    units: int
    warps: int
    stages: int


TILINGS = {  # by the rows of a program; `tpbed bench gpu --part tilings` tries others
    8: Tiling(columns=64, units=256, warps=4, stages=3),
    16: Tiling(columns=128, units=256, warps=8, stages=3),
    32: Tiling(columns=128, units=128, warps=8, stages=3),
    64: Tiling(columns=128, units=128, warps=8, stages=3),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonNvfp4:
    """W4A16: packed E2M1 and its scales to logits, in one launch; the weight in bfloat16 never exists as a whole.

    An entry times its group's scale has six significant bits, so that bfloat16 holds it exactly: the only roundings
    are those of the float32 sums, one of the global scale, and one to the logits' dtype.
    tiling: None takes TILINGS. pairs: two entries an instruction; without, in steps that Triton's interpreter knows.
    """

    tiling: Tiling | None = None
    pairs: bool = True

    def __call__(
        self, x: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor, *, divides: bool, dtype: torch.dtype
    ) -> Tensor:
        """Logits (rows, width) in dtype, contiguous.

        x: (rows, hidden units) bfloat16 on CUDA. packed: (width, hidden units / 2) uint8, the first unit in the low
        bits; scale: (width, hidden units / 16) float8_e4m3fn; global_scale: one float32, which divides or multiplies.
        All of them with the units of a row side by side.
        """
        (rows, units), width = x.shape, len(packed)
        logits = torch.empty((rows, width), dtype=dtype, device=x.device)
        if not logits.numel():
            return logits
        program_rows = min(_MOST_ROWS, max(8, power_of_two(rows)))
        tiling, row_tiles = self.tiling or TILINGS[program_rows], -(-rows // program_rows)
        words = packed.view(torch.int16)
        with device_of(x):
            triton_kernels().nvfp4_product[(row_tiles * -(-width // tiling.columns),)](
                x, words, scale, global_scale, logits, x.stride(0), rows, width, words.stride(0),
                scale.stride(0), row_tiles, DIVIDES=divides, PAIRS=self.pairs and x.is_cuda, ALL_UNITS=units,
                ROWS=program_rows, TILE=tiling.columns, UNITS=tiling.units, STAGES=tiling.stages,
                num_warps=tiling.warps,
            )  # fmt: skip
        return logits


triton_nvfp4 = TritonNvfp4()
