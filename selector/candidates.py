"""Candidates: the k best tokens of each row; how a rank chooses its own, and how ranks put theirs together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeGuard, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from tpbed.selector.errors import SelectionError
from tpbed.selector.merge import gather_columns, merge_gathered, two_gather_merge
from tpbed.selector.packed import best_candidates, gather_keys, pack_keys, require_packable
from tpbed.selector.shard import VocabShard
from tpbed.selector.topk import KeyedTopK, TopK, empty_topk

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


def check_merge(merge: Merge, shard: VocabShard) -> None:
    """Raise SelectionError, on every rank alike, for a merge that is not known or that this vocabulary cannot have."""
    if merge not in get_args(Merge):
        raise SelectionError(f"merge={merge!r} is none of {', '.join(get_args(Merge))}: use one of these.")
    if merge == "full_gather" and not shard.equal_widths:
        raise SelectionError('merge="full_gather" needs as many columns on every rank: use "packed" or "two_gather".')
    if merge != "two_gather":
        require_packable(shard.org_vocab_size)


def takes_keys(topk: TopK, merge: Merge) -> TypeGuard[KeyedTopK]:
    """Whether keys go straight from the top-k into the merge: then logits need no mask."""
    return merge == "packed" and isinstance(topk, KeyedTopK)


def choose_local(logits: Tensor, shard: VocabShard, *, k: int, topk: TopK, merge: Merge) -> tuple[Tensor, ...]:
    """What this rank brings to the merge, best first; no collective: keys (rows, up to k), or values and token ids.

    logits: (rows, shard.width), padding masked unless takes_keys. To a full_gather it brings all org columns, padding
    too, as they lie: added columns between the shares of two ranks would shift every id that follows.
    Raises SelectionError as check_merge does.
    """
    check_merge(merge, shard)
    if merge == "full_gather":
        return (logits[:, : shard.num_org_padded],)
    if takes_keys(topk, merge):
        return (topk.keys(logits, k, num_org=shard.num_org, first_id=shard.org_start),)
    local_k = min(k, logits.shape[1])
    nothing = local_k == 0 or logits.shape[0] == 0  # a kernel may not survive it; the gathers are joined all the same
    values, columns = empty_topk(logits, local_k) if nothing else topk(logits, local_k)
    ids = columns.long() + shard.org_start
    return (pack_keys(values, ids),) if merge == "packed" else (values, ids)


def merge_candidates(
    local: tuple[Tensor, ...],
    shard: VocabShard,
    *,
    k: int,
    group: dist.ProcessGroup | None,
    merge: Merge,
    topk: TopK,
) -> Candidates:
    """The k best of what all ranks bring, the same on every rank; every rank calls this after choose_local.

    Raises SelectionError as check_merge does.
    """
    check_merge(merge, shard)
    if merge == "full_gather":
        merged = _choose_of_all(local[0], shard, k, group)
    elif merge == "packed":
        keys = local[0] if shard.world_size == 1 else gather_keys(local[0], k=k, group=group)
        choose = topk.best_candidates if takes_keys(topk, merge) else best_candidates
        merged = choose(keys, k)
    elif shard.world_size == 1:
        merged = merge_gathered(local[0].float(), local[1], k)
    else:
        merged = two_gather_merge(local[0], local[1], k=k, group=group)
    return Candidates(values=merged[0], ids=merged[1])


def _choose_of_all(values: Tensor, shard: VocabShard, k: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """The org shares of all ranks side by side are the org vocabulary, and padding at its end, which is cropped."""
    whole = values if shard.world_size == 1 else gather_columns(values, group)
    whole = whole[:, : shard.org_vocab_size]
    ids = torch.arange(shard.org_vocab_size, device=values.device).expand_as(whole)
    return best_candidates(pack_keys(whole, ids), k)
