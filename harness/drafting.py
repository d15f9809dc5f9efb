"""Drafts: what drafting from a head's candidates is worth - the tokens that change, and those that are accepted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tpbed.selector.walk import DraftParams, Noise, NoiseRule, draft_distribution, walk

SLOTS = 7  # of a draft block, as DFlash2 proposes them beside the token that stands
DRAWS = 16  # of each row, in which both sides get the same noise
SEED = 35496


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Drafts of one head against the reference; a row is a slot, and a block seven rows of a passage in sequence.

    changed_*: share of slots where another token is drafted: the best, or one drawn at temperature 1 with the noise
    that the reference's draw had. path_length: slots in a block, from its first on, whose best token is the
    reference's; oracle_length: whose 16 hold it. Teacher-forced: each slot has the true tokens before it.
    """

    source: str
    head: str
    blocks: int
    changed_greedy: float
    changed_gumbel: float
    changed_inverse_cdf: float
    path_length: float | None  # None where no passage has seven rows
    oracle_length: float | None


def draft(
    found: tuple[Tensor, Tensor], true: tuple[Tensor, Tensor], passages: Sequence[int], *, source: str, head: str
) -> Drafts:
    """Compare candidates with the reference's, each ids (rows, K) int64 and values (rows, K), best first.

    passages: rows of each, in the order of the rows; no block goes beyond the end of one.
    """
    ids, best = found[0], true[0][:, :1]
    hits, held = (ids[:, :1] == best).squeeze(1), (ids == best).any(dim=1)
    return Drafts(
        source=source,
        head=head,
        blocks=len(_blocks(hits, passages)),
        changed_greedy=float((~hits).double().mean()),
        changed_gumbel=_changed(found, true, "gumbel"),
        changed_inverse_cdf=_changed(found, true, "inverse_cdf"),
        path_length=accepted_length(hits, passages),
        oracle_length=accepted_length(held, passages),
    )


def accepted_length(hits: Tensor, passages: Sequence[int]) -> float | None:
    """Slots of a block before its first miss, the mean over blocks; None without a block. hits: (rows,) bool."""
    blocks = _blocks(hits, passages)
    return float(blocks.int().cumprod(dim=1).sum(dim=1).double().mean()) if len(blocks) else None


def _blocks(hits: Tensor, passages: Sequence[int]) -> Tensor:
    """(blocks, 7): one that begins at each row which has six more of its passage after it."""
    parts = [part.unfold(0, SLOTS, 1) for part in torch.split(hits, list(passages)) if len(part) >= SLOTS]
    return torch.cat(parts) if parts else hits.new_empty(0, SLOTS)


def _changed(found: tuple[Tensor, Tensor], true: tuple[Tensor, Tensor], rule: NoiseRule) -> float:
    pairs = zip(_drawn(*found, rule), _drawn(*true, rule), strict=True)
    return float(torch.stack([(one != other).double().mean() for one, other in pairs]).mean())


def _drawn(ids: Tensor, values: Tensor, rule: NoiseRule) -> Iterator[Tensor]:
    """(rows,) tokens of each draw: rows are requests of one slot."""
    rows, k = ids.shape
    params = DraftParams.alike(rows, temperature=1.0)
    q = draft_distribution(values.float().view(rows, 1, 1, k).expand(-1, -1, k, -1), params)
    for draw in range(DRAWS):
        yield walk(ids.unsqueeze(1), q, params, _noise(rule, rows, draw)).tokens.squeeze(1)


def _noise(rule: NoiseRule, rows: int, draw: int) -> Noise:
    if rule == "inverse_cdf":
        uniforms = torch.rand(rows, 1, generator=torch.Generator().manual_seed(SEED + draw))
        return Noise(rule=rule, uniforms=uniforms)
    return Noise(rule=rule, seeds=torch.full((rows,), SEED + draw), positions=torch.arange(rows))
