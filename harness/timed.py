"""TIMED: selectors whose course depends on which rank comes when; each that is wrong has one beside it that is right.

Which of their schedules go wrong, and that no schedule of the right ones does, is found by `tpbed explore`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbed.harness.mutant_programs import ShardOnly
from tpbed.harness.staged import Selector, padded_local
from tpbed.selector.candidates import Candidates
from tpbed.selector.merge import merge_gathered
from tpbed.selector.select import compute_candidates

_ASKED = "the first all_reduce was{} complete when it was asked for"


def drop_late_peers(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    """Asks once whether all peers have come, and answers from its own shard if not."""
    here = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    return _merge_if(here.is_completed(), hidden, head, k=k, group=group, topk=topk, note=note)


def await_late_peers(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    """Waits for its peers before it asks."""
    here = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    here.wait()
    return _merge_if(here.is_completed(), hidden, head, k=k, group=group, topk=topk, note=note)


def _merge_if(in_time: bool, hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    note("peers_in_time", in_time, because=_ASKED.format("" if in_time else " not"))
    selector = compute_candidates if in_time else ShardOnly()
    return selector(hidden, head, k=k, group=group, topk=topk, note=note)


def capture_when_warm(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    """Enters a capture, which all ranks begin together, where its own warm-up is complete; else it runs eagerly."""
    warm = dist.all_reduce(torch.ones(1), group=group, async_op=True).is_completed()
    return _capture_if(
        warm, _ASKED.format("" if warm else " not"), hidden, head, k=k, group=group, topk=topk, note=note
    )


def capture_when_all_warm(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    """Enters it where the warm-up is complete on all ranks, which agree on that."""
    warm = dist.all_reduce(torch.ones(1), group=group, async_op=True).is_completed()
    agreed = torch.tensor(int(warm))
    dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)
    return _capture_if(bool(agreed), "all agreed", hidden, head, k=k, group=group, topk=topk, note=note)


def _capture_if(
    warm: bool, because: str, hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any
) -> Candidates:
    note("capture", warm, because=because)
    if warm:
        dist.barrier(group)
    return compute_candidates(hidden, head, k=k, group=group, topk=topk, note=note)


def take_as_they_come(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    """Rank 0 takes the n-th message that comes for the one of rank n."""
    return _merge_on_first(hidden, head, k, group, topk, place=lambda number, source: number)


def take_by_sender(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
    """Rank 0 asks each message who sent it."""
    return _merge_on_first(hidden, head, k, group, topk, place=lambda number, source: source)


def _merge_on_first(hidden: Tensor, head: Any, k: int, group: Any, topk: Any, *, place: Any) -> Candidates:
    """Send the columns of the best to rank 0, which makes ids of them, merges, and hands the answer out."""
    values, ids = padded_local(hidden, head, k, topk)
    mine = torch.stack([values.double(), (ids - head.shard.org_start).double()])
    answer = torch.empty_like(mine)
    if head.shard.rank:
        dist.send(mine, 0, group)
    else:
        answer = torch.stack([part.double() for part in _merged(_received(mine, head, group, place), head, k)])
    dist.broadcast(answer, 0, group)
    return Candidates(values=answer[0].float(), ids=answer[1].long())


def _received(mine: Tensor, head: Any, group: Any, place: Any) -> list[Tensor]:
    parts = [mine] * head.shard.world_size
    for number in range(1, head.shard.world_size):
        part = torch.empty_like(mine)
        parts[place(number, dist.recv(part, group=group))] = part
    return parts


def _merged(parts: list[Tensor], head: Any, k: int) -> tuple[Tensor, Tensor]:
    values = torch.cat([part[0].float() for part in parts], dim=-1)
    ids = torch.cat([part[1].long() + rank * head.shard.width for rank, part in enumerate(parts)], dim=-1)
    return merge_gathered(values, ids, k)


TIMED: dict[str, Selector] = {
    "drop-late-peers": drop_late_peers,
    "await-late-peers": await_late_peers,
    "capture-when-warm": capture_when_warm,
    "capture-when-all-warm": capture_when_all_warm,
    "take-as-they-come": take_as_they_come,
    "take-by-sender": take_by_sender,
}
