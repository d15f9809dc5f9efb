"""Staged: the selector as serving engines write it, one method a stage, so that a mutant can change one of them."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbed.selector.admission import admit
from tpbed.selector.candidates import Candidates, choose_local
from tpbed.selector.merge import gather_columns, pad_candidates
from tpbed.selector.project import project_candidate_logits
from tpbed.selector.select import Note, check_request
from tpbed.selector.shard import NO_TOKEN, VocabShard
from tpbed.selector.topk import TopK, empty_topk

Selector = Callable[..., Candidates]


class Staged:
    """A selector that is right; there is one for each rank and run, so a mutant may keep what a step left behind.

    Pairs are values (rows, n) and ids (rows, n), as the stage before leaves them.
    """

    head: Any
    k: int
    group: dist.ProcessGroup | None
    topk: TopK
    note: Note

    def __init__(self) -> None:
        self.step = -1

    def __call__(self, hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
        """As compute_candidates."""
        self.head, self.k, self.group, self.topk, self.note = head, k, group, topk, note
        self.step += 1
        self.check(hidden)
        return self.run(hidden)

    def check(self, hidden: Tensor) -> None:
        """Refuse what cannot be served."""
        check_request(hidden, self.head, k=self.k, group=self.group)

    def run(self, hidden: Tensor) -> Candidates:
        """All stages of a step."""
        values, ids = self.finish(*self.gather(*self.prepare(hidden)))
        return Candidates(values=values, ids=ids)

    def prepare(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What this rank brings to the gathers: (rows, k) each."""
        values, columns = self.choose(self.mask(self.project(hidden)))
        return pad_candidates(values.float(), self.name_tokens(columns), self.k)

    def project(self, hidden: Tensor) -> Tensor:
        """Logits of all rows that the shard holds, padding among them: (rows, width)."""
        head = self.head
        if admit(head)[0] == "quantized":
            logits: Tensor = head.quant_method.apply(head, hidden)
        else:
            logits = torch.nn.functional.linear(hidden.to(head.weight.dtype), head.weight)
        return logits.to(head.logits_dtype).contiguous()

    def mask(self, logits: Tensor) -> Tensor:
        """Take the columns that are no tokens out of the race."""
        logits[:, self.shard.num_org :] = -inf
        return logits

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The best values of the shard and their columns."""
        local_k = min(self.k, logits.shape[1])
        nothing = local_k == 0 or not len(logits)
        return empty_topk(logits, local_k) if nothing else self.topk(logits, local_k)

    def name_tokens(self, columns: Tensor) -> Tensor:
        """Columns to token ids."""
        return columns.long() + self.shard.org_start

    def gather(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """What all ranks bring, side by side: (rows, world_size * k)."""
        if self.shard.world_size == 1:
            return values, ids
        return self.gather_one(values), self.gather_one(ids)

    def gather_one(self, local: Tensor) -> Tensor:
        """One of the two."""
        return gather_columns(local, self.group)

    def finish(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The k best of what was gathered."""
        ids = self.blank(values, ids)
        by_id = self.order_of_ids(ids)
        values, ids = values.gather(-1, by_id), ids.gather(-1, by_id)
        best = self.keys(values).sort(dim=-1, descending=True, stable=True).indices[:, : self.k]
        invalid = values.isnan().any(dim=-1, keepdim=True)
        return self.screen(values.gather(-1, best) + 0.0, ids.gather(-1, best), invalid)

    def blank(self, values: Tensor, ids: Tensor) -> Tensor:
        """The ids, none where a slot is empty."""
        return ids.masked_fill(values == -inf, NO_TOKEN)

    def order_of_ids(self, ids: Tensor) -> Tensor:
        """The slots in the order in which equal values are to come."""
        return ids.sort(dim=-1, stable=True).indices

    def keys(self, values: Tensor) -> Tensor:
        """What values are compared by."""
        return values + 0.0  # -0 + 0 is +0

    def screen(self, values: Tensor, ids: Tensor, invalid: Tensor) -> tuple[Tensor, Tensor]:
        """Mark rows that held NaN."""
        return values.masked_fill(invalid, nan), ids.masked_fill(invalid, NO_TOKEN)

    @property
    def shard(self) -> VocabShard:
        """Which columns this rank holds."""
        shard: VocabShard = self.head.shard
        return shard

    @property
    def rank(self) -> int:
        """This rank in the group, which need not be the place of its shard in the vocabulary."""
        return dist.get_rank(self.group)

    @property
    def is_last(self) -> bool:
        """Whether this is the last rank of several."""
        return 0 < self.rank == self.shard.world_size - 1


class TrustsTopK(Staged):
    """At TP=1 hands out what the top-k gave, in its order, as SGLang does: right where that is sorted and canonical."""

    def finish(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """As it comes, if there is nothing to merge."""
        if self.shard.world_size > 1:
            return super().finish(values, ids)
        return self.screen(values + 0.0, self.blank(values, ids), values.isnan().any(dim=-1, keepdim=True))


class Broadcast(Staged):
    """Merges on rank 0, and hands the answer out from there."""

    def run(self, hidden: Tensor) -> Candidates:
        """All stages of a step."""
        found = super().run(hidden)
        if self.shard.world_size == 1:
            return found
        return Candidates(values=self.hand_out(found.values), ids=self.hand_out(found.ids))

    def gather_one(self, local: Tensor) -> Tensor:
        """To rank 0 alone; the others keep their own."""
        parts = [torch.empty_like(local) for _ in range(self.shard.world_size)] if self.rank == 0 else None
        dist.gather(local, parts, group=self.group)
        return local if parts is None else torch.cat(parts, dim=-1)

    def hand_out(self, part: Tensor) -> Tensor:
        """One of the two, from who has it to all."""
        part = part.contiguous()
        dist.broadcast(part, self.root(), group=self.group)
        return part

    def root(self) -> int:
        """Who has it."""
        return 0


def padded_local(hidden: Tensor, head: Any, k: int, topk: TopK) -> tuple[Tensor, Tensor]:
    """The k best values of a rank's own shard and their ids, by ids of no token where it has fewer."""
    logits = project_candidate_logits(hidden, head)
    values, ids = choose_local(logits, head.shard, k=k, topk=topk, merge="two_gather")
    return pad_candidates(values.float(), ids.masked_fill(values == -inf, NO_TOKEN), k)
