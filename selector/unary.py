"""unary_transform: a candidate's logit to its unary score in the lattice."""

from __future__ import annotations

from math import inf, isnan

import torch
from torch import Tensor

from tpbed.selector.errors import SelectionError


def unary_transform(values: Tensor, *, multiplier: float = 1.0, softcap: float | None = None) -> Tensor:
    """Multiply, then cap: u = multiplier * v, then softcap * tanh(u / softcap); both keep the order of candidates.

    values: (..., k) of any floating dtype; a slot without a token (-inf) stays -inf.
    softcap: None, 0 or less is no cap.
    Returns the same shape, float32.
    Raises SelectionError as check_unary does.
    Source: output_multiplier and final_logit_softcapping of a DFlash2 draft's dflash_config.
    """
    check_unary(multiplier, softcap)
    scores = values.float() if multiplier == 1.0 else values.float() * multiplier
    if softcap is None or softcap <= 0:
        return scores
    return torch.where(scores == -inf, scores, softcap * torch.tanh(scores / softcap))


def check_unary(multiplier: float, softcap: float | None) -> None:
    """Raise SelectionError unless a finite multiplier above 0 keeps the order of candidates, and if softcap is NaN."""
    if not 0 < multiplier < inf:
        raise SelectionError(
            f"multiplier={multiplier} would not keep the order of candidates: use one above 0, and finite."
        )
    if softcap is not None and isnan(softcap):
        raise SelectionError("softcap=nan caps nothing: use None, or a number above 0.")
