"""Lattice: how well each candidate of a slot follows each candidate of the slot before."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from tpbed.selector.errors import SelectionError
from tpbed.selector.shard import NO_TOKEN
from tpbed.selector.tensors import check_tensor, check_values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransitionTables:
    """What a drafter has learned of which token follows which; whole on every rank, since any id may be needed.

    projection: (r, hidden units). predecessor, successor: (tokens, r), row i for token i. All of one floating dtype.
    Raises SelectionError where they do not fit each other.
    """

    projection: Tensor
    predecessor: Tensor
    successor: Tensor

    def __post_init__(self) -> None:
        shapes = [tuple(t.shape) for t in (self.projection, self.predecessor, self.successor)]
        fits = [len(shape) for shape in shapes] == [2, 2, 2] and shapes[1] == shapes[2]
        if not fits or shapes[0][0] != shapes[1][1]:
            raise SelectionError(
                f"projection {shapes[0]}, predecessor {shapes[1]} and successor {shapes[2]} are not (r, hidden units), "
                f"(tokens, r) and (tokens, r): give tables of one r and one vocabulary."
            )


def lattice_scores(ids: Tensor, unary: Tensor, hidden: Tensor, anchor: Tensor, tables: TransitionTables) -> Tensor:
    """Score of every step from candidate i of the slot before to candidate j: (requests, slots, K, K) float32.

        score[b, e, i, j] = unary[b, e, j] + sum over r of A[before(b, e, i)] * p[b, e] * S[ids[b, e, j]]

    with p = hidden @ projection.T, A the predecessor and S the successor table; before slot 0 stands the anchor, alike
    for every i. The sum is made in the tables' dtype, and added to unary in float32.
    ids: (requests, slots, K) int64, unary: the same shape, float32; a slot's NO_TOKEN scores -inf, whatever comes
    before it. hidden: (requests, slots, hidden units). anchor: (requests,) int64, the last token that stands.
    Raises SelectionError for an anchor that check_anchor refuses.
    Cost: no collective; 2 * K rows of r gathered a slot, one product of K x r x K.
    Source: DFlash2's candidate selector in SGLang (pull request 35496).
    """
    check_anchor(anchor, len(ids), tables)
    before = torch.cat([anchor.view(-1, 1, 1).expand(-1, 1, ids.shape[2]), ids[:, :-1]], dim=1)
    projected = hidden.to(tables.projection.dtype) @ tables.projection.T
    leaving = tables.predecessor[before.clamp_min(0)] * projected.unsqueeze(2)
    arriving = tables.successor[ids.clamp_min(0)]
    scores = unary.float().unsqueeze(2) + (leaving @ arriving.transpose(-1, -2)).float()
    return scores.masked_fill((ids == NO_TOKEN).unsqueeze(2), -inf)


def check_anchor(anchor: Tensor, requests: int, tables: TransitionTables) -> None:
    """Raise SelectionError unless anchor is (requests,) int64 and, on the CPU, each has a row in the tables."""
    check_tensor("anchor", anchor, (requests,), torch.int64, each="(requests,), the token before each request's slots")
    tokens = len(tables.predecessor)
    known = f"token ids from 0 to {tokens - 1}"
    check_values("anchor", anchor, lambda given: (given >= 0) & (given < tokens), known)
