"""TiledMethod: the product with any packed head, its rows widened to float32 a tile at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tpbed.selector.shard import VocabShard

TILE_BYTES = 16 << 20  # of float32 weight rows that exist at one time


class WidenableHead(Protocol):
    """A packed head that can show a few of its rows as float32."""

    @property
    def shard(self) -> VocabShard:
        """Which rows these are."""
        ...

    @property
    def logits_dtype(self) -> torch.dtype:
        """What a product is rounded to, once."""
        ...

    @property
    def hidden_size(self) -> int:
        """Hidden units that a row of hidden states must have."""
        ...

    def widen(self, rows: slice) -> Tensor:
        """The weight of some rows, (rows, hidden units) float32: two roundings each from the exact one, at most."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledMethod:
    """W8A16 or W4A16 on any device: activations keep their values, and one answer comes from every device.

    Sums are float32; one rounding to layer.logits_dtype follows. The whole head is never widened at once.
    """

    def apply(self, layer: WidenableHead, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits (rows, layer.shard.width) in layer.logits_dtype, padding columns included and unmasked.

        x: (rows, hidden units) float16, bfloat16 or float32. bias: (width,) or None.
        """
        return add_bias(apply_in_tiles(layer, x), bias)


def apply_in_tiles(layer: WidenableHead, x: Tensor) -> Tensor:
    """The product without a bias; logits (rows, width) in layer.logits_dtype."""
    width = layer.shard.width
    logits = x.new_empty((x.shape[0], width), dtype=layer.logits_dtype)
    step = max(1, TILE_BYTES // (4 * max(1, layer.hidden_size)))
    wide = x.float()
    for start in range(0, width, step):
        rows = slice(start, min(start + step, width))
        logits[:, rows] = wide @ layer.widen(rows).t()
    return logits


def add_bias(logits: Tensor, bias: Tensor | None) -> Tensor:
    """Logits in their own dtype, with a bias (width,) per vocabulary row if there is one."""
    return logits if bias is None else (logits + bias).to(logits.dtype)
