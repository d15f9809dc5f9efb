"""Candidates: the k best tokens of each row; how a rank chooses its own, and how ranks put theirs together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tpbed.selector.merge import gather_columns, merge_gathered, two_gather_merge
from tpbed.selector.packed import best_keys, pack_keys, packed_merge, screen_keys
from tpbed.selector.shard import VocabShard
from tpbed.selector.topk import TopK, empty_topk

Merge = Literal["two_gather", "packed", "full_gather"]
"""How ranks put their candidates together.

two_gather: values and ids, as SGLang does. packed: one key for both, as packed_merge says; with a canonical top-k the
same bits at every TP. full_gather: all logits of all ranks, then one choice, as SGLang's DSpark; equal widths only.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """The k best tokens of each row over the whole vocabulary, best first, ties to the lower id.

    ids: (rows, k) int64, -1 where no token is left. values: (rows, k) float32, the head's logits, -inf beside an id
    of -1. In a row whose logits hold NaN every id is -1 and every value NaN.
    """

    ids: Tensor
    values: Tensor


def choose_local(logits: Tensor, shard: VocabShard, *, k: int, topk: TopK, merge: Merge) -> tuple[Tensor, Tensor]:
    """What this rank brings to the merge, best first: values and token ids, (rows, up to k); no collective.

    logits: (rows, shard.width), padding masked. To a full_gather it brings all org columns, padding too, as they lie:
    added columns between the shares of two ranks would shift every id that follows.
    """
    if merge == "full_gather":
        ids = shard.org_start + torch.arange(shard.num_org_padded, device=logits.device)
        return logits[:, : shard.num_org_padded], ids.expand(len(logits), -1)
    local_k = min(k, logits.shape[1])
    nothing = local_k == 0 or logits.shape[0] == 0  # a kernel may not survive it; the gathers are joined all the same
    values, columns = empty_topk(logits, local_k) if nothing else topk(logits, local_k)
    return values, columns.long() + shard.org_start


def merge_candidates(
    values: Tensor, ids: Tensor, shard: VocabShard, *, k: int, group: dist.ProcessGroup | None, merge: Merge
) -> Candidates:
    """The k best of what all ranks bring, the same on every rank; every rank calls this, after choose_local."""
    if merge == "full_gather":
        merged = _choose_of_all(values, shard, k, group)
    elif merge == "packed":
        merged = _merge_packed(values, ids, shard, k, group)
    elif shard.world_size == 1:
        merged = merge_gathered(values.float(), ids, k)
    else:
        merged = two_gather_merge(values, ids, k=k, group=group)
    return Candidates(values=merged[0], ids=merged[1])


def _merge_packed(
    values: Tensor, ids: Tensor, shard: VocabShard, k: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    if shard.world_size == 1:
        return screen_keys(best_keys(pack_keys(values, ids), k))
    return packed_merge(values, ids, k=k, group=group)


def _choose_of_all(values: Tensor, shard: VocabShard, k: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """The org shares of all ranks side by side are the org vocabulary, and padding at its end, which is cropped."""
    whole = values if shard.world_size == 1 else gather_columns(values, group)
    whole = whole[:, : shard.org_vocab_size]
    ids = torch.arange(shard.org_vocab_size, device=values.device).expand_as(whole)
    return screen_keys(best_keys(pack_keys(whole, ids), k))
