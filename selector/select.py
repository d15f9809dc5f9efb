"""compute_candidates: project, local top-k, offset, gather, merge."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from tpbed.selector.admission import Path, admit
from tpbed.selector.candidates import Candidates, Merge, check_merge, choose_local, merge_candidates, takes_keys
from tpbed.selector.errors import SelectionError
from tpbed.selector.head import DENSE_DTYPES, LmHead
from tpbed.selector.project import project_candidate_logits
from tpbed.selector.shard import VocabShard, is_whole
from tpbed.selector.topk import TopK, default_topk
from tpbed.selector.vote import agree_admission

Policy = Literal["rank_local", "agreed"]
"""Who decides how a head is projected. rank_local: each rank for itself, as SGLang does; if their heads differ, one may
raise alone and leave its peers waiting, or the answer mixes their heads. agreed: all ranks by a vote before anything
else, which costs one all_gather, and with heads that are alike in all that `head_facts` lists.
"""


class Note(Protocol):
    """Where a rank writes down a choice that it took on its own: its name, its outcome and the reason."""

    def __call__(self, name: str, value: object, because: str) -> None: ...


def compute_candidates(
    hidden: Tensor,
    head: LmHead,
    *,
    k: int,
    group: dist.ProcessGroup | None,
    topk: TopK | None = None,
    note: Note | None = None,
    merge: Merge = "two_gather",
    admission: Policy = "rank_local",
) -> Candidates:
    """Choose the k best tokens of the whole vocabulary for each row; every rank calls this and gets the same answer.

    hidden: (rows, hidden units) float16, bfloat16 or float32, the same on every rank; no row at all is a step too.
    k: tokens per row, 1 to org_vocab_size; may exceed what a shard holds.
    group: the ranks that share the vocabulary, None for the default group; not looked at if world_size is 1.
    topk: local kernel, default_topk of the device if None; without canonical_topk, which of the tokens that tie with
    the k-th value of a shard survive there is the kernel's choice.
    note: told "admission" and "topk" before the first collective: choices that all ranks must make alike.
    merge: as Merge says; full_gather takes no top-k, it sorts keys. admission: as Policy says.
    Cost: the head's product, one local top-k, and per row and rank two all_gathers of k * 12 bytes together, one of
    k * 8 (packed), or one of the shard's logits (full_gather).
    Raises SelectionError before any gather: on every rank alike with admission="agreed", and with "rank_local" as far
    as their heads are alike.
    """
    note = note or _ignore
    path, because = check_request(hidden, head, k=k, group=group, admission=admission, merge=merge)
    note("admission", path, because=because)
    kernel = _chosen_topk(topk, hidden.device, note)
    logits = project_candidate_logits(hidden, head, path=path, mask=not takes_keys(kernel, merge))
    local = choose_local(logits, head.shard, k=k, topk=kernel, merge=merge)
    return merge_candidates(local, head.shard, k=k, group=group, merge=merge, topk=kernel)


def check_shard(head: LmHead) -> VocabShard:
    """The head's shard. Raises SelectionError where it has none."""
    shard = getattr(head, "shard", None)
    if not isinstance(shard, VocabShard):
        raise SelectionError(
            f"{type(head).__name__} has no shard, so its rows have no token ids: give it a VocabShard."
        )
    return shard


def check_request(
    hidden: Tensor,
    head: LmHead,
    *,
    k: int,
    group: dist.ProcessGroup | None,
    admission: Policy = "rank_local",
    merge: Merge = "two_gather",
) -> tuple[Path, str]:
    """Raise SelectionError for a request that cannot be served, from sizes and types that every rank sees alike.

    Returns the path that the head takes and the reason, as `admit` or `agree_admission` does.
    """
    if admission not in get_args(Policy):
        raise SelectionError(f"admission={admission!r} is none of {', '.join(get_args(Policy))}: use one of these.")
    if not isinstance(hidden, Tensor):
        raise SelectionError(f"hidden is {type(hidden).__name__}: give a tensor (rows, hidden units).")
    shard = check_shard(head)
    if admission == "agreed" and shard.world_size > 1:  # before all that depends on this rank's own head
        path, because = agree_admission(head, group=group, device=hidden.device)
        check_choice(shard, k=k, group=group, merge=merge)
    else:
        check_choice(shard, k=k, group=group, merge=merge)
        path, because = admit(head)
    check_hidden(hidden, getattr(head, "hidden_size", head.weight.shape[-1] if path == "dense" else None))
    return path, because


def check_choice(shard: VocabShard, *, k: int, group: dist.ProcessGroup | None, merge: Merge) -> None:
    """Raise SelectionError, on every rank alike, unless k tokens can be chosen from shard's vocabulary by merge."""
    check_merge(merge, shard)
    _check_k(k, shard)
    _check_group(shard, group)


def _check_k(k: int, shard: VocabShard) -> None:
    if not is_whole(k) or not 1 <= k <= shard.org_vocab_size:
        raise SelectionError(
            f"k={k!r} tokens per row cannot be chosen from org_vocab_size={shard.org_vocab_size}: "
            f"use k from 1 to {shard.org_vocab_size}."
        )


def check_hidden(hidden: Tensor, units: int | None) -> None:
    """Raise SelectionError unless hidden is (rows, hidden units), of so many if not None, in a dtype heads can read."""
    if hidden.ndim != 2 or hidden.dtype not in DENSE_DTYPES:
        raise SelectionError(
            f"hidden is {hidden.dtype} with shape {tuple(hidden.shape)}, but one row per token is needed: "
            f"give (rows, hidden units) in float16, bfloat16 or float32."
        )
    if units is not None and hidden.shape[1] != units:
        raise SelectionError(
            f"hidden has {hidden.shape[1]} units per row, but the head multiplies {units}: "
            f"give hidden states of the model that the head belongs to."
        )


def _check_group(shard: VocabShard, group: dist.ProcessGroup | None) -> None:
    if shard.world_size == 1:
        return
    if group is None and not dist.is_initialized():
        raise SelectionError(
            f"the vocabulary is shared by world_size={shard.world_size} ranks, but torch.distributed has no default "
            f"group: call init_process_group first, or give a group."
        )
    if (size := dist.get_world_size(group)) != shard.world_size:
        raise SelectionError(
            f"the vocabulary is shared by world_size={shard.world_size} ranks, but the group has {size}: "
            f"give the group that the head was sharded over."
        )


def _chosen_topk(topk: TopK | None, device: torch.device, note: Note) -> TopK:
    chosen = default_topk(device) if topk is None else topk
    because = f"default for {device.type}" if topk is None else "given by the caller"
    note("topk", getattr(chosen, "__name__", type(chosen).__name__), because=because)
    return chosen


def _ignore(name: str, value: object, because: str) -> None:
    """Take note of nothing."""
