"""SELECTORS: the selector under test, and selectors that are wrong on purpose, each by one change seen in the field."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbed.selector.candidates import Candidates
from tpbed.selector.errors import SelectionError
from tpbed.selector.merge import gather_columns, merge_gathered, pad_candidates, two_gather_merge
from tpbed.selector.project import project_candidate_logits
from tpbed.selector.select import compute_candidates
from tpbed.selector.shard import NO_TOKEN

Selector = Callable[..., Candidates]


def crop(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    """Crops the padding off instead of masking it (SGLang pull request 35462): the view is strided where it is real."""
    logits = project_candidate_logits(hidden, head)[:, : head.shard.num_org]
    return _merge(*_local(logits, head, k, topk), k=k, group=group)


def refuse_short_shard(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    """Guards k against the real columns of its own shard: the guard holds on one rank and not on another."""
    if k > head.shard.num_org:
        raise SelectionError(f"k={k} exceeds the {head.shard.num_org} real columns of this shard.")
    return compute_candidates(hidden, head, k=k, group=group, topk=topk, note=note)


def skip_empty_shard(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    """Returns early where its shard holds no real token, and leaves its peers in the gathers."""
    empty = head.shard.num_org == 0
    note("empty_shard", empty, because=f"num_org={head.shard.num_org}")
    if empty:
        rows = hidden.shape[0]
        return Candidates(ids=torch.full((rows, k), NO_TOKEN), values=torch.full((rows, k), -inf))
    return compute_candidates(hidden, head, k=k, group=group, topk=topk, note=note)


def clip_k_to_shard(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    """Gathers as many candidates as its shard has real tokens: the width depends on the rank."""
    logits = project_candidate_logits(hidden, head)
    values, ids = _local(logits, head, min(k, max(head.shard.num_org, 1)), topk)
    return Candidates(**_named(merge_gathered(*_gather_both(values, ids, group), k)))


def local_fast_path(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    """Takes one packed gather where its own shard has no padding, and two gathers where it has."""
    fast = head.shard.num_org == head.shard.width
    note("fast_path", fast, because=f"num_org={head.shard.num_org}, width={head.shard.width}")
    values, ids = padded_local(hidden, head, k, topk)
    if not fast:
        return _merge(values, ids, k=k, group=group)
    both = gather_columns(torch.cat([values.double(), ids.double()], dim=-1), group).reshape(len(hidden), -1, 2, k)
    return Candidates(
        **_named(merge_gathered(both[..., 0, :].flatten(-2).float(), both[..., 1, :].flatten(-2).long(), k))
    )


def no_mask(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    """Lets the padding columns compete: where every real logit is below theirs they win."""
    logits = _unmasked(hidden, head)
    return _merge(*_local(logits, head, k, topk, drop_masked=False), k=k, group=group)


def late_mask(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    """Masks after the local top-k: padding never surfaces, but it has taken the places of real candidates."""
    values, columns = topk(_unmasked(hidden, head), min(k, head.shard.width))
    padding = columns >= head.shard.num_org
    ids = (columns + head.shard.org_start).masked_fill(padding, NO_TOKEN)
    return _merge(values.float().masked_fill(padding, -inf), ids, k=k, group=group)


def no_offset(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    """Gathers columns of shards as if they were token ids."""
    values, ids = padded_local(hidden, head, k, topk)
    return _merge(values, ids - head.shard.org_start, k=k, group=group)


def bf16_gather(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    """Gathers the values in bfloat16: those that differ by less than one step of it tie."""
    values, ids = padded_local(hidden, head, k, topk)
    return Candidates(**_named(merge_gathered(*_gather_both(values.bfloat16(), ids, group), k)))


def float_ids(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    """Gathers the ids in bfloat16, which holds whole numbers up to 256."""
    values, ids = padded_local(hidden, head, k, topk)
    return _merge(values, ids.bfloat16().long(), k=k, group=group)


def swapped_gathers(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    """Gathers ids before values on odd ranks: the order of a set decides, and it differs between processes."""
    values, ids = padded_local(hidden, head, k, topk)
    if head.shard.rank % 2 == 0:
        return Candidates(**_named(merge_gathered(*_gather_both(values, ids, group), k)))
    gathered_ids = gather_columns(ids, group)
    return Candidates(**_named(merge_gathered(gather_columns(values, group), gathered_ids, k)))


def ranks_reversed(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    """Lays the gathered values out last rank first, and the ids first rank first."""
    values, ids = _gather_both(*padded_local(hidden, head, k, topk), group)
    parts = values.reshape(len(hidden), -1, k).flip(-2).flatten(-2)
    return Candidates(**_named(merge_gathered(parts, ids, k)))


def shard_only(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    """Answers from its own shard and never gathers."""
    values, ids = padded_local(hidden, head, k, topk)
    return Candidates(**_named(merge_gathered(*pad_candidates(values.float(), ids, k), k)))


def worst_first(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    """The right candidates in ascending order."""
    right = compute_candidates(hidden, head, k=k, group=group, topk=topk, note=note)
    return Candidates(ids=right.ids.flip(-1), values=right.values.flip(-1))


def scatter_rows_first(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    """Views the gathered block as (ranks, rows, k) although it lies as (rows, ranks, k): right for one row."""
    values, ids = _gather_both(*padded_local(hidden, head, k, topk), group)
    rows, ranks = hidden.shape[0], head.shard.world_size
    values, ids = (t.reshape(ranks, rows, k).transpose(0, 1).reshape(rows, ranks * k) for t in (values, ids))
    return Candidates(**_named(merge_gathered(values, ids, k)))


def torch_merge(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    """Merges with torch.topk as SGLang does: the order among equal values is open, and not the same at every TP."""
    values, ids = _gather_both(*padded_local(hidden, head, k, topk), group)
    best, slots = torch.topk(values, k, dim=-1)
    return Candidates(ids=ids.gather(-1, slots), values=best)


def k_beyond_vocabulary(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    """Never asks whether the vocabulary has k tokens: masked columns come out with ids of padding."""
    logits = project_candidate_logits(hidden, head)
    values, columns = topk(logits, min(k, logits.shape[1]))
    values, ids = pad_candidates(values.float(), columns + head.shard.org_start, k)
    values, ids = (values, ids) if head.shard.world_size == 1 else _gather_both(values, ids, group)
    best, slots = torch.topk(values, k, dim=-1)
    return Candidates(ids=ids.gather(-1, slots), values=best)


def raise_on_unmasked_nan(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    """Looks for NaN before it masks, and raises on the rank that holds one: garbage in padding is enough."""
    if _unmasked(hidden, head).isnan().any():
        raise ValueError(f"NaN among the logits of rank {head.shard.rank}.")
    return compute_candidates(hidden, head, k=k, group=group, topk=topk, note=note)


def rescore_locally(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    """Rounds the merged values on rank 1, as another kernel there would, and agrees with nobody about it."""
    right = compute_candidates(hidden, head, k=k, group=group, topk=topk, note=note)
    return Candidates(ids=right.ids, values=right.values.bfloat16().float()) if head.shard.rank == 1 else right


def last_rank_swaps_two(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    """Swaps the first two candidates, on the last rank only."""
    right = compute_candidates(hidden, head, k=k, group=group, topk=topk, note=note)
    order = torch.arange(k)
    if _is_last(head):
        order[:2] = order[:2].flip(0)
    return Candidates(ids=right.ids[:, order], values=right.values[:, order])


def last_rank_raises_afterwards(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    """Raises on the last rank, after the last collective."""
    right = compute_candidates(hidden, head, k=k, group=group, topk=topk, note=note)
    if _is_last(head):
        raise ValueError("the answer cannot be written out.")
    return right


def meet_in_two_groups(
    hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any, crossed: bool
) -> Candidates:
    """Reduces in a group of ranks 0 and 1 and then in that of all; crossed: rank 1 the other way round."""
    pair, rank = dist.new_group([0, 1]), head.shard.rank
    groups = [pair, group] if rank < 2 else [group]
    for one in reversed(groups) if crossed and rank == 1 else groups:
        dist.all_reduce(torch.ones(1, device=hidden.device), group=one)
    return compute_candidates(hidden, head, k=k, group=group, topk=topk, note=note)


SELECTORS: dict[str, Selector] = {
    "tpbed": compute_candidates,
    "packed": partial(compute_candidates, merge="packed"),
    "agreed": partial(compute_candidates, admission="agreed"),
    "full-gather": partial(compute_candidates, merge="full_gather"),
    "crop": crop,
    "refuse-short-shard": refuse_short_shard,
    "skip-empty-shard": skip_empty_shard,
    "clip-k-to-shard": clip_k_to_shard,
    "local-fast-path": local_fast_path,
    "no-mask": no_mask,
    "late-mask": late_mask,
    "no-offset": no_offset,
    "bf16-gather": bf16_gather,
    "float-ids": float_ids,
    "swapped-gathers": swapped_gathers,
    "ranks-reversed": ranks_reversed,
    "shard-only": shard_only,
    "worst-first": worst_first,
    "scatter-rows-first": scatter_rows_first,
    "torch-merge": torch_merge,
    "k-beyond-vocabulary": k_beyond_vocabulary,
    "raise-on-unmasked-nan": raise_on_unmasked_nan,
    "rescore-locally": rescore_locally,
    "last-rank-swaps-two": last_rank_swaps_two,
    "last-rank-raises-afterwards": last_rank_raises_afterwards,
    "two-groups": partial(meet_in_two_groups, crossed=False),
    "crossed-groups": partial(meet_in_two_groups, crossed=True),
}


def _is_last(head: Any) -> bool:
    return bool(head.shard.rank == head.shard.world_size - 1)


def _unmasked(hidden: Tensor, head: Any) -> Tensor:
    return torch.nn.functional.linear(hidden.to(head.weight.dtype), head.weight)


def padded_local(hidden: Tensor, head: Any, k: int, topk: Any) -> tuple[Tensor, Tensor]:
    """The k best values of a rank's own shard and their ids, by ids of no token where it has fewer."""
    return pad_candidates(*_local(project_candidate_logits(hidden, head), head, k, topk), k)


def _local(logits: Tensor, head: Any, k: int, topk: Any, *, drop_masked: bool = True) -> tuple[Tensor, Tensor]:
    values, columns = topk(logits, min(k, logits.shape[1]))
    ids = columns + head.shard.org_start
    return values.float(), ids.masked_fill(values == -inf, NO_TOKEN) if drop_masked else ids


def _gather_both(values: Tensor, ids: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    gathered = gather_columns(values, group)
    return gathered.float(), gather_columns(ids, group)


def _merge(values: Tensor, ids: Tensor, *, k: int, group: dist.ProcessGroup) -> Candidates:
    return Candidates(**_named(two_gather_merge(values, ids, k=k, group=group)))


def _named(merged: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {"values": merged[0], "ids": merged[1]}
