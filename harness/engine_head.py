"""EngineHead: a head as SGLang and vLLM shape it - weight, quant_method, shard_indices, and what their code reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpbed.selector.shard import VocabShard

Disturb = Callable[[Tensor], None]  # what a plan does to the logits (rows, width) of this rank, in place


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndices:
    """Which rows of the vocabulary a rank holds, by the names that both engines use; ends are exclusive.

    Source: VocabParallelEmbeddingShardIndices of SGLang and vLLM.
    """

    padded_org_vocab_start_index: int
    padded_org_vocab_end_index: int
    padded_added_vocab_start_index: int
    padded_added_vocab_end_index: int
    org_vocab_start_index: int
    org_vocab_end_index: int
    added_vocab_start_index: int
    added_vocab_end_index: int

    @classmethod
    def of(cls, shard: VocabShard) -> ShardIndices:
        """Those of a shard. An uneven one starts where its real tokens do, since it has no padding."""
        share, added_share = shard.num_org_padded, shard.width - shard.num_org_padded
        start = shard.rank * share if shard.equal_widths else shard.org_start
        added_start = shard.org_vocab_size + shard.rank * added_share
        return cls(
            padded_org_vocab_start_index=start,
            padded_org_vocab_end_index=start + share,
            padded_added_vocab_start_index=added_start,
            padded_added_vocab_end_index=added_start + added_share,
            org_vocab_start_index=shard.org_start,
            org_vocab_end_index=shard.org_start + shard.num_org,
            added_vocab_start_index=shard.added_start,
            added_vocab_end_index=shard.added_start + shard.num_added,
        )

    @property
    def num_org_elements(self) -> int:
        """Real org tokens held."""
        return self.org_vocab_end_index - self.org_vocab_start_index

    @property
    def num_added_elements(self) -> int:
        """Real added tokens held."""
        return self.added_vocab_end_index - self.added_vocab_start_index

    @property
    def num_org_elements_padded(self) -> int:
        """Rows before the first added token."""
        return self.padded_org_vocab_end_index - self.padded_org_vocab_start_index

    @property
    def num_added_elements_padded(self) -> int:
        """Rows from the first added token on."""
        return self.padded_added_vocab_end_index - self.padded_added_vocab_start_index

    @property
    def num_org_vocab_padding(self) -> int:
        """Rows between the last real org token and the first added one."""
        return self.num_org_elements_padded - self.num_org_elements

    @property
    def num_added_vocab_padding(self) -> int:
        """Rows after the last real added token."""
        return self.num_added_elements_padded - self.num_added_elements

    @property
    def num_elements_padded(self) -> int:
        """All rows held."""
        return self.num_org_elements_padded + self.num_added_elements_padded


class UnquantizedEmbeddingMethod:
    """What engines leave on a head whose weight multiplies as it is; they look for it by the name of its class."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits (rows, width) of all rows that layer holds."""
        return torch.nn.functional.linear(x, layer.weight, bias)


class EngineHead:
    """One rank's head under the names that engines use. What is not named here is read from the head itself.

    weight, quant_method, shard_indices; org_vocab_size, num_embeddings (org and added tokens), num_added_embeddings,
    num_embeddings_per_partition (rows held), num_embeddings_padded (rows of all ranks); tp_size, tp_rank; bias (None).
    """

    bias = None

    def __init__(self, head: Any, *, disturb: Disturb | None = None) -> None:
        shard: VocabShard = head.shard
        self._head = head
        self.shard_indices = ShardIndices.of(shard)
        self.org_vocab_size, self.num_added_embeddings = shard.org_vocab_size, shard.added_vocab_size
        self.num_embeddings = shard.org_vocab_size + shard.added_vocab_size
        self.num_embeddings_per_partition = shard.width
        self.num_embeddings_padded = shard.width * shard.world_size
        self.tp_size, self.tp_rank = shard.world_size, shard.rank
        self.quant_method = _planted(_method_of(head), disturb)

    def __getattr__(self, name: str) -> Any:
        if name == "_head":
            raise AttributeError(name)
        return getattr(self._head, name)


def _method_of(head: Any) -> Any:
    """The head's own, which a fault may have changed; on a dense head without one, what engines put there."""
    dense = head.quant_method is None and head.weight.dtype in (torch.float16, torch.bfloat16, torch.float32)
    return UnquantizedEmbeddingMethod() if dense else head.quant_method


def _planted(method: Any, disturb: Disturb | None) -> Any:
    """A method of the same name that does to its logits what the plan says."""
    if disturb is None or method is None:
        return method
    planted = type(type(method).__name__, (_Planted,), {})
    return planted(method, disturb)


class _Planted:
    def __init__(self, method: Any, disturb: Disturb) -> None:
        self._method, self._disturb = method, disturb

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        logits: Tensor = self._method.apply(layer, x, bias)
        self._disturb(logits)
        return logits
