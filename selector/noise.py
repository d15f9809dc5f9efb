"""Noise: the randomness of a draft, drawn once a slot, or keyed by what is drawn."""

from __future__ import annotations

import torch
from torch import Tensor

_STEP = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: of the golden ratio, odd
_MIX = (-4658895280553007687, -7723592293110705685)  # 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def keyed_uniforms(seed: Tensor, position: Tensor, token_id: Tensor) -> Tensor:
    """A number in (0, 1) for each seed, position and token id, the same wherever and in whatever order it is asked for.

    All int64, of shapes that broadcast. Returns float32 in their shape: one of 2**23 odd multiples of 2**-24.
    Source: the finalizer of SplitMix64 (Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, 2014),
    once for each part of the key.
    """
    state = _mixed(seed.long())
    for part in (position, token_id):
        state = _mixed(state + part.long() * _STEP)
    return (_shifted(state, 41).float() + 0.5) * 2.0**-23


def keyed_gumbels(seed: Tensor, position: Tensor, token_id: Tensor) -> Tensor:
    """Standard Gumbel noise keyed as keyed_uniforms: float32 in the shape to which the three broadcast.

    The token with the largest log-probability plus noise is drawn with that probability, in any order of candidates.
    """
    return -torch.log(-torch.log(keyed_uniforms(seed, position, token_id)))


def _mixed(state: Tensor) -> Tensor:
    state = state + _STEP
    state = (state ^ _shifted(state, 30)) * _MIX[0]
    state = (state ^ _shifted(state, 27)) * _MIX[1]
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, bits: int) -> Tensor:
    """Right, with zeros coming in, which >> of a signed integer does not do."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
