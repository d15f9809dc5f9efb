"""RoundedActivations: W8A8 and W4A4 as any device can emulate them: hidden states are rounded, then W8A16 or W4A16."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tpbed.selector.fp8 import dequantise_fp8, pack_fp8_per_channel
from tpbed.selector.nvfp4 import dequantise_nvfp4, pack_nvfp4
from tpbed.selector.tiles import TiledMethod, WidenableHead


def round_to_fp8(hidden: Tensor) -> Tensor:
    """Each row in float8_e4m3fn with a scale of its own, and back to float32, as a dynamic W8A8 kernel reads it."""
    return dequantise_fp8(*pack_fp8_per_channel(hidden)).float()


def round_to_nvfp4(hidden: Tensor) -> Tensor:
    """Each row in NVFP4 with a global scale of its own, and back to float32.

    Kernels take a global scale that a calibration fixed: theirs round no better than one that fits the row.
    """
    rows = [dequantise_nvfp4(pack_nvfp4(row)) for row in torch.split(hidden, 1)]
    return torch.cat(rows).float() if rows else hidden.float()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedActivations:
    """A quant method for heads that can be widened: `rounding` of the hidden states, then TiledMethod."""

    rounding: Callable[[Tensor], Tensor]

    def apply(self, layer: WidenableHead, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """As TiledMethod.apply."""
        return TiledMethod().apply(layer, self.rounding(x), bias)


EMULATED: Mapping[str, tuple[str, RoundedActivations]] = {  # by name: the format of the weight, and its method
    "fp8-w8a8": ("fp8", RoundedActivations(rounding=round_to_fp8)),
    "nvfp4-w4a4": ("nvfp4-ct", RoundedActivations(rounding=round_to_nvfp4)),
}
