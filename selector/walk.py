"""Walk: one path through the lattice for each request, greedy or sampled, and what it was drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal, get_args

import torch
from torch import Tensor

from tpbed.selector.errors import SelectionError
from tpbed.selector.noise import keyed_gumbels
from tpbed.selector.shard import NO_TOKEN, is_whole
from tpbed.selector.tensors import check_tensor, check_values

NoiseRule = Literal["inverse_cdf", "gumbel"]
_NEEDS: Mapping[NoiseRule, tuple[str, ...]] = {"inverse_cdf": ("uniforms",), "gumbel": ("seeds", "positions")}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftParams:
    """How each request draws: all (requests,) tensors. temperature 0 or top_k 1 is greedy: the first best candidate.

    temperature float32, finite, 0 or more. top_k int64: candidates kept, 0 for all. top_p float32, in (0, 1].
    Raises SelectionError for other shapes and dtypes, and, on the CPU, for values out of range.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor

    def __post_init__(self) -> None:
        check_params(self, None)
        check_params(self, len(self.temperature))
        finite = "finite numbers, 0 or more"
        check_values("temperature", self.temperature, lambda given: given.isfinite() & (given >= 0), finite)
        check_values("top_k", self.top_k, lambda given: given >= 0, "0 or more")
        check_values("top_p", self.top_p, lambda given: (given > 0) & (given <= 1), "numbers in (0, 1]")

    @classmethod
    def alike(
        cls, requests: int, *, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, device: str = "cpu"
    ) -> DraftParams:
        """The same for all requests. Raises SelectionError for a value that is out of range."""
        if not (0 <= temperature < inf and is_whole(top_k) and top_k >= 0 and 0 < top_p <= 1):
            raise SelectionError(
                f"temperature={temperature}, top_k={top_k}, top_p={top_p}: give a finite number of 0 or more, a whole "
                f"number of 0 or more, and one in (0, 1]."
            )
        return cls(
            temperature=torch.full((requests,), temperature, dtype=torch.float32, device=device),
            top_k=torch.full((requests,), top_k, dtype=torch.int64, device=device),
            top_p=torch.full((requests,), top_p, dtype=torch.float32, device=device),
        )

    @property
    def greedy(self) -> Tensor:
        """(requests,) bool."""
        return (self.temperature <= 0) | (self.top_k == 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Noise:
    """What a draft is drawn with. uniforms: (requests, slots) float32 in [0, 1), for the inverse CDF.

    seeds, positions: (requests,) int64, the position of slot 0, for Gumbel noise keyed by seed, position and token id.
    Raises SelectionError for a rule that is not known.
    """

    rule: NoiseRule
    uniforms: Tensor | None = None
    seeds: Tensor | None = None
    positions: Tensor | None = None

    def __post_init__(self) -> None:
        check_rule(self.rule)

    @property
    def needs(self) -> tuple[str, ...]:
        """The fields that the rule draws with; the others are not looked at."""
        return _NEEDS[self.rule]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draft:
    """tokens: (requests, slots) int64. q_rows: (requests, slots, K) float32, the distribution each was drawn from."""

    tokens: Tensor
    q_rows: Tensor


def check_rule(rule: str) -> None:
    """Raise SelectionError for a noise rule that is not known."""
    if rule not in get_args(NoiseRule):
        raise SelectionError(f"noise rule {rule!r} is none of {', '.join(get_args(NoiseRule))}: use one of these.")


def check_params(params: DraftParams, requests: int | None) -> None:
    """Raise SelectionError unless params are of so many requests, None for any number, and of their dtypes."""
    for name, dtype in (("temperature", torch.float32), ("top_k", torch.int64), ("top_p", torch.float32)):
        check_tensor(name, getattr(params, name), (requests,), dtype, each="(requests,), one for each request")


def check_noise(noise: Noise, requests: int, slots: int) -> None:
    """Raise SelectionError unless all that the rule needs is there, for so many requests and slots."""
    if any(getattr(noise, name) is None for name in noise.needs):
        wanted = ", ".join(f"{name}=..." for name in noise.needs)
        raise SelectionError(
            f"{noise.rule} noise needs {' and '.join(noise.needs)}: give Noise(rule={noise.rule!r}, {wanted})."
        )
    if noise.rule == "inverse_cdf":
        check_tensor("uniforms", noise.uniforms, (requests, slots), torch.float32, each="(requests, slots)")
        return
    for name in noise.needs:
        check_tensor(name, getattr(noise, name), (requests,), torch.int64, each="(requests,), one for each request")


def draft_distribution(scores: Tensor, params: DraftParams) -> Tensor:
    """q for every row of a lattice: (requests, slots, K, K) float32, each row summing to 1.

    scores: as lattice_scores gives them. Greedy: all at the first best. Sampled: softmax(score / temperature), then
    the top_k best, then the least number of the best whose probabilities reach top_p, renormalized after each; of
    equals the earlier candidate is kept first. Candidates of +inf share all of a row alike. A row with NaN, or with
    nothing above -inf, has all at candidate 0.
    Raises SelectionError unless params are of as many requests.
    Source: SGLang's draft sampling; top-p after top-k, as there.
    """
    check_params(params, len(scores))
    shape = (-1, *(1,) * (scores.ndim - 1))
    temperature = params.temperature.view(shape).clamp_min(1e-5)
    scores = _without_overflow(scores)
    q = torch.softmax(scores / temperature, dim=-1)
    q = _keep_best(q, params.top_k.view(shape), params.top_p.view(shape))
    return torch.where(params.greedy.view(shape), _one_hot(scores.argmax(-1), q), q)


def _without_overflow(scores: Tensor) -> Tensor:
    """Scores less their row's best, which is 0, so that no temperature can overflow; rows that have no best get one."""
    best = scores.amax(-1, keepdim=True)  # NaN if one is
    nothing = torch.full_like(scores, -inf)
    first = nothing.clone()
    first[..., 0] = 0.0
    scores = torch.where(best == inf, nothing.masked_fill(scores == inf, 0.0), scores - best)
    return torch.where(best.isnan() | (best == -inf), first, scores)


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
    Greedy requests take no noise, but the rule's must be there. Cost: no collective; one gather and one choice a slot.
    Raises SelectionError unless params and noise are of as many requests and slots.
    Source: SGLang's walk (inverse CDF); vLLM keys noise by token.
    """
    requests, slots, _ = ids.shape
    check_params(params, requests)
    check_noise(noise, requests, slots)
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
    if noise.uniforms is not None and noise.rule == "inverse_cdf":
        return _inverse_cdf(row, noise.uniforms[:, slot])
    assert noise.seeds is not None and noise.positions is not None  # check_noise has seen them
    gumbels = keyed_gumbels(noise.seeds.unsqueeze(1), noise.positions.unsqueeze(1) + slot, ids)
    keyed = (row.log() + gumbels).masked_fill((row == 0) | (ids == NO_TOKEN), -inf)
    return _best_of_lowest_id(keyed, ids)


def _inverse_cdf(row: Tensor, uniform: Tensor) -> Tensor:
    passed = (uniform.unsqueeze(1) >= row.cumsum(-1)).sum(-1)
    last = row.shape[-1] - 1 - (row > 0).flip(-1).int().argmax(-1)
    return torch.minimum(passed, last)


def _best_of_lowest_id(keyed: Tensor, ids: Tensor) -> Tensor:
    """Of equal keys the lowest id, so that the order of candidates never tells."""
    best = keyed == keyed.max(-1, keepdim=True).values
    return ids.masked_fill(~best, torch.iinfo(torch.int64).max).argmin(-1)
