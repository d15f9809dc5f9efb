"""Nvfp4Head: a head in packed E2M1 with a float8_e4m3fn scale for 16 entries and one for all, in the two layouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from tpbed.selector.checkpoint import EMBEDDING, LM_HEAD, Packed, read_packed
from tpbed.selector.head import HeadError, check_matrix, check_rows
from tpbed.selector.shard import VocabShard
from tpbed.selector.tiles import add_bias, apply_in_tiles
from tpbed.selector.triton_nvfp4 import triton_nvfp4
from tpbed.selector.triton_topk import has_triton

GROUP = 16  # neighbours in a row that share a scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # codes 0 to 7; bit 3 is the sign
FP4_MAX, FP8_MAX = 6.0, 448.0
Layout = Literal["compressed-tensors", "modelopt"]
"""Names and meaning of what is stored beside weight_scale. compressed-tensors: weight_packed, and weight_global_scale =
448 * 6 / amax, which divides. modelopt: weight, and weight_scale_2 = amax / (448 * 6), which multiplies."""
WEIGHT_NAMES: dict[Layout, tuple[str, str, str]] = {
    "compressed-tensors": ("weight_packed", "weight_global_scale", "input_global_scale"),
    "modelopt": ("weight", "weight_scale_2", "input_scale"),
}


def pack_nvfp4(weight: Tensor, layout: Layout = "compressed-tensors") -> dict[str, Tensor]:
    """Pack rows in E2M1, two entries to a byte, the first in the low bits; ties round to even codes.

    weight: (rows, hidden units) of any floating dtype, finite, hidden units a multiple of 16.
    Returns tensors under the layout's names: the packed (rows, hidden units / 2) uint8, weight_scale
    (rows, hidden units / 16) float8_e4m3fn, the global scale float32 (1,) or (), which depends on all rows: pack the
    whole head, then shard it. Raises HeadError if the hidden units are not in 16s, and for other than two dimensions.
    Source: generate_gparam, calculate_qparams and quantize of compressed-tensors; NVFP4QTensor of ModelOpt.
    """
    check_matrix("weight", weight)
    check_groups(weight.shape[1])
    packed_name, global_name, _ = WEIGHT_NAMES[layout]
    groups = weight.float().reshape(len(weight), weight.shape[1] // GROUP, GROUP)
    group_amax = groups.abs().amax(dim=2)
    amax = group_amax.amax() if group_amax.numel() else group_amax.new_zeros(())
    scale, global_scale = (_ct_scales if layout == "compressed-tensors" else _modelopt_scales)(group_amax, amax)
    codes = _to_e2m1(groups / combined_scale(scale, global_scale, layout).unsqueeze(2)).flatten(1)
    return {packed_name: codes[:, 0::2] | codes[:, 1::2] << 4, "weight_scale": scale, global_name: global_scale}


def dequantise_nvfp4(packed: Packed, layout: Layout = "compressed-tensors") -> Tensor:
    """The weight that a whole packed head stands for: float64, one rounding of that if the global scale divides."""
    packed_name, global_name, _ = WEIGHT_NAMES[layout]
    scale, overall = packed["weight_scale"].double(), packed[global_name].double()
    scale = scale / overall if layout == "compressed-tensors" else scale * overall
    wide = unpack_e2m1(packed[packed_name]).double()
    return (wide.view(*scale.shape, GROUP) * scale.unsqueeze(2)).flatten(1)


def combined_scale(scale: Tensor, global_scale: Tensor, layout: Layout) -> Tensor:
    """What the entries of a group are multiplied by: float32, one rounding from the exact one."""
    return scale.float() / global_scale if layout == "compressed-tensors" else scale.float() * global_scale


def unpack_e2m1(packed: Tensor) -> Tensor:
    """The float32 entries of packed bytes: (rows, bytes) uint8 to (rows, 2 * bytes); signed zeros keep their sign."""
    return _pairs(packed.device).index_select(0, packed.flatten().int()).reshape(len(packed), 2 * packed.shape[1])


@cache
def _pairs(device: torch.device) -> Tensor:
    """The two entries of each byte, low bits first; made once, since a graph capture allows no copy from the host."""
    one = torch.tensor(E2M1 + tuple(-value for value in E2M1), device=device)
    return torch.stack([one.repeat(16), one.repeat_interleave(16)], dim=1)


def check_groups(hidden_size: int) -> None:
    """Raise HeadError unless a row divides into groups of 16."""
    if hidden_size % GROUP:
        raise HeadError(
            f"a row of {hidden_size} hidden units does not divide into groups of {GROUP}, which NVFP4 gives one scale "
            f"each: give a multiple of {GROUP}, or use another format."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvfp4Method:
    """W4A16, on the kernel that its device has: activations keep their values, sums are float32, one rounding follows.

    CUDA, compute capability 9.0 and up: triton_nvfp4, for bfloat16 activations. Elsewhere in tiles, as TiledMethod.
    The kernel is chosen from facts that all ranks share if their devices are alike.
    """

    def apply(self, layer: Nvfp4Head, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits (rows, layer.shard.width) in layer.logits_dtype, padding columns included and unmasked.

        x: (rows, hidden units) float16, bfloat16 or float32. bias: (width,) or None.
        """
        return add_bias(apply_triton(layer, x) if fits_triton(layer, x) else apply_in_tiles(layer, x), bias)


def fits_triton(layer: Nvfp4Head, x: Tensor) -> bool:
    """Whether triton_nvfp4 takes this product: CUDA 9.0 and up, bfloat16, the units of a row side by side."""
    if not (x.is_cuda and x.dtype is torch.bfloat16 and has_triton()):
        return False
    side_by_side = all(part.stride(1) == 1 or part.shape[1] < 2 for part in (x, layer.weight, layer.weight_scale))
    return side_by_side and torch.cuda.get_device_capability(x.device) >= (9, 0)


def apply_triton(layer: Nvfp4Head, x: Tensor) -> Tensor:
    """The product without a bias in one kernel; logits (rows, width) in layer.logits_dtype."""
    divides = layer.layout == "compressed-tensors"
    return triton_nvfp4(
        x, layer.weight, layer.weight_scale, layer.global_scale, divides=divides, dtype=layer.logits_dtype
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Nvfp4Head:
    """A head in NVFP4, served as W4A16: group scales follow the rows of the shard, the global one is everyone's.

    weight: (shard.width, hidden units / 2) uint8. weight_scale: (shard.width, hidden units / 16) float8_e4m3fn.
    global_scale: one float32, which divides or multiplies as layout says. input_scale: one float32 of a checkpoint
    whose activations were to be quantized, or None; not used here. Padding rows may hold anything.
    Raises HeadError if they do not fit the shard or the format.
    """

    weight: Tensor
    weight_scale: Tensor
    global_scale: Tensor
    layout: Layout
    shard: VocabShard
    input_scale: Tensor | None = None
    quant_method: object | None = field(default_factory=Nvfp4Method)
    logits_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.layout not in get_args(Layout):
            raise HeadError(f"layout={self.layout!r} is none of {', '.join(get_args(Layout))}: give one of these.")
        check_rows("weight", self.weight, self.shard)
        check_rows("weight_scale", self.weight_scale, self.shard)
        check_groups(self.hidden_size)
        dtypes = (self.weight.dtype, self.weight_scale.dtype, self.global_scale.dtype)
        groups = self.weight_scale.shape[1]
        if (
            dtypes != (torch.uint8, torch.float8_e4m3fn, torch.float32)
            or groups * GROUP != self.hidden_size
            or self.global_scale.numel() != 1
        ):
            raise HeadError(
                f"weight, weight_scale and global_scale are {', '.join(map(str, dtypes))} with {groups} groups and "
                f"{self.global_scale.numel()} global scales for {self.hidden_size} hidden units, but the format is "
                f"uint8 pairs, a float8_e4m3fn scale for each {GROUP} and one float32: pack them with pack_nvfp4."
            )

    @classmethod
    def from_full(
        cls,
        weight_full: Tensor,
        shard: VocabShard,
        *,
        padding: float | Tensor = 0.0,
        layout: Layout = "compressed-tensors",
    ) -> Nvfp4Head:
        """Pack a whole weight (org + added tokens, hidden units) and keep the shard's rows and scales."""
        return cls.from_packed(pack_nvfp4(weight_full, layout), shard, padding=padding, layout=layout)

    @classmethod
    def from_packed(
        cls,
        packed: Packed,
        shard: VocabShard,
        *,
        padding: float | Tensor = 0.0,
        layout: Layout = "compressed-tensors",
    ) -> Nvfp4Head:
        """The shard's part of a whole packed head, its tensors under the layout's names."""
        packed_name, global_name, input_name = WEIGHT_NAMES[layout]
        return cls(
            weight=shard.shard_rows(packed[packed_name], padding=padding),
            weight_scale=shard.shard_rows(packed["weight_scale"], padding=padding),
            global_scale=packed[global_name].reshape(1),
            layout=layout,
            shard=shard,
            input_scale=packed.get(input_name),
        )

    @classmethod
    def from_checkpoint(
        cls, path: Path, shard: VocabShard, *, name: str = LM_HEAD, tied_to: str = EMBEDDING
    ) -> Nvfp4Head:
        """Read the shard's part of an NVFP4 head, as read_packed does; CheckpointError if it is packed otherwise."""
        found, packed = read_packed(path, name, tied_to=tied_to, formats=("nvfp4-ct", "nvfp4-modelopt"))
        return cls.from_packed(packed, shard, layout="compressed-tensors" if found == "nvfp4-ct" else "modelopt")

    @property
    def hidden_size(self) -> int:
        """Hidden units that a row of hidden states must have: two to a byte."""
        return 2 * self.weight.shape[1]

    def widen(self, rows: slice) -> Tensor:
        """The weight of some rows in float32, two roundings from the exact one: (rows, hidden units)."""
        wide = unpack_e2m1(self.weight[rows])
        scale = combined_scale(self.weight_scale[rows], self.global_scale, self.layout)
        wide.view(*scale.shape, GROUP).mul_(scale.unsqueeze(2))
        return wide


def _ct_scales(group_amax: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    tiny = torch.finfo(torch.float32).tiny
    overall = (FP8_MAX * FP4_MAX / amax.clamp_min(tiny)).nan_to_num(1.0, 1.0, 1.0).reshape(1)  # 1 if it overflows
    scale = (overall * (group_amax / FP4_MAX)).clamp(max=FP8_MAX).to(torch.float8_e4m3fn)
    return torch.where(scale.float() == 0, 0.125, scale.float()).to(torch.float8_e4m3fn), overall


def _modelopt_scales(group_amax: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    overall = (amax / (FP4_MAX * FP8_MAX)).clamp_min(torch.finfo(torch.float32).tiny)  # ModelOpt divides zero by zero
    scale = group_amax / (FP4_MAX * overall)
    scale = scale.masked_fill(scale == 0, 1.0).clamp(2.0**-9, FP8_MAX)
    return scale.to(torch.float8_e4m3fn), overall


def _to_e2m1(scaled: Tensor) -> Tensor:
    size = scaled.abs()
    below = [size > bound for bound in (0.25, 1.25, 2.5, 5.0)] + [size >= bound for bound in (0.75, 1.75, 3.5)]
    codes = torch.zeros_like(scaled, dtype=torch.uint8)
    for passed in below:
        codes += passed
    return codes | (scaled < 0).to(torch.uint8) << 3
