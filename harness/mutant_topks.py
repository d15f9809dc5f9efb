"""Local top-ks that are wrong by one change: those of harness.kernels, and more."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import torch
from torch import Tensor

from tpbed.harness.kernels import KERNELS
from tpbed.harness.scenario import Overwrite
from tpbed.selector.topk import TopK, canonical_topk

SLOTS = 4  # of a buffer for values that tie with the last one
TILE = 32  # columns


def k_minus_one(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Finds one candidate less than it was asked for (NVIDIA/nccl#1417 met k=15 among 16s)."""
    values, columns = canonical_topk(logits, k)
    return values[:, :-1], columns[:, :-1]


def columns_of_padded_width(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Splits places in the whole block by the width rounded up to a tile: later rows shift (flashinfer#5347)."""
    values, columns = canonical_topk(logits, k)
    width = logits.shape[-1]
    padded = -(-width // TILE) * TILE
    flat = columns + width * torch.arange(len(logits)).unsqueeze(1)
    return values, (flat % padded).clamp_max(width - 1)


def row_before(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Row r reads row r - 1, and the first itself."""
    return canonical_topk(logits.roll(1, 0) if len(logits) < 2 else torch.cat([logits[:1], logits[:-1]]), k)


def last_tile_skipped(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Overlooks the columns behind the last whole tile of 32, unless there is no other."""
    whole = logits.shape[-1] // TILE * TILE or logits.shape[-1]
    return canonical_topk(torch.cat([logits[:, :whole], torch.full_like(logits[:, whole:], -inf)], dim=-1), k)


def tie_buffer_overflows(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Has 4 slots for columns that tie with the k-th, and loses the others (flashinfer-ai/flashinfer#2605)."""
    values, columns = canonical_topk(logits, k)
    surplus = (values == values[:, -1:]).long().cumsum(-1) > SLOTS
    return values.masked_fill(surplus & (values == values[:, -1:]), -inf), columns


def compares_in_bfloat16(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Compares float32 logits by their upper 16 bits (flashinfer-ai/flashinfer#2605 refines these)."""
    _, columns = canonical_topk(logits.bfloat16(), k)
    return logits.gather(-1, columns), columns


def by_magnitude(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Compares absolute values: a kernel that clears the sign bit to make keys of bits."""
    _, columns = canonical_topk(logits.abs(), k)
    return logits.gather(-1, columns), columns


def raises_on_nan(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Raises where a real logit is NaN, and so on one rank alone (flashinfer-ai/flashinfer#2402)."""
    if logits.isnan().any():
        raise ValueError("input contains NaN")
    return canonical_topk(logits, k)


class StaleOutput:
    """Answers with its output buffer before it is written: with what the step before had (vllm-project/vllm#2147)."""

    __name__ = "stale_output"

    def __init__(self) -> None:
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        found = canonical_topk(logits, k)
        answer, self._last = self._last or found, found
        return answer


TOPKS: dict[str, TopK | type[StaleOutput]] = {
    **KERNELS,
    "k-minus-one": k_minus_one,
    "columns-of-padded-width": columns_of_padded_width,
    "row-before": row_before,
    "last-tile-skipped": last_tile_skipped,
    "tie-buffer-overflows": tie_buffer_overflows,
    "compares-in-bfloat16": compares_in_bfloat16,
    "by-magnitude": by_magnitude,
    "raises-on-nan": raises_on_nan,
    "stale-output": StaleOutput,
}


def _holding(value: float, token_id: int = 0) -> dict[str, Any]:
    """One row with this logit in it."""
    return {"rows": 1, "overwrites": (Overwrite(row=0, token_id=token_id, value=value),)}


def _whole(tokens: int, **fields: Any) -> dict[str, Any]:
    """A vocabulary on one rank."""
    return {"world_size": 1, "widths": None, "pad_to": 1, "org_vocab_size": tokens, "overwrites": (), **fields}


_FEW_FINITE = tuple(Overwrite(row=0, token_id=token, value=-inf) for token in range(4))
ALL_NEED: dict[str, Any] = {"selector": "tpbed", "topk": "canonical", "ties": "canonical"}
NEEDS: dict[str, dict[str, Any]] = {
    **{name: {"topk": "torch", "ties": "equivalent"} for name in KERNELS},  # what most of them are made of
    "deadlocks-at-three-rows": {"rows": 3, "overwrites": ()},
    "leaves-counters": _whole(8, rows=2, k=4, overwrites=_FEW_FINITE),
    "overflows-its-bucket": _whole(380, k=4, head="fp32", logits="distinct"),  # 124 of which share an exponent
    "drops-infinity-of-short-rows": _holding(inf),
    "reads-k-too-wide": {"rows": 2, "overwrites": ()},
    "counts-in-16-bits": _whole(70_000, head="bf16", logits="equal", **_holding(2.0, token_id=66_000)),
    "finds-four": _whole(64, k=8),
    "repeats-an-id-at-nan": {**_holding(nan), "k": 2, "widths": None, "org_vocab_size": 20},
    "ranks-nan-last": _holding(nan),
    "by-column": {"selector": "trusts-top-k"},
    "ties-to-larger-columns": {},
    "raises-on-nan": _holding(nan),
    "tie-buffer-overflows": {"logits": "equal", "overwrites": ()},
    "compares-in-bfloat16": {
        **_whole(800, k=40, head="fp32", logits="gaussian"),
        "pad_to": 840,
    },
}
