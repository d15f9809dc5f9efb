"""The unsharded answer, written to be plainly right, and the judgement of candidates against it.

Shares no code with the selector. Everything is float64 on CPU; one row after the other where that is clearer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Ties = Literal["canonical", "equivalent"]
Kind = Literal["wrong_ids", "order"]


@dataclass(frozen=True, slots=True)
class Discrepancy:
    """One place where candidates contradict the reference; row and slot are -1 if it is about the whole answer.

    wrong_ids: a token that is not among the best, or not what its value says. order: right tokens, wrong places.
    """

    row: int
    slot: int
    kind: Kind
    message: str


def reference_logits(hidden: Tensor, weight: Tensor, *, logits_dtype: torch.dtype | None = None) -> Tensor:
    """The logits of the whole vocabulary, (rows, tokens) float64.

    hidden: (rows, hidden units) as the head reads it: cast to the weight's dtype first if the head does that.
    weight: (tokens, hidden units), row i for token i, no padding and no added tokens; dequantized, in float64 if the
    scale is not a power of two.
    logits_dtype: the rounding point. None leaves the float64 sums as they are. A dtype rounds them once, through
    float32, which is what a head computes if its float32 sums are exact; compare these with a bound of 0.
    """
    logits = hidden.detach().cpu().double() @ weight.detach().cpu().double().T
    return logits if logits_dtype is None else logits.float().to(logits_dtype).double()


def reference_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of each row: value descending, then token id ascending, -0 equal to +0.

    logits: (rows, tokens). Returns ids (rows, k) int64 and values (rows, k) float64. A token of -inf is no candidate:
    its slot has id -1. A row with NaN anywhere is invalid: its ids are -1, its values NaN.
    Raises ValueError if k is not within 1 to tokens.
    """
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k={k} is not within 1 to {logits.shape[1]} tokens: ask for fewer.")
    rows = [_topk_of_row(row, k) for row in logits.detach().cpu().double().numpy()]
    ids = np.array([ids for ids, _ in rows], dtype=np.int64).reshape(-1, k)
    values = np.array([values for _, values in rows], dtype=np.float64).reshape(-1, k)
    return torch.from_numpy(ids), torch.from_numpy(values)


def _topk_of_row(row: Array, k: int) -> tuple[Ids, Array]:
    if np.isnan(row).any():
        return np.full(k, -1), np.full(k, np.nan)
    best = np.lexsort((np.arange(len(row)), -row))[:k]  # the last key counts most
    return np.where(row[best] == -np.inf, -1, best), row[best]


def error_bound(
    hidden: Tensor,
    weight: Tensor,
    logits_dtype: torch.dtype,
    *,
    exact: bool = False,
    unit_roundoff: float = 2.0**-24,
) -> Tensor:
    """How far a head's logit may be from reference_logits(hidden, weight): (rows, tokens) float64, rigorous.

    Holds for float32 accumulation of the H products in any order, products exact or rounded, weights or sums scaled in
    float32, and one rounding to logits_dtype at the end: the rounding point. A product and its way through the sum take
    H roundings; two are left for scales: one where a scale per row, block or head multiplies, two where a scale per
    group is combined with a global one and then multiplies (NVFP4).
        |computed - exact| <= g * S + u * (|exact| + g * S) + underflow,  S = sum |h_i * w_i|,  g = n * v / (1 - n * v)
    with n = H + 2 roundings of v = unit_roundoff (2**-24 rounds to nearest; 2**-23 covers accumulators that truncate)
    and u that of logits_dtype. Infinite where float32 or logits_dtype may overflow; 0 where an input is not finite.
    exact: the caller knows that the sums are exact (small integers, say) and gave reference_logits the logits_dtype.
    Does not cover activations that are quantized (W8A8), TF32, or accumulators below float32.
    Source: Higham, Accuracy and Stability of Numerical Algorithms, section 3.1.
    """
    h, w = hidden.detach().cpu().double(), weight.detach().cpu().double()
    if exact:
        return torch.zeros(h.shape[0], w.shape[0], dtype=torch.float64)
    terms = h.shape[1] + 2
    gamma = terms * unit_roundoff / (1 - terms * unit_roundoff)
    magnitudes = h.abs() @ w.abs().T * (1 + terms * 2.0**-52)
    summed = magnitudes * (gamma + terms * 2.0**-52) + _underflow(h, w)  # float32's error and float64's own
    largest = (h @ w.T).abs() + summed
    info = torch.finfo(logits_dtype)
    bound = summed + info.eps / 2 * largest + info.tiny * info.eps
    overflows = (magnitudes * (1 + gamma) > torch.finfo(torch.float32).max) | (largest * (1 + info.eps) > info.max)
    return bound.masked_fill(overflows, np.inf).masked_fill(~magnitudes.isfinite(), 0.0)


def _underflow(h: Tensor, w: Tensor) -> Tensor:
    """What subnormals may cost if inputs, products and sums are flushed to zero, before a scale."""
    terms, one = h.shape[1] + 2, torch.ones(1, 1, dtype=torch.float64)
    h_max, w_max = (torch.cat([x.abs(), one.expand(len(x), 1)], dim=1).amax(1, keepdim=True) for x in (h, w))
    return 4 * terms * 2.0**-126 * h_max * w_max.T


def explain_candidates(
    ids: Tensor, values: Tensor | None, logits: Tensor, bound: Tensor | float, *, k: int, ties: Ties = "canonical"
) -> list[Discrepancy]:
    """Where ids and values, (rows, k) each, contradict the logits; an empty list if they are right.

    values: None for ids alone, which are right if there are values with which they would be.
    logits: (rows, tokens) float64 of the whole vocabulary, from reference_logits. bound: the same shape, or a number:
    how far a computed logit may be off. The answer is right if some logits within the bound give it:
    - each value is within the bound of its id's logit; ids are tokens, and none comes twice;
    - no token left out beats a listed value by more than its own bound;
    - values do not rise from slot to slot; under "canonical" equal values have rising ids, and with a bound of 0 no
      token left out equals the last value with a lower id. Under "equivalent" ties may be broken in any way;
    - tokens of -inf are not listed; id -1 with value -inf stands only where no other token is left;
    - a row with NaN in its logits has ids of -1 and values of NaN throughout.
    With a bound of 0, "canonical" accepts the ids and values of reference_topk and nothing else.
    """
    rows = logits.shape[0]
    if tuple(ids.shape) != (rows, k) or (values is not None and tuple(values.shape) != (rows, k)):
        found = f"ids {tuple(ids.shape)}" + ("" if values is None else f" and values {tuple(values.shape)}")
        return [Discrepancy(-1, -1, "wrong_ids", f"the answer has {found}, but {rows} rows of k={k} were asked for.")]
    exact = logits.detach().cpu().double()
    off = torch.as_tensor(bound).cpu().double().expand_as(exact)
    low, high = exact - torch.where(exact.isfinite(), off, 0.0), exact + torch.where(exact.isfinite(), off, 0.0)
    given = [None] * rows if values is None else values.double().tolist()
    rows_of = zip(ids.tolist(), given, exact.numpy(), low.numpy(), high.numpy(), strict=True)
    judged = [_Row(row, *parts, ties=ties) for row, parts in enumerate(rows_of)]
    return [item for row in judged for item in row.discrepancies()]


def _likeliest(ids: list[int], exact: Array, low: Array, high: Array) -> Iterator[float]:
    """The largest values that ids can have had and that fall from slot to slot, where there are such.

    Equal ones only where that is certain: what a bound leaves open is no tie.
    """
    before = np.inf
    for token in ids:
        if np.isnan(exact).any() or not 0 <= token < len(exact):
            yield np.nan if np.isnan(exact).any() else -np.inf
            continue
        exactly = low[token] == high[token]
        below = high[token] if exactly or high[token] < before else np.nextafter(before, -np.inf)
        before = max(float(below), float(low[token]))
        yield before


class _Row:
    """One row under judgement: what was listed, and the interval in which each token's computed logit must lie."""

    def __init__(
        self, row: int, ids: list[int], values: list[float] | None, exact: Array, low: Array, high: Array, *, ties: Ties
    ) -> None:
        self.row, self.ids, self.ties = row, ids, ties
        self.exact, self.low, self.high = exact, low, high
        self.values = list(_likeliest(ids, exact, low, high)) if values is None else values
        self.left = low.copy()  # what is certain of the tokens that are not listed
        self.left[[token for token in ids if 0 <= token < len(exact)]] = -np.inf
        self.best_left = int(np.argmax(self.left))  # the first of equals: the lowest id

    def discrepancies(self) -> Iterator[Discrepancy]:
        if np.isnan(self.exact).any():
            yield from self.not_marked_invalid()
            return
        yield from self.wrong_slots()
        yield from self.left_out()
        yield from self.out_of_order()

    def not_marked_invalid(self) -> Iterator[Discrepancy]:
        for slot, (token, value) in enumerate(zip(self.ids, self.values, strict=True)):
            if token != -1 or not np.isnan(value):
                yield self.wrong(slot, "the row holds NaN, so its ids must be -1 and its values NaN")

    def wrong_slots(self) -> Iterator[Discrepancy]:
        for slot in range(len(self.ids)):
            reason = self.reason_against(slot)
            if reason is not None:
                yield self.wrong(slot, reason)

    def reason_against(self, slot: int) -> str | None:
        token, value = self.ids[slot], self.values[slot]
        if token == -1:
            return self.reason_against_none(value)
        if not 0 <= token < len(self.exact):
            return f"the vocabulary has ids 0 to {len(self.exact) - 1}"
        if token in self.ids[:slot]:
            return "this id was listed before"
        if self.high[token] == -np.inf or value == -np.inf:
            return f"a token of -inf is no candidate, and the logit of this id is {self.exact[token]}"
        if not self.low[token] <= value <= self.high[token]:
            return f"the logit of this id is {self.exact[token]}, which allows {self.low[token]} to {self.high[token]}"
        return None

    def reason_against_none(self, value: float) -> str | None:
        if self.left[self.best_left] > -np.inf:
            return f"token {self.best_left} with logit {self.exact[self.best_left]} is left"
        return None if value == -np.inf else "an empty slot must have value -inf"

    def left_out(self) -> Iterator[Discrepancy]:
        """The best token that is not listed, against the weakest that is."""
        slots = [slot for slot, token in enumerate(self.ids) if token != -1]
        if not slots or self.left[self.best_left] == -np.inf:
            return
        weakest = min(slots, key=lambda slot: (self.ceiling(slot), -self.ids[slot]))
        what = f"token {self.best_left} with logit {self.exact[self.best_left]} was left out"
        if self.left[self.best_left] > self.ceiling(weakest):
            yield self.wrong(weakest, f"{what}, which scores {self.left[self.best_left]} at least")
        elif self.ties == "canonical" and self.certain_tie(weakest) and self.best_left < self.ids[weakest]:
            yield self.misplaced(weakest, f"{what}, which ties with it and has the lower id")

    def ceiling(self, slot: int) -> float:
        """The most that the listed token can have scored: its value, or less where its value is impossible."""
        token = self.ids[slot]
        return min(self.values[slot], float(self.high[token])) if 0 <= token < len(self.high) else self.values[slot]

    def certain_tie(self, slot: int) -> bool:
        return bool(self.low[self.best_left] == self.high[self.best_left] == self.values[slot])

    def out_of_order(self) -> Iterator[Discrepancy]:
        for slot in range(1, len(self.ids)):
            before, here, token = self.values[slot - 1], self.values[slot], self.ids[slot - 1]
            if here > before:
                yield self.misplaced(slot, f"its value is above the {before} of id {token} in the slot before")
            elif self.ties == "canonical" and here == before and self.ids[slot] < token:
                yield self.misplaced(slot, f"it ties with id {token} in the slot before, and the lower id goes first")

    def wrong(self, slot: int, reason: str) -> Discrepancy:
        return Discrepancy(self.row, slot, "wrong_ids", self.message(slot, reason))

    def misplaced(self, slot: int, reason: str) -> Discrepancy:
        return Discrepancy(self.row, slot, "order", self.message(slot, reason))

    def message(self, slot: int, reason: str) -> str:
        return f"row {self.row}, slot {slot}: id {self.ids[slot]} with value {self.values[slot]}, but {reason}."
