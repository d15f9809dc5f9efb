"""Heads that are wrong by one change: rows, scales, packing, the product; each takes the right head and its plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tpbed.harness.inputs import build_head, full_weight
from tpbed.harness.plan import Plan
from tpbed.selector.nvfp4 import FP4_MAX, FP8_MAX

HeadChange = Callable[[Any, Plan], Any]


def neighbours_rows(head: Any, plan: Plan) -> Any:
    """Holds the weight rows of the next rank (sgl-project/sglang#16215 adds rows 0 and up on every rank)."""
    return replace(head, weight=_fitted(_of_rank(plan, _next(head)).weight, head.weight))


def rows_shifted(head: Any, plan: Plan) -> Any:
    """Row j holds token j + 1: the loader left one row out (vllm-project/vllm#12230)."""
    return replace(head, weight=_rolled(head.weight))


def every_rank_loads_the_first_shard(head: Any, plan: Plan) -> Any:
    """Calls itself rank 0, rows and ids alike, as ranks do that each see one device (sglang-omni#2156)."""
    if _of_rank(plan, 0).shard.width != head.shard.width:
        return head
    first = _of_rank(plan, 0)
    return replace(first, shard=replace(first.shard, rank=head.shard.rank))


def never_loaded(head: Any, plan: Plan) -> Any:
    """Keeps the zeros that it was allocated with: the checkpoint fills another name (sgl-project/sglang#35358)."""
    return replace(head, weight=torch.zeros_like(head.weight))


def tied_weight_stale(head: Any, plan: Plan) -> Any:
    """On the last rank has the weight before the update of the embedding it is tied to (vllm#52147)."""
    is_last = head.shard.rank == head.shard.world_size - 1
    return replace(head, weight=_before_update(head, plan).weight) if is_last else head


def scale_of_next_shard(head: Any, plan: Plan) -> Any:
    """Carries the scales of the next rank's rows (jundot/omlx#2844)."""
    return replace(head, weight_scale=_fitted(_of_rank(plan, _next(head)).weight_scale, head.weight_scale))


def scale_stale(head: Any, plan: Plan) -> Any:
    """Has new weights and the scales of the weights before them: a weight update that names one tensor of two."""
    return replace(head, weight_scale=_before_update(head, plan).weight_scale)


def scale_dropped(head: Any, plan: Plan) -> Any:
    """Ignores its scales (NVIDIA/TensorRT-LLM#17728)."""
    return replace(head, weight_scale=torch.ones_like(head.weight_scale))


def scale_twice(head: Any, plan: Plan) -> Any:
    """Applies its scales to the weight, and once more to the sums."""
    return replace(head, weight_scale=head.weight_scale * head.weight_scale)


def scale_of_own_rows(head: Any, plan: Plan) -> Any:
    """Takes its one scale from the largest entry of its own rows, though all were packed with one (sglang#29151)."""
    rows = full_weight(plan)[head.shard.org_start :][: head.shard.num_org].float()
    amax = rows.abs().max() if rows.numel() else torch.zeros(())
    return replace(head, weight_scale=(amax / FP8_MAX).reshape(1).to(head.weight.device))


def scale_in_bfloat16(head: Any, plan: Plan) -> Any:
    """Rounds its float32 scales to bfloat16, as a cast of the whole module does."""
    return replace(head, weight_scale=head.weight_scale.bfloat16().float())


def scalar_scale_over_junk(head: Any, plan: Plan) -> Any:
    """Takes the largest of its scale and slots that nobody wrote, other ones on each rank (sglang#29151)."""
    junk = 2.0 ** (head.shard.rank % 4) * head.weight_scale.max()
    return replace(head, weight_scale=torch.maximum(head.weight_scale, junk))


def global_scale_dropped(head: Any, plan: Plan) -> Any:
    """Ignores the one scale for all groups (sgl-project/sglang#29151 reads a wrong one)."""
    return replace(head, global_scale=torch.ones_like(head.global_scale))


def global_scale_multiplies(head: Any, plan: Plan) -> Any:
    """Reads compressed-tensors' global scale, which divides, as ModelOpt's, which multiplies."""
    return replace(head, layout="modelopt")


def nibbles_swapped(head: Any, plan: Plan) -> Any:
    """Reads the high half of each byte first."""
    return replace(head, weight=(head.weight >> 4) | (head.weight << 4))


def groups_shifted(head: Any, plan: Plan) -> Any:
    """Gives each group of 16 the scale of the row below (huggingface/transformers#37543)."""
    return replace(head, weight_scale=_rolled(head.weight_scale.view(torch.uint8)).view(torch.float8_e4m3fn))


def groups_without_blocks_scale(head: Any, plan: Plan) -> Any:
    """Drops the scales of groups and keeps the global one."""
    amax = torch.full_like(head.weight_scale.float(), FP8_MAX / FP4_MAX)
    return replace(head, weight_scale=amax.to(torch.float8_e4m3fn))


def int8_as_unsigned(head: Any, plan: Plan) -> Any:
    """Takes 128 off each int8 code, a zero point that symmetric codes do not have."""
    return replace(head, weight=head.weight.bitwise_xor(torch.tensor(-128, dtype=torch.int8)))


def fp8_as_e5m2(head: Any, plan: Plan) -> Any:
    """Reads e4m3 codes as e5m2, the other format of eight bits."""
    wide = head.weight.view(torch.float8_e5m2).float().nan_to_num(0.0, FP8_MAX, -FP8_MAX)
    return replace(head, weight=wide.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn))


def method_lost_on_one_rank(head: Any, plan: Plan) -> Any:
    """Lost its quant method on the last rank, and keeps the packed weight (sgl-project/sglang#35534)."""
    return replace(head, quant_method=None) if head.shard.rank == head.shard.world_size - 1 else head


def method_left_by_another(head: Any, plan: Plan) -> Any:
    """Is dense and carries a packed head's method, which asks for scales (vllm-project/vllm#52147)."""
    return replace(head, quant_method=_Method(lambda logits, layer: logits * layer.weight_scale))


def logits_in_uint8(head: Any, plan: Plan) -> Any:
    """Writes logits to a buffer of the packed weight's dtype (sgl-project/sglang#34742)."""
    return _through(head, lambda logits: logits.nan_to_num(0.0).clamp(0, 255).to(torch.uint8).float())


def logits_in_bfloat16(head: Any, plan: Plan) -> Any:
    """Rounds float32 logits to bfloat16 before they are compared (sgl-project/sglang#33627)."""
    return _through(head, lambda logits: logits.bfloat16().float())


def sums_in_bfloat16(head: Any, plan: Plan) -> Any:
    """Adds the halves of split-K in bfloat16, rounded each (sgl-project/sglang#33627)."""
    return replace(head, quant_method=_Halves())


def activations_in_fp8(head: Any, plan: Plan) -> Any:
    """Quantizes the hidden states, which this head's format leaves as they are."""
    return replace(head, quant_method=_Reads(lambda x: x.float().to(torch.float8_e4m3fn).to(x.dtype)))


def last_unit_left_out(head: Any, plan: Plan) -> Any:
    """Multiplies all hidden units but the last: a loop over K that drops its remainder."""
    return replace(head, quant_method=_Reads(lambda x: torch.cat([x[:, :-1], torch.zeros_like(x[:, -1:])], dim=1)))


def bias_of_another_rank(head: Any, plan: Plan) -> Any:
    """Adds what its rank's adapter has to give, though heads have none (sgl-project/sglang#16215)."""
    return _through(head, lambda logits: logits + float(head.shard.rank > 0))


@dataclass(frozen=True, slots=True)
class _Method:
    """The plain product, and a change of the logits."""

    change: Callable[[Tensor, Any], Tensor]

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.change(_product(layer, x), layer)


@dataclass(frozen=True, slots=True)
class _Reads:
    """The plain product, and a change of the hidden states."""

    change: Callable[[Tensor], Tensor]

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return _product(layer, self.change(x))


class _Halves:
    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        even = torch.arange(x.shape[1]) % 2 == 0
        halves = (_product(layer, x.masked_fill(even != which, 0.0)).bfloat16() for which in (True, False))
        return sum(halves, torch.zeros((), dtype=torch.bfloat16)).to(layer.logits_dtype)


def _through(head: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return replace(head, quant_method=_Method(lambda logits, layer: change(logits)))


def _product(layer: Any, x: Tensor) -> Tensor:
    wide = layer.widen(slice(0, layer.shard.width)) if hasattr(layer, "widen") else layer.weight.float()
    product: Tensor = (x.float() @ wide.t()).to(layer.logits_dtype)
    return product


def _next(head: Any) -> int:
    following: int = (head.shard.rank + 1) % head.shard.world_size
    return following


def _of_rank(plan: Plan, rank: int) -> Any:
    return build_head(replace(plan, shard_order=()), rank)


def _before_update(head: Any, plan: Plan) -> Any:
    return _of_rank(replace(plan, weight_seed=plan.weight_seed ^ 1), head.shard.rank)


def _fitted(rows: Tensor, like: Tensor) -> Tensor:
    """Rows of another shard where there are as many."""
    return (rows if rows.shape == like.shape else like).to(like.device)


def _rolled(rows: Tensor) -> Tensor:
    return torch.cat([rows[1:], rows[:1]])


HEADS: dict[str, HeadChange] = {
    "neighbours-rows": neighbours_rows,
    "rows-shifted": rows_shifted,
    "every-rank-loads-the-first-shard": every_rank_loads_the_first_shard,
    "never-loaded": never_loaded,
    "tied-weight-stale": tied_weight_stale,
    "scale-of-next-shard": scale_of_next_shard,
    "scale-stale": scale_stale,
    "scale-dropped": scale_dropped,
    "scale-twice": scale_twice,
    "scale-of-own-rows": scale_of_own_rows,
    "scale-in-bfloat16": scale_in_bfloat16,
    "scalar-scale-over-junk": scalar_scale_over_junk,
    "global-scale-dropped": global_scale_dropped,
    "global-scale-multiplies": global_scale_multiplies,
    "nibbles-swapped": nibbles_swapped,
    "groups-shifted": groups_shifted,
    "groups-scale-dropped": groups_without_blocks_scale,
    "int8-as-unsigned": int8_as_unsigned,
    "fp8-as-e5m2": fp8_as_e5m2,
    "method-lost-on-one-rank": method_lost_on_one_rank,
    "method-left-by-another": method_left_by_another,
    "logits-in-uint8": logits_in_uint8,
    "logits-in-bfloat16": logits_in_bfloat16,
    "sums-in-bfloat16": sums_in_bfloat16,
    "activations-in-fp8": activations_in_fp8,
    "last-unit-left-out": last_unit_left_out,
    "bias-of-another-rank": bias_of_another_rank,
}
_OF_ROWS = ("scale-of-next-shard", "scale-stale", "scale-dropped", "scale-twice", "scale-in-bfloat16")
_OF_FP8 = ("fp8-as-e5m2", "method-lost-on-one-rank", "logits-in-uint8")
_OF_NVFP4 = (
    *("global-scale-dropped", "global-scale-multiplies", "nibbles-swapped"),
    *("groups-shifted", "groups-scale-dropped"),
)
_OF_SUMS = ("sums-in-bfloat16", "last-unit-left-out")
NEEDS: dict[str, dict[str, Any]] = {
    **{name: {"head": "fp8"} for name in (*_OF_ROWS, *_OF_FP8)},
    "scale-of-own-rows": {"head": "fp8-tensor", "logits": "gaussian"},
    "scalar-scale-over-junk": {"head": "fp8-tensor"},
    **{name: {"head": "nvfp4-ct"} for name in _OF_NVFP4},
    **{name: {"logits": "gaussian"} for name in _OF_SUMS},
    "activations-in-fp8": {"head": "fp8", "logits": "gaussian"},
    "int8-as-unsigned": {"head": "int8"},
    "method-left-by-another": {"head": "bf16"},
    "logits-in-bfloat16": {"head": "fp32", "logits": "gaussian"},
}
