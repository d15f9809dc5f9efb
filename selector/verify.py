"""Verify: which drafted tokens stand, so that what comes out follows the target's distribution exactly."""

from __future__ import annotations

import torch
from torch import Tensor


def accept_probability(target: Tensor, q: Tensor, token: Tensor) -> Tensor:
    """min(1, target / q) of the drafted token: (rows,). target, q: (rows, tokens), each row a distribution."""
    wanted, drawn = (p.gather(-1, token.unsqueeze(-1)).squeeze(-1) for p in (target, q))
    return torch.where(drawn > 0, (wanted / drawn).clamp_max(1.0), torch.zeros_like(wanted))


def residual(target: Tensor, q: Tensor) -> Tensor:
    """What a rejected row is drawn from: max(target - q, 0), normalized: (rows, tokens).

    Where nothing is left, target and q are equal, so no token is rejected; then target itself is returned.
    Source: Leviathan, Kalman, Matias, Fast Inference from Transformers via Speculative Decoding (2023), theorem 1.
    """
    left = (target - q).clamp_min(0.0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total.where(total > 0, torch.ones_like(total)), target)


def verify(target: Tensor, q: Tensor, drafted: Tensor, uniforms: Tensor, redraw: Tensor) -> tuple[Tensor, Tensor]:
    """Accept drafted tokens from the first on, and draw one more where the first is rejected.

    target: (requests, slots + 1, tokens), the target's distributions along the draft; q: (requests, slots, tokens),
    what the draft was drawn from; drafted: (requests, slots) int64; uniforms: (requests, slots) and redraw: (requests,)
    in [0, 1). Returns how many were accepted (requests,) int64, and the token after them (requests,) int64.
    """
    requests, slots = drafted.shape
    chances = accept_probability(target[:, :slots].flatten(0, 1), q.flatten(0, 1), drafted.flatten()).view(-1, slots)
    accepted = (uniforms < chances).long().cumprod(-1).sum(-1)
    every = torch.arange(requests, device=drafted.device)
    whole = torch.cat([q, torch.zeros_like(target[:, :1])], dim=1)  # after the last slot nothing was drafted
    last = residual(target[every, accepted], whole[every, accepted])
    passed = (redraw.unsqueeze(-1) >= last.cumsum(-1)).sum(-1)
    highest = last.shape[-1] - 1 - (last > 0).flip(-1).int().argmax(-1)
    return accepted, torch.minimum(passed, highest)
