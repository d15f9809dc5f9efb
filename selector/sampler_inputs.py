"""SamplerInputs: all that a proposal depends on, checked, and as static buffers."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tpbed.selector.errors import SelectionError
from tpbed.selector.lattice import TransitionTables, check_anchor
from tpbed.selector.walk import DraftParams, Noise, NoiseRule, check_noise, check_params

_FILL = {"top_p": 1.0}  # what stands beyond the requests of a batch, where it is not 0: greedy, from token 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplerInputs:
    """All that a proposal depends on, on the tables' device; in a graph, at the addresses that it was captured with."""

    hidden: Tensor  # (requests, slots, hidden units) in the tables' dtype
    anchor: Tensor  # (requests,) int64
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    uniforms: Tensor  # (requests, slots)
    seeds: Tensor
    positions: Tensor

    @classmethod
    def blank(cls, requests: int, slots: int, tables: TransitionTables) -> SamplerInputs:
        """Greedy requests, whose hidden states are zeros."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(requests, *shape, dtype=dtype, device=tables.projection.device)

        real = torch.float32
        return cls(
            hidden=zeros(slots, tables.projection.shape[1], dtype=tables.projection.dtype),
            anchor=zeros(),
            temperature=zeros(dtype=real),
            top_k=zeros(),
            top_p=zeros(dtype=real).fill_(_FILL["top_p"]),
            uniforms=zeros(slots, dtype=real),
            seeds=zeros(),
            positions=zeros(),
        )

    @classmethod
    def of(
        cls, hidden: Tensor, anchor: Tensor, params: DraftParams, noise: Noise, *, slots: int, tables: TransitionTables
    ) -> SamplerInputs:
        """What a caller gave, where the buffers are and in their dtypes, so that an answer never depends on the sizes.

        Noise that its rule does not use is left out. Raises SelectionError for what check_inputs refuses.
        """
        check_inputs(hidden, anchor, params, noise, slots=slots, tables=tables)
        blank = cls.blank(len(hidden), slots, tables)
        given = {"hidden": hidden, "anchor": anchor, **_named(params), **_used(noise)}
        return cls(**{name: given.get(name, like).to(like) for name, like in _named(blank).items()})

    def first(self, requests: int) -> SamplerInputs:
        """Views of the first requests."""
        return SamplerInputs(**{name: tensor[:requests] for name, tensor in _named(self).items()})

    def take(self, given: SamplerInputs) -> None:
        """Copy what is given over the first requests; those after them become blank."""
        for name, mine in _named(self).items():
            theirs = getattr(given, name)
            mine[: len(theirs)].copy_(theirs)
            mine[len(theirs) :].fill_(_FILL.get(name, 0))

    @property
    def params(self) -> DraftParams:
        """How the requests draw."""
        return DraftParams(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

    def noise(self, rule: NoiseRule) -> Noise:
        """What they draw with."""
        return Noise(rule=rule, uniforms=self.uniforms, seeds=self.seeds, positions=self.positions)


def check_inputs(
    hidden: Tensor, anchor: Tensor, params: DraftParams, noise: Noise, *, slots: int, tables: TransitionTables
) -> None:
    """Raise SelectionError, on every rank alike, unless all are of as many requests, and of their shapes and dtypes."""
    units = tables.projection.shape[1]
    if not isinstance(hidden, Tensor) or hidden.ndim != 3 or hidden.shape[1:] != (slots, units):
        found = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
        raise SelectionError(f"hidden {found} is not (requests, {slots}, {units}): give what the sampler was made for.")
    for name, given, kind in (("params", params, DraftParams), ("noise", noise, Noise)):
        if not isinstance(given, kind):
            raise SelectionError(f"{name} is {type(given).__name__}: give {kind.__name__}.")
    check_anchor(anchor, len(hidden), tables)
    check_params(params, len(hidden))
    check_noise(noise, len(hidden), slots)


def _named(given: SamplerInputs | DraftParams) -> dict[str, Tensor]:
    return {field.name: getattr(given, field.name) for field in fields(given)}


def _used(noise: Noise) -> dict[str, Tensor]:
    return {name: getattr(noise, name) for name in noise.needs}
