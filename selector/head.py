"""LmHead: what the selector asks of a language-model head; DenseHead, the plain one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tpbed.selector.errors import SelectionError
from tpbed.selector.shard import VocabShard

DENSE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # a list: "is floating point" is true for fp8


class HeadError(SelectionError):
    """Parameters that do not make a head: a shape or dtype that contradicts its shard or its format."""


class QuantMethod(Protocol):
    """How a quantized head turns hidden states into logits; engines call it linear or embedding method."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits (rows, width) of all rows that layer holds, padding included; x is (rows, hidden units)."""
        ...


class LmHead(Protocol):
    """One rank's share of the output head, in the shape that SGLang and vLLM give it.

    A head may also have `hidden_size`: the hidden units that its method expects, which a packed weight does not show.
    """

    @property
    def weight(self) -> Tensor:
        """The stored rows, dense (width, hidden units) or packed as quant_method wants them."""
        ...

    @property
    def shard(self) -> VocabShard:
        """Which rows these are."""
        ...

    @property
    def quant_method(self) -> object | None:
        """A QuantMethod, None, or whatever an engine left there: admission looks before it is used."""
        ...

    @property
    def logits_dtype(self) -> torch.dtype:
        """The dtype of this head's logits: what buffers for them must be made of, never weight.dtype."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DenseHead:
    """A head whose weight multiplies the hidden states as it is.

    weight: (shard.width, hidden units) float16, bfloat16 or float32; padding rows may hold anything.
    Logits come in the weight's dtype: that is the rounding point of this head.
    Raises HeadError if weight does not fit the shard.
    """

    weight: Tensor
    shard: VocabShard
    quant_method: object | None = None  # an engine may leave an "unquantized" method here

    def __post_init__(self) -> None:
        check_rows("weight", self.weight, self.shard)
        if self.weight.dtype not in DENSE_DTYPES:
            raise HeadError(
                f"weight is {self.weight.dtype}, which no dense product takes: give float16, bfloat16 or float32, "
                f"or use the head of its packed format."
            )

    @classmethod
    def from_full(cls, weight_full: Tensor, shard: VocabShard, *, padding: float | Tensor = 0.0) -> DenseHead:
        """The shard's rows of a whole weight (org + added tokens, hidden units); padding as in shard_rows."""
        return cls(weight=shard.shard_rows(weight_full, padding=padding), shard=shard)

    @property
    def logits_dtype(self) -> torch.dtype:
        """The weight's dtype."""
        return self.weight.dtype

    @property
    def hidden_size(self) -> int:
        """Hidden units that a row of hidden states must have."""
        return self.weight.shape[1]


def check_rows(name: str, rows: Tensor, shard: VocabShard) -> None:
    """Raise HeadError unless rows is 2-D with one row for each that the shard holds."""
    if rows.ndim != 2 or rows.shape[0] != shard.width:
        raise HeadError(
            f"{name} has shape {tuple(rows.shape)}, but rank {shard.rank} of {shard.world_size} holds "
            f"{shard.width} rows: lay it out with VocabShard.shard_rows."
        )


def check_matrix(name: str, matrix: Tensor) -> None:
    """Raise HeadError unless matrix is a 2-D tensor; it may have no row or no column."""
    if not isinstance(matrix, Tensor) or matrix.ndim != 2:
        found = tuple(matrix.shape) if isinstance(matrix, Tensor) else type(matrix).__name__
        raise HeadError(f"{name} is {found}, but one row per token is needed: give (rows, hidden units).")


def check_scale(name: str, scale: Tensor) -> None:
    """Raise HeadError for scales that are no floating-point numbers: rounded to whole ones, they are lost."""
    if not scale.is_floating_point():
        raise HeadError(f"{name} is {scale.dtype}, but a scale is a fraction: give it in a floating dtype.")
