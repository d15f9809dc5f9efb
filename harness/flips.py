"""Flips: rows whose best token is not the reference's, by the margin they had; and what so many of them can prove."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import comb, erfc, exp, inf, log, sqrt

import torch
from torch import Tensor

SIGMAS = (1e-4, 1e3)  # between which a fit looks


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Rows with a margin from `low` up to, but not at, `high`, and how many of them flipped; the last bin is open."""

    low: float
    high: float | None
    rows: int
    flips: int


def in_ulps(margins: Tensor, tops: Tensor) -> Tensor:
    """Margins in units of the spacing of bfloat16 at the top value: 0.125 for a top from 16 up to 32."""
    return margins / torch.exp2(torch.frexp(tops).exponent.to(margins.dtype) - 8)


def near_tie_rates(margins: Tensor, taus: Sequence[float]) -> dict[str, float]:
    """R(tau), the share of rows with a margin of at most tau, by tau."""
    return {f"{tau:g}": float((margins <= tau).double().mean()) for tau in taus}


def flip_curve(margins: Tensor, flipped: Tensor, edges: Sequence[float]) -> tuple[Bin, ...]:
    """Rows and flips between each two edges, and above the last: F(g) with its counts."""
    found = []
    for low, high in pairwise((*edges, None)):
        assert low is not None  # only the last is
        inside = (margins >= low) & (margins < (inf if high is None else high))
        found.append(Bin(low=low, high=high, rows=int(inside.sum()), flips=int((inside & flipped).sum())))
    return tuple(found)


def phi(x: float) -> float:
    """The share of a normal distribution below x."""
    return 0.5 * erfc(-x / sqrt(2))


def flip_chance(margin: float, sigma: float) -> float:
    """Phi(-margin / (sqrt(2) sigma)): two logits with a normal error of deviation sigma each change places."""
    return phi(-margin / (sqrt(2) * sigma)) if sigma else 0.0


def fit_sigma(margins: Tensor, flipped: Tensor) -> float:
    """The sigma of flip_chance under which these flips are likeliest; 0 where nothing flipped.

    A search over 400 values, 4 % apart: the flips of a few hundred rows tell no more.
    """
    if not flipped.any():
        return 0.0
    low, high = log(SIGMAS[0]), log(SIGMAS[1])
    sigmas = [exp(low + (high - low) * step / 399) for step in range(400)]
    z = margins.double() / (sqrt(2) * torch.tensor(sigmas, dtype=torch.float64)[:, None])
    likelihoods = torch.special.log_ndtr(torch.where(flipped, -z, z)).sum(dim=1)
    return sigmas[int(likelihoods.argmax())]


def mcnemar(only_first: int, only_second: int) -> float:
    """The exact two-sided p of McNemar's test: both are right equally often, and only chance made them differ.

    Each counts the rows in which that one alone was right; rows in which both were, or neither, say nothing.
    """
    rows = only_first + only_second
    tail = sum(comb(rows, count) for count in range(min(only_first, only_second) + 1))
    return min(1.0, float(2 * tail / 2**rows))


def fork_chance(per_token: float, tokens: int) -> float:
    """1 - (1 - p)^L: a greedy chain of L tokens leaves the path of the reference somewhere."""
    return float(1 - (1 - per_token) ** tokens)


def most_likely_below(rows: int, confidence: float = 0.95) -> float:
    """The chance per row that `rows` rows without one event leave possible: about 3 / rows."""
    return 1 - (1 - confidence) ** (1 / rows) if rows else 1.0
