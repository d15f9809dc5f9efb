"""Fp8Head: a head in real float8_e4m3fn with scales per row, per block of 128x128 or one for all; its packers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tpbed.selector.checkpoint import EMBEDDING, LM_HEAD, Packed, read_packed
from tpbed.selector.folder import CheckpointPath
from tpbed.selector.head import HeadError, check_matrix, check_rows, check_scale
from tpbed.selector.shard import ShardError, VocabShard
from tpbed.selector.tiles import add_bias, apply_in_tiles
from tpbed.selector.triton_fp8 import quantise_rows, scale_logits
from tpbed.selector.triton_topk import has_triton

FP8_MAX = 448.0  # the largest finite float8_e4m3fn
BLOCK = 128  # rows and hidden units of a block that share a scale
Granularity = Literal["channel", "tensor", "block"]


def pack_fp8_per_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Pack each row in float8_e4m3fn with its own scale = amax / 448, so that its largest entry uses the full range.

    weight: (rows, hidden units) of any floating dtype, finite; a row with NaN or infinity packs to NaN.
    Returns packed (rows, hidden units) float8_e4m3fn and scale (rows, 1) float32; packed * scale is the weight again,
    within 1/16 of each entry or, for the smallest, 2**-10 * scale. A row of zeros packs to zeros.
    Raises HeadError for other than two dimensions.
    Cost: float32 copies of weight. Rows are independent: packing and sharding may come in either order.
    Source: per-channel symmetric FP8 as compressed-tensors stores it; OCP 8-bit Floating Point, E4M3 (2023).
    """
    check_matrix("weight", weight)
    wide = weight.float()
    amax = wide.abs().amax(dim=1, keepdim=True) if weight.shape[1] else wide.new_zeros((weight.shape[0], 1))
    scale = symmetric_scale(amax, FP8_MAX)
    return _to_fp8(wide / scale), scale


def pack_fp8_per_tensor(weight: Tensor) -> tuple[Tensor, Tensor]:
    """As pack_fp8_per_channel, with one scale (1,) float32 for all rows: pack the whole head, then shard it."""
    check_matrix("weight", weight)
    wide = weight.float()
    amax = wide.abs().amax().reshape(1) if weight.numel() else wide.new_zeros(1)
    scale = symmetric_scale(amax, FP8_MAX)
    return _to_fp8(wide / scale), scale


def pack_fp8_per_block(weight: Tensor) -> tuple[Tensor, Tensor]:
    """As pack_fp8_per_channel, with one scale for each 128 rows by 128 hidden units, counted from the first.

    Returns packed as there and scale (ceil(rows / 128), ceil(hidden units / 128)) float32; blocks at the end may be
    partial. Source: weights of DeepSeek-V3; FP8_BLOCK of compressed-tensors.
    """
    check_matrix("weight", weight)
    blocks = _in_blocks(weight.float())
    amax = blocks.abs().amax(dim=(1, 3)) if blocks.numel() else blocks.new_zeros(blocks.shape[0], blocks.shape[2])
    scale = symmetric_scale(amax, FP8_MAX)
    scaled = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)[: weight.shape[0], : weight.shape[1]]
    return _to_fp8(scaled), scale


def symmetric_scale(amax: Tensor, largest: float) -> Tensor:
    """The float32 scale that makes amax the largest code: normal numbers only, 2**-23 where all is zero.

    Source: calculate_qparams of compressed-tensors, which lets a scale be subnormal and lose its digits.
    """
    info = torch.finfo(torch.float32)
    return (amax / largest).clamp_min(info.tiny).masked_fill(amax == 0, info.eps)


def dequantise_fp8(packed: Tensor, scale: Tensor) -> Tensor:
    """The weight that packed (rows, hidden units) and scale of a packer stand for, exactly: float64, for references."""
    if granularity_of(packed, scale) == "block":
        scale = scale.repeat_interleave(BLOCK, 0)[: packed.shape[0]].repeat_interleave(BLOCK, 1)[:, : packed.shape[1]]
    return packed.double() * scale.double()


def granularity_of(weight: Tensor, scale: Tensor, covered: Granularity | None = None) -> Granularity:
    """What one scale covers, which its shape says: (1,), (rows, 1), or a row and a column for each 128 of weight's.

    covered: the answer, if it is known; a shape that fits a row and a block alike is taken as one for the row.
    Raises HeadError for any other shape.
    """
    check_matrix("weight", weight)
    shapes: dict[Granularity, tuple[int, ...]] = {
        "channel": (weight.shape[0], 1),
        "block": (-(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK)),
        "tensor": (1,),
    }
    for name, shape in shapes.items():
        if shape == tuple(scale.shape) and covered in (None, name):
            return name
    wanted = ", ".join(f"{shape} per {name}" for name, shape in shapes.items())
    raise HeadError(
        f"weight_scale has shape {tuple(scale.shape)}, but a weight of {tuple(weight.shape)} takes {wanted}: "
        f"pack them with one of the packers of FP8."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Method:
    """The product with an Fp8Head, on the kernel that its device has.

    quantize_activations: allow W8A8 where the device has it; without, W8A16 everywhere: one answer on any device.

    CPU, blocks, and CUDA where the kernel below does not fit: W8A16 in tiles, as TiledMethod.
    CUDA, compute capability 9.0 and up, if allowed: W8A8 through torch._scaled_mm. Activations are quantized as well,
    per row or with one scale as the weight is (dynamic, amax / 448), which moves each by up to 1/16 of itself: other
    logits than W8A16 gives, by design. With one scale, a row's logits depend on the other rows of the step.
    The kernel is chosen from facts that all ranks share if their devices are alike; uneven shards always take W8A16.
    """

    quantize_activations: bool = True

    def apply(self, layer: Fp8Head, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits (rows, layer.shard.width) in layer.logits_dtype, padding columns included and unmasked.

        x: (rows, hidden units) float16, bfloat16 or float32. bias: (width,) or None.
        """
        fits = self.quantize_activations and fits_scaled_mm(layer, x)
        return add_bias(apply_scaled_mm(layer, x) if fits else apply_in_tiles(layer, x), bias)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fp8Head:
    """A head in FP8: scales per row or block follow the rows when the vocabulary is sharded, one for all is everyone's.

    weight: (shard.width, hidden units) float8_e4m3fn. weight_scale: float32 (shard.width, 1), (1,), or one for each
    128 rows of the shard and 128 hidden units, the last of which may be partial.
    scale_covers: what one scale covers, None for what the shapes say, which a shard of a row or none may leave open.
    Padding rows of both may hold anything. Raises HeadError if they do not fit the shard or the format, ShardError if
    ranks would share a block.
    """

    weight: Tensor
    weight_scale: Tensor
    shard: VocabShard
    quant_method: object | None = field(default_factory=Fp8Method)
    logits_dtype: torch.dtype = torch.bfloat16
    scale_covers: Granularity | None = None

    def __post_init__(self) -> None:
        check_rows("weight", self.weight, self.shard)
        if (self.weight.dtype, self.weight_scale.dtype) != (torch.float8_e4m3fn, torch.float32):
            raise HeadError(
                f"weight is {self.weight.dtype} and weight_scale {self.weight_scale.dtype}, but the format is "
                f"float8_e4m3fn with float32 scales: pack them with one of the packers of FP8."
            )
        if self.granularity == "block":
            check_blocks(self.shard)

    @classmethod
    def from_full(
        cls,
        weight_full: Tensor,
        shard: VocabShard,
        *,
        padding: float | Tensor = 0.0,
        granularity: Granularity = "channel",
    ) -> Fp8Head:
        """Pack a whole weight (org + added tokens, hidden units) and keep the shard's rows and scales."""
        return cls.from_packed(pack_fp8(weight_full, granularity), shard, padding=padding)

    @classmethod
    def from_packed(cls, packed: Packed, shard: VocabShard, *, padding: float | Tensor = 0.0) -> Fp8Head:
        """The shard's part of a whole packed head: weight, and weight_scale of any floating dtype.

        Raises ShardError on every rank alike if an edge between ranks cuts a block.
        """
        check_scale("weight_scale", packed["weight_scale"])
        weight, scale = packed["weight"], packed["weight_scale"].float()
        scale = scale.reshape(1) if scale.ndim == 0 else scale
        covered = granularity_of(weight, scale)
        if covered == "block":
            scale = _shard_blocks(scale, shard, padding)
        elif covered == "channel":
            scale = shard.shard_rows(scale, padding=padding)
        rows = shard.shard_rows(weight, padding=padding)
        return cls(weight=rows, weight_scale=scale, shard=shard, scale_covers=covered)

    @classmethod
    def from_checkpoint(
        cls, path: CheckpointPath, shard: VocabShard, *, name: str = LM_HEAD, tied_to: str = EMBEDDING
    ) -> Fp8Head:
        """Read the shard's part of an FP8 head, as read_packed does; CheckpointError if it is packed otherwise."""
        return cls.from_packed(
            read_packed(path, name, tied_to=tied_to, formats=("fp8", "fp8-tensor", "fp8-block"))[1], shard
        )

    @property
    def granularity(self) -> Granularity:
        """What one scale covers."""
        return granularity_of(self.weight, self.weight_scale, self.scale_covers)

    @property
    def hidden_size(self) -> int:
        """Hidden units that a row of hidden states must have."""
        return self.weight.shape[1]

    def widen(self, rows: slice) -> Tensor:
        """The weight of some rows in float32, one rounding from the exact one: (rows, hidden units)."""
        wide = self.weight[rows].float()
        if self.granularity != "block":
            return wide.mul_(self.weight_scale if self.weight_scale.ndim == 1 else self.weight_scale[rows])
        scale = self.weight_scale[torch.arange(rows.start, rows.stop, device=wide.device) // BLOCK]
        wide = F.pad(wide, (0, -wide.shape[1] % BLOCK))
        wide.view(*scale.shape, BLOCK).mul_(scale.unsqueeze(2))
        return wide[:, : self.hidden_size]


def pack_fp8(weight: Tensor, granularity: Granularity) -> dict[str, Tensor]:
    """Pack with scales of a granularity: weight and weight_scale."""
    pack = {"channel": pack_fp8_per_channel, "tensor": pack_fp8_per_tensor, "block": pack_fp8_per_block}[granularity]
    packed, scale = pack(weight)
    return {"weight": packed, "weight_scale": scale}


def check_blocks(shard: VocabShard) -> None:
    """Raise ShardError, on every rank alike, where a block of 128 rows has rows of two ranks or of two vocabularies."""
    if shard.added_vocab_size:
        raise ShardError(
            f"added_vocab_size={shard.added_vocab_size} tokens follow the padding, where no block of {BLOCK} rows "
            f"begins: use a format with scales per row."
        )
    if shard.edge_divisor % BLOCK:
        raise ShardError(
            f"ranks share {shard.org_vocab_size} tokens at multiples of {shard.edge_divisor}, which cuts a block of "
            f"{BLOCK} rows that have one scale, at world_size={shard.world_size}: use VocabShard.even with "
            f"pad_to={BLOCK * shard.world_size}, or widths that are multiples of {BLOCK}."
        )


def fits_scaled_mm(layer: Fp8Head, x: Tensor) -> bool:
    """Whether torch._scaled_mm takes this product: CUDA 9.0 and up, sizes in 16s, bfloat16, no blocks."""
    if not x.is_cuda or x.shape[0] == 0 or layer.logits_dtype is not torch.bfloat16 or layer.granularity == "block":
        return False
    in_sixteens = layer.hidden_size % 16 == 0 and layer.shard.width % 16 == 0 and layer.shard.equal_widths
    return in_sixteens and torch.cuda.get_device_capability(x.device) >= (9, 0)


def apply_scaled_mm(layer: Fp8Head, x: Tensor) -> Tensor:
    """W8A8: both sides in float8_e4m3fn with a scale per row, or one each; logits (rows, width) bfloat16."""
    if layer.granularity == "channel" and has_triton():
        return apply_and_scale(layer, x)
    one = layer.granularity == "tensor"
    packed, scale = pack_fp8_per_tensor(x) if one else pack_fp8_per_channel(x)
    scale_b = layer.weight_scale if one else layer.weight_scale.t()
    return torch._scaled_mm(packed, layer.weight.t(), scale_a=scale, scale_b=scale_b, out_dtype=torch.bfloat16)


def apply_and_scale(layer: Fp8Head, x: Tensor) -> Tensor:
    """W8A8 per row: a product without scales, float32, and then the scales of both sides, rounded once.

    torch._scaled_mm with a scale per row takes about 1.4 times as long as with one for all (one H200, 7 to 56 rows).
    """
    packed, row_scales = quantise_rows(x, largest=FP8_MAX)
    one = torch.ones(1, device=x.device)
    raw = torch._scaled_mm(packed, layer.weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    return scale_logits(raw, row_scales, layer.weight_scale.flatten(), torch.bfloat16)


def _to_fp8(scaled: Tensor) -> Tensor:
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)  # releases differ on who saturates


def _in_blocks(weight: Tensor) -> Tensor:
    rows, units = weight.shape
    padded = F.pad(weight, (0, -units % BLOCK, 0, -rows % BLOCK))
    return padded.reshape(-(-rows // BLOCK), BLOCK, -(-units // BLOCK), BLOCK)


def _shard_blocks(scale: Tensor, shard: VocabShard, padding: float | Tensor) -> Tensor:
    local = scale.new_empty((-(-shard.width // BLOCK), scale.shape[1])).copy_(torch.as_tensor(padding))
    own = scale[shard.org_start // BLOCK :][: len(local)]
    local[: len(own)] = own
    return local
