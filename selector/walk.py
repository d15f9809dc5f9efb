"""Walk: one path through the lattice for each request, greedy or sampled, and what it was drawn from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tpbed.selector.errors import SelectionError
from tpbed.selector.noise import keyed_gumbels
from tpbed.selector.shard import NO_TOKEN

NoiseRule = Literal["inverse_cdf", "gumbel"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftParams:
    """How each request draws: all (requests,) tensors. temperature 0 or top_k 1 is greedy: the first best candidate.

    temperature float32, 0 or more. top_k int64: candidates kept, 0 for all. top_p float32, in (0, 1].
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor

    @classmethod
    def alike(
        cls, requests: int, *, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, device: str = "cpu"
    ) -> DraftParams:
        """The same for all requests. Raises SelectionError for a value that is out of range."""
        if temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
            raise SelectionError(
                f"temperature={temperature}, top_k={top_k}, top_p={top_p}: give 0 or more, 0 or more, and (0, 1]."
            )
        return cls(
            temperature=torch.full((requests,), temperature, device=device),
            top_k=torch.full((requests,), top_k, dtype=torch.int64, device=device),
            top_p=torch.full((requests,), top_p, device=device),
        )

    @property
    def greedy(self) -> Tensor:
        """(requests,) bool."""
        return (self.temperature <= 0) | (self.top_k == 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Noise:
    """What a draft is drawn with. uniforms: (requests, slots) float32 in [0, 1), for the inverse CDF.

    seeds, positions: (requests,) int64, the position of slot 0, for Gumbel noise keyed by seed, position and token id.
    """

    rule: NoiseRule
    uniforms: Tensor | None = None
    seeds: Tensor | None = None
    positions: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draft:
    """tokens: (requests, slots) int64. q_rows: (requests, slots, K) float32, the distribution each was drawn from."""

    tokens: Tensor
    q_rows: Tensor


def draft_distribution(scores: Tensor, params: DraftParams) -> Tensor:
    """q for every row of a lattice: (requests, slots, K, K) float32, each row summing to 1.

    scores: as lattice_scores gives them. Greedy: all at the first best. Sampled: softmax(score / temperature), then
    the top_k best, then the least number of the best whose probabilities reach top_p, renormalized after each; of
    equals the earlier candidate is kept first. A row without a finite score has all at candidate 0.
    Source: SGLang's draft sampling; top-p after top-k, as there.
    """
    shape = (-1, *(1,) * (scores.ndim - 1))
    temperature = params.temperature.view(shape).clamp_min(1e-5)
    scores = torch.where(scores.isneginf().all(-1, keepdim=True), _first_only(scores), scores)
    q = torch.softmax(scores / temperature, dim=-1)
    q = _keep_best(q, params.top_k.view(shape), params.top_p.view(shape))
    return torch.where(params.greedy.view(shape), _one_hot(scores.argmax(-1), q), q)


def _first_only(scores: Tensor) -> Tensor:
    first = torch.full_like(scores, float("-inf"))
    first[..., 0] = 0.0
    return first


def _keep_best(q: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    best, order = torch.sort(q, dim=-1, descending=True, stable=True)
    place = torch.arange(q.shape[-1], device=q.device).expand_as(q)
    best = best.masked_fill((top_k > 0) & (place >= top_k), 0.0)
    best = best / best.sum(-1, keepdim=True)
    reached = best.cumsum(-1) - best  # by those before it
    best = best.masked_fill((reached >= top_p) & (place > 0), 0.0)
    best = best / best.sum(-1, keepdim=True)
    return torch.zeros_like(q).scatter(-1, order, best)


def _one_hot(index: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).scatter(-1, index.unsqueeze(-1), 1.0)


def walk(ids: Tensor, q: Tensor, params: DraftParams, noise: Noise) -> Draft:
    """Follow each request from slot to slot: the candidate that was chosen says which row of q comes next.

    ids: (requests, slots, K) int64. q: (requests, slots, K, K), as draft_distribution gives it; row 0 of slot 0.
    Inverse CDF: the first candidate at which the running sum of q exceeds the uniform, and the last with any
    probability where rounding leaves none: it depends on the order of the candidates. Gumbel: the largest log q plus
    noise, which does not, as the noise belongs to the token.
    Greedy requests take no noise. Cost: no collective; one gather and one choice a slot.
    Source: SGLang's walk (inverse CDF); vLLM keys noise by token.
    """
    requests, slots, _ = ids.shape
    here = torch.zeros(requests, dtype=torch.int64, device=ids.device)
    every = torch.arange(requests, device=ids.device)
    tokens, q_rows = [], []
    for slot in range(slots):
        row = q[every, slot, here]
        here = torch.where(params.greedy, row.argmax(-1), _drawn(row, ids[:, slot], slot, noise))
        q_rows.append(row)
        tokens.append(ids[every, slot, here])
    return Draft(tokens=_stacked(tokens, ids[..., 0]), q_rows=_stacked(q_rows, q[:, :, 0]))


def _stacked(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.stack(parts, dim=1) if parts else torch.empty_like(like)


def _drawn(row: Tensor, ids: Tensor, slot: int, noise: Noise) -> Tensor:
    if noise.rule == "inverse_cdf":
        if noise.uniforms is None:
            raise SelectionError("the inverse CDF needs uniforms: give Noise(rule='inverse_cdf', uniforms=...).")
        return _inverse_cdf(row, noise.uniforms[:, slot])
    if noise.seeds is None or noise.positions is None:
        raise SelectionError("Gumbel noise needs seeds and positions: give both to Noise(rule='gumbel', ...).")
    gumbels = keyed_gumbels(noise.seeds.unsqueeze(1), noise.positions.unsqueeze(1) + slot, ids)
    keyed = (row.log() + gumbels).masked_fill((row == 0) | (ids == NO_TOKEN), float("-inf"))
    return _best_of_lowest_id(keyed, ids)


def _inverse_cdf(row: Tensor, uniform: Tensor) -> Tensor:
    passed = (uniform.unsqueeze(1) >= row.cumsum(-1)).sum(-1)
    last = row.shape[-1] - 1 - (row > 0).flip(-1).int().argmax(-1)
    return torch.minimum(passed, last)


def _best_of_lowest_id(keyed: Tensor, ids: Tensor) -> Tensor:
    """Of equal keys the lowest id, so that the order of candidates never tells."""
    best = keyed == keyed.max(-1, keepdim=True).values
    return ids.masked_fill(~best, torch.iinfo(torch.int64).max).argmin(-1)
