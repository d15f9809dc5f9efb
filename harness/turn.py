"""Turn: one step of a serving program on one rank - what it is handed, what it finds out for itself, what it kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbed.harness.staged import Selector
from tpbed.selector.candidates import Candidates
from tpbed.selector.select import compute_candidates
from tpbed.selector.shard import NO_TOKEN
from tpbed.tp.rank import current

BATCH = "batch"  # the mark that says how many of a step's rows a serving program had, where it decides that itself
FactOf = Callable[[str, Any], Any]  # a fact's name and what it is usually, to what this rank finds


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a serving program sees in one step.

    hidden: (rows, hidden units), all rows that the step can have. step: counts from 0.
    fact: what this rank finds out for itself - its clock, its free memory, its tuning -, which the fault Fact changes.
    kept: what the program of this rank has kept since its first step.
    """

    hidden: Tensor
    head: Any
    k: int
    group: Any
    topk: Any
    note: Any
    fact: FactOf
    kept: dict[str, Any]
    step: int

    @property
    def rank(self) -> int:
        """Of this rank in the group."""
        rank: int = self.head.shard.rank
        return rank

    @property
    def rows(self) -> int:
        """That the step can have."""
        return len(self.hidden)

    def select(self, rows: int | None = None, **policies: Any) -> Candidates:
        """The candidates of the first `rows`, which is what they are then judged as; None for all."""
        if rows is not None:
            current().recorder.mark(BATCH, rows)
        return compute_candidates(
            self.hidden[:rows], self.head, k=self.k, group=self.group, topk=self.topk, note=self.note, **policies
        )

    def nothing(self) -> Candidates:
        """The answer of a rank that computes none."""
        shape, device = (self.rows, self.k), self.hidden.device
        return Candidates(ids=torch.full(shape, NO_TOKEN, device=device), values=torch.full(shape, -inf, device=device))

    def follow(self, value: int) -> int:
        """What rank 0 says: a broadcast."""
        said = self.number(value)
        dist.broadcast(said, 0, group=self.group)
        return int(said)

    def lowest(self, value: int) -> int:
        """The lowest that any rank says: a vote."""
        said = self.number(value)
        dist.all_reduce(said, dist.ReduceOp.MIN, group=self.group)
        return int(said)

    def number(self, value: float) -> Tensor:
        """One number where the group's transport wants it."""
        return torch.tensor([value], device=self.hidden.device)


Server = Callable[[Turn], Candidates]


@dataclass(frozen=True, slots=True)
class Serving:
    """A serving program by its function; `on` makes the selector of one rank in one run of it."""

    server: Server

    def on(self, fact: FactOf) -> Selector:
        """A selector that counts its steps, keeps what it keeps, and finds out facts through `fact`."""
        kept: dict[str, Any] = {}
        steps = itertools.count()

        def selector(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Candidates:
            given = {"hidden": hidden, "head": head, "k": k, "group": group, "topk": topk, "note": note}
            return self.server(Turn(**given, fact=fact, kept=kept, step=next(steps)))

        return selector
