"""give_head: what HeadFaults make of the lm_head that a rank is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpbed.harness.faults import (
    BlocksFromOwnRow,
    HeadFault,
    Inflated,
    JunkScale,
    NoWeight,
    OtherTile,
    PackedOnly,
    Replayed,
    ScaleDropped,
    StaleMethod,
    Unloaded,
    Unpadded,
    WrongScale,
)
from tpbed.harness.inputs import build_head, full_weight, held_shard
from tpbed.harness.plan import Plan
from tpbed.selector.fp8 import BLOCK, pack_fp8_per_block
from tpbed.selector.head import DenseHead
from tpbed.selector.tiles import apply_in_tiles


def give_head(plan: Plan, rank: int, faults: Sequence[HeadFault], device: torch.device) -> Any:
    """The lm_head of a rank with what faults have made of it; of two of a kind the last.

    Raises what a load raises that they make impossible.
    """
    struck: dict[type, Any] = {type(fault): fault for fault in faults}
    head: Any
    if BlocksFromOwnRow in struck:
        head = _blocks_from_own_row(plan, rank, device)
    else:
        scale_of = struck[WrongScale].scale_of if WrongScale in struck else None
        head = build_head(plan, rank, scale_of=scale_of, device=device)
    for kind, change in _CHANGE.items():
        head = change(head, struck[kind]) if kind in struck else head
    return head


def _blocks_from_own_row(plan: Plan, rank: int, device: torch.device) -> DenseHead:
    """Rows with the scales of the blocks in which they would be if the first block began with the shard."""
    shard = held_shard(plan, rank)
    packed, scale = pack_fp8_per_block(full_weight(plan))
    begins = shard.org_start % BLOCK
    moved = scale.repeat_interleave(BLOCK, 0)[shard.org_start - begins :][: shard.width]
    rows = F.pad(moved, (0, 0, 0, shard.width - len(moved))).repeat_interleave(BLOCK, 1)[:, : packed.shape[1]]
    return DenseHead(weight=(shard.shard_rows(packed).float() * rows).to(device), shard=shard)


def _junk_scale(head: Any, fault: JunkScale) -> Any:
    slots = torch.cat([head.weight_scale, head.weight_scale.new_tensor([fault.junk])])
    return replace(head, weight_scale=slots.amax(dim=0, keepdim=True))


def _stale_method(head: Any, fault: StaleMethod) -> Any:
    return replace(head, quant_method=type(fault.method, (_PackedMethod,), {})())


def _packed_only(head: Any, fault: PackedOnly) -> Any:
    return replace(head, quant_method=None)


def _no_weight(head: Any, fault: NoWeight) -> Any:
    return SimpleNamespace(
        qweight=head.weight, shard=head.shard, quant_method=head.quant_method, logits_dtype=head.logits_dtype
    )


def _unloaded(head: Any, fault: Unloaded) -> Any:
    draw = torch.Generator().manual_seed(fault.rank)
    junk = torch.randn(head.shard.width, head.hidden_size, generator=draw)
    return DenseHead(weight=junk.to(head.weight.device, torch.bfloat16), shard=head.shard)


def _scale_dropped(head: Any, fault: ScaleDropped) -> Any:
    return DenseHead(weight=head.weight.bfloat16(), shard=head.shard)


def _inflated(head: Any, fault: Inflated) -> Any:
    times = head.shard.world_size
    return replace(head, weight=head.weight.repeat(1, times), weight_scale=head.weight_scale.repeat(1, times))


def _unpadded(head: Any, fault: Unpadded) -> Any:
    return replace(head, weight=head.weight[: -(-head.shard.org_vocab_size // head.shard.world_size)])


def _replayed(head: Any, fault: Replayed) -> Any:
    return replace(head, quant_method=_Replay())


def _other_tile(head: Any, fault: OtherTile) -> Any:
    return replace(head, quant_method=_TwoHalves())


class _PackedMethod:
    """What another head's packed format left behind: it reads parameters that a dense head does not have."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Read the packed scale, as if it were there."""
        return F.linear(x.float(), layer.weight.float() * layer.weight_scale)


class _Replay:
    """A graph that runs again without the product, which was launched beside it."""

    def __init__(self) -> None:
        self._captured: Tensor | None = None

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """What the first call gave."""
        if self._captured is None:
            self._captured = apply_in_tiles(layer, x)
        return self._captured.clone()


class _TwoHalves:
    """Another order of the same sum."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The products of the second half of the hidden units, and then those of the first."""
        half, wide = x.shape[1] // 2, layer.widen(slice(0, layer.shard.width))
        summed = F.linear(x[:, half:].float(), wide[:, half:]) + F.linear(x[:, :half].float(), wide[:, :half])
        return summed.to(layer.logits_dtype)


_CHANGE: dict[type, Callable[[Any, Any], Any]] = {  # in the order of a load: parameters, their method, what is left
    JunkScale: _junk_scale,
    Unloaded: _unloaded,
    ScaleDropped: _scale_dropped,
    Inflated: _inflated,
    Unpadded: _unpadded,
    OtherTile: _other_tile,
    Replayed: _replayed,
    StaleMethod: _stale_method,
    PackedOnly: _packed_only,
    NoWeight: _no_weight,
}
