"""Verify: which drafted tokens stand, so that what comes out follows the target's distribution exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from tpbed.selector.shard import NO_TOKEN
from tpbed.selector.tensors import check_tensor, check_values


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
    NO_TOKEN (-1) in drafted is no draft: nothing is accepted from there on, q is not looked at, and the target's own
    token follows. Without a slot, that token is all there is.
    Raises SelectionError for shapes that do not fit and, on the CPU, for tokens that target does not have.
    """
    _check_verified(target, q, drafted, uniforms, redraw)
    requests, slots = drafted.shape
    every = torch.arange(requests, device=drafted.device)
    absent = torch.cat([drafted == NO_TOKEN, drafted.new_ones(requests, 1).bool()], dim=1)  # none after the last slot
    chances = accept_probability(target[:, :slots].flatten(0, 1), q.flatten(0, 1), drafted.clamp_min(0).flatten())
    stands = (uniforms < chances.view(requests, slots)) & ~absent[:, :slots]
    accepted = stands.long().cumprod(-1).sum(-1)
    whole = torch.cat([q, torch.zeros_like(target[:, :1])], dim=1)
    drawn = whole[every, accepted].masked_fill(absent[every, accepted].unsqueeze(-1), 0.0)  # leaves the target itself
    last = residual(target[every, accepted], drawn)
    passed = (redraw.unsqueeze(-1) >= last.cumsum(-1)).sum(-1)
    highest = last.shape[-1] - 1 - (last > 0).flip(-1).int().argmax(-1)
    return accepted, torch.minimum(passed, highest)


def _check_verified(target: Tensor, q: Tensor, drafted: Tensor, uniforms: Tensor, redraw: Tensor) -> None:
    check_tensor("drafted", drafted, (None, None), torch.int64, each="(requests, slots)")
    (requests, slots), tokens = drafted.shape, target.shape[-1]
    for name, given, shape, each in (
        ("target", target, (requests, slots + 1, tokens), "(requests, slots + 1, tokens)"),
        ("q", q, (requests, slots, tokens), "(requests, slots, tokens)"),
        ("uniforms", uniforms, (requests, slots), "(requests, slots)"),
        ("redraw", redraw, (requests,), "(requests,)"),
    ):
        check_tensor(name, given, shape, given.dtype, each=each)
    known = f"-1, or 0 to {tokens - 1}"
    check_values("drafted", drafted, lambda given: (given >= NO_TOKEN) & (given < tokens), known)
