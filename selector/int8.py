"""Int8Head: a head in int8 rows with one scale each, and its packer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tpbed.selector.checkpoint import EMBEDDING, LM_HEAD, Packed, read_packed
from tpbed.selector.folder import CheckpointPath
from tpbed.selector.fp8 import symmetric_scale
from tpbed.selector.head import HeadError, check_matrix, check_rows, check_scale
from tpbed.selector.shard import VocabShard
from tpbed.selector.tiles import TiledMethod


def pack_int8(weight: Tensor) -> dict[str, Tensor]:
    """Pack each row in int8 with its own scale = amax / 127.5; ties round to even.

    weight: (rows, hidden units) of any floating dtype, finite.
    Returns weight (rows, hidden units) int8 and weight_scale (rows, 1) float32; their product is the weight again,
    within half a scale of each entry, and its rounding. A row of zeros packs to zeros. HeadError for other than 2-D.
    Source: per-channel symmetric INT8 of compressed-tensors; -128 is used, and 127.5 of the largest is cut to 127.
    """
    check_matrix("weight", weight)
    wide = weight.float()
    amax = wide.abs().amax(dim=1, keepdim=True) if weight.shape[1] else wide.new_zeros((weight.shape[0], 1))
    scale = symmetric_scale(amax, 127.5)
    return {"weight": (wide / scale).clamp(-128, 127).round().to(torch.int8), "weight_scale": scale}


def dequantise_int8(packed: Packed) -> Tensor:
    """The weight that a whole packed head stands for, exactly: float64, for references."""
    return packed["weight"].double() * packed["weight_scale"].double()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Int8Head:
    """A head in INT8 per vocabulary row, served as W8A16: the scales follow the rows when the vocabulary is sharded.

    weight: (shard.width, hidden units) int8. weight_scale: (shard.width, 1) float32.
    Padding rows of both may hold anything. Raises HeadError if they do not fit the shard or the format.
    """

    weight: Tensor
    weight_scale: Tensor
    shard: VocabShard
    quant_method: object | None = field(default_factory=TiledMethod)
    logits_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        check_rows("weight", self.weight, self.shard)
        check_rows("weight_scale", self.weight_scale, self.shard)
        formats = (self.weight.dtype, self.weight_scale.dtype, self.weight_scale.shape[1])
        if formats != (torch.int8, torch.float32, 1):
            raise HeadError(
                f"weight is {self.weight.dtype} and weight_scale {self.weight_scale.dtype} with "
                f"{self.weight_scale.shape[1]} columns, but the format is int8 rows with one float32 scale each: "
                f"pack them with pack_int8."
            )

    @classmethod
    def from_full(cls, weight_full: Tensor, shard: VocabShard, *, padding: float | Tensor = 0.0) -> Int8Head:
        """Pack a whole weight (org + added tokens, hidden units) and keep the shard's rows and scales."""
        return cls.from_packed(pack_int8(weight_full), shard, padding=padding)

    @classmethod
    def from_packed(cls, packed: Packed, shard: VocabShard, *, padding: float | Tensor = 0.0) -> Int8Head:
        """The shard's part of a whole packed head: weight, and weight_scale of any floating dtype."""
        check_scale("weight_scale", packed["weight_scale"])
        return cls(
            weight=shard.shard_rows(packed["weight"], padding=padding),
            weight_scale=shard.shard_rows(packed["weight_scale"].float(), padding=padding),
            shard=shard,
        )

    @classmethod
    def from_checkpoint(
        cls, path: CheckpointPath, shard: VocabShard, *, name: str = LM_HEAD, tied_to: str = EMBEDDING
    ) -> Int8Head:
        """Read the shard's part of an INT8 head, as read_packed does; CheckpointError if it is packed otherwise."""
        return cls.from_packed(read_packed(path, name, tied_to=tied_to, formats=("int8",))[1], shard)

    @property
    def hidden_size(self) -> int:
        """Hidden units that a row of hidden states must have."""
        return self.weight.shape[1]

    def widen(self, rows: slice) -> Tensor:
        """The weight of some rows in float32, one rounding from the exact one: (rows, hidden units)."""
        return self.weight[rows].float().mul_(self.weight_scale[rows])
