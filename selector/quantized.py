"""Fp8Head: a head in real float8_e4m3fn rows with one scale each, its packer, and the product with it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tpbed.selector.head import HeadError, check_rows
from tpbed.selector.shard import VocabShard

FP8_MAX = 448.0  # the largest finite float8_e4m3fn
TILE_BYTES = 16 << 20  # of float32 weight rows that exist at one time


def pack_fp8_per_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Pack each row in float8_e4m3fn with its own scale = amax / 448, so that its largest entry uses the full range.

    weight: (rows, hidden units) of any floating dtype, finite; a row with NaN or infinity packs to NaN.
    Returns packed (rows, hidden units) float8_e4m3fn and scale (rows, 1) float32; packed * scale is the weight again,
    within 1/16 of each entry or, for the smallest, 2**-10 * scale. A row of zeros packs to zeros.
    Cost: float32 copies of weight. Rows are independent: packing and sharding may come in either order.
    Source: per-channel symmetric FP8 as compressed-tensors stores it; OCP 8-bit Floating Point, E4M3 (2023).
    """
    wide = weight.float()
    amax = wide.abs().amax(dim=1, keepdim=True) if weight.shape[1] else wide.new_zeros((weight.shape[0], 1))
    scale = (amax / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    packed = (wide / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)  # releases differ on who saturates
    return packed, scale


def dequantise_fp8(packed: Tensor, scale: Tensor) -> Tensor:
    """The weight that packed (rows, hidden units) and scale (rows, 1) stand for, exactly: float64, for references."""
    return packed.double() * scale.double()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8PerChannelMethod:
    """The product with an Fp8Head, on the kernel that its device has.

    quantize_activations: allow W8A8 where the device has it; without, W8A16 everywhere: one answer on any device.

    CPU, and CUDA where the kernel below does not fit: W8A16. Activations keep their bfloat16 or float32 values, weight
    rows are widened to float32 in tiles of 16 MiB, sums are float32, the scale multiplies the sum, one rounding to
    layer.logits_dtype follows.
    CUDA, compute capability 9.0 and up, if allowed: W8A8 through torch._scaled_mm. Activations are quantized per row
    as well (dynamic, amax / 448), which moves each by up to 1/16 of itself: other logits than W8A16 gives, by design.
    The kernel is chosen from facts that all ranks share if their devices are alike; uneven shards always take W8A16.
    """

    quantize_activations: bool = True

    def apply(self, layer: Fp8Head, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits (rows, layer.shard.width) in layer.logits_dtype, padding columns included and unmasked.

        x: (rows, hidden units) float16, bfloat16 or float32. bias: (width,) or None.
        """
        fits = self.quantize_activations and fits_scaled_mm(layer, x)
        logits = apply_scaled_mm(layer, x) if fits else apply_in_tiles(layer, x)
        return logits if bias is None else (logits + bias).to(layer.logits_dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fp8Head:
    """A head packed per vocabulary row: the scales follow the rows when the vocabulary is sharded.

    weight: (shard.width, hidden units) float8_e4m3fn. weight_scale: (shard.width, 1) float32.
    Padding rows of both may hold anything. Raises HeadError if they do not fit the shard or the format.
    """

    weight: Tensor
    weight_scale: Tensor
    shard: VocabShard
    quant_method: object | None = field(default_factory=Fp8PerChannelMethod)
    logits_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        check_rows("weight", self.weight, self.shard)
        check_rows("weight_scale", self.weight_scale, self.shard)
        formats = (self.weight.dtype, self.weight_scale.dtype, self.weight_scale.shape[1])
        if formats != (torch.float8_e4m3fn, torch.float32, 1):
            raise HeadError(
                f"weight is {self.weight.dtype} and weight_scale {self.weight_scale.dtype} with "
                f"{self.weight_scale.shape[1]} columns, but the format is float8_e4m3fn rows with one float32 scale "
                f"each: pack them with pack_fp8_per_channel."
            )

    @classmethod
    def from_full(cls, weight_full: Tensor, shard: VocabShard, *, padding: float | Tensor = 0.0) -> Fp8Head:
        """Pack a whole weight (org + added tokens, hidden units) and keep the shard's rows and scales."""
        packed, scale = pack_fp8_per_channel(weight_full)
        return cls(
            weight=shard.shard_rows(packed, padding=padding),
            weight_scale=shard.shard_rows(scale, padding=padding),
            shard=shard,
        )

    @property
    def hidden_size(self) -> int:
        """Hidden units that a row of hidden states must have."""
        return self.weight.shape[1]


def fits_scaled_mm(layer: Fp8Head, x: Tensor) -> bool:
    """Whether torch._scaled_mm takes this product with scales per row: CUDA 9.0 and up, sizes in 16s, bfloat16."""
    if not x.is_cuda or x.shape[0] == 0 or layer.logits_dtype is not torch.bfloat16:
        return False
    in_sixteens = layer.hidden_size % 16 == 0 and layer.shard.width % 16 == 0 and layer.shard.equal_widths
    return in_sixteens and torch.cuda.get_device_capability(x.device) >= (9, 0)


def apply_scaled_mm(layer: Fp8Head, x: Tensor) -> Tensor:
    """W8A8: both sides in float8_e4m3fn with a scale per row; logits (rows, width) bfloat16."""
    packed, scale = pack_fp8_per_channel(x)
    return torch._scaled_mm(
        packed, layer.weight.t(), scale_a=scale, scale_b=layer.weight_scale.t(), out_dtype=torch.bfloat16
    )


def apply_in_tiles(layer: Fp8Head, x: Tensor) -> Tensor:
    """W8A16: weight rows widened to float32 a tile at a time; logits (rows, width) in layer.logits_dtype."""
    logits = x.new_empty((x.shape[0], layer.shard.width), dtype=layer.logits_dtype)
    step = max(1, TILE_BYTES // (4 * max(1, layer.hidden_size)))
    wide = x.float()
    for start in range(0, layer.shard.width, step):
        rows = slice(start, start + step)
        logits[:, rows] = (wide @ layer.weight[rows].float().t()) * layer.weight_scale[rows].t()
    return logits
