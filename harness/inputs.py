"""Inputs: the weights, hidden states and true logits of a plan, the same wherever they are computed."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tpbed.harness.plan import Plan
from tpbed.harness.scenario import HeadFormat, Logits, Scenario, ScenarioError
from tpbed.harness.smollm2 import head_weight
from tpbed.harness.smollm2 import hidden_states as trained_states
from tpbed.selector.fp8 import Fp8Head
from tpbed.selector.head import DenseHead
from tpbed.selector.quantized import FORMATS, QuantizedHead
from tpbed.selector.reference import error_bound, reference_logits
from tpbed.selector.shard import VocabShard
from tpbed.selector.tiles import TiledMethod

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    **dict.fromkeys(FORMATS, torch.bfloat16),
}
CPU = torch.device("cpu")
LADDER = 8192  # distinct values from 1 upward that bfloat16 and float16 hold side by side with room above them


def build_shard(scenario: Scenario, rank: int) -> VocabShard:
    """The columns that belong to `rank`.

    Raises ShardError on every rank alike where the vocabulary cannot be shared so.
    """
    if scenario.widths is not None:
        return VocabShard.uneven(rank, scenario.widths)
    return VocabShard.even(
        rank, scenario.world_size, scenario.org_vocab_size, scenario.added_vocab_size, scenario.pad_to
    )


def held_shard(plan: Plan, rank: int) -> VocabShard:
    """The columns that `rank` holds in this run: another rank's, where the plan has shards in another order."""
    return build_shard(plan.scenario, plan.shard_order[rank] if plan.shard_order else rank)


def build_head(
    plan: Plan, rank: int, *, scale_of: int | None = None, device: torch.device = CPU
) -> DenseHead | QuantizedHead:
    """The lm_head of one rank: its rows of the whole weight, dense or packed, on `device`.

    scale_of: the rank whose scales a packed head carries by mistake; None for its own.
    Raises ShardError on every rank alike where the format cannot be shared so.
    """
    scenario, shard = plan.scenario, held_shard(plan, rank)
    if scenario.head not in FORMATS:
        dense = shard.shard_rows(full_weight(plan), padding=scenario.pad_fill)
        return DenseHead(weight=dense.to(device), shard=shard)
    packed = _packed(_weight_key(scenario), plan.weight_seed)
    head = FORMATS[scenario.head].head(packed, shard)
    if scale_of is not None:
        other = FORMATS[scenario.head].head(packed, held_shard(plan, scale_of))
        head = replace(head, weight_scale=other.weight_scale)
    return _on_device(head, device)


def hidden_states(plan: Plan, step: int, *, rows: int | None = None) -> Tensor:
    """What the head multiplies in a step: (rows, hidden_size) in the head's logits dtype; the plan's row_order of them.

    rows: how many, where a rank believes something else than the scenario says.
    """
    scenario = plan.scenario
    wanted = scenario.rows if rows is None else rows
    if scenario.logits == "gaussian":
        draw = torch.Generator().manual_seed(plan.step_seeds[step])
        states = torch.randn(wanted, scenario.hidden_size, generator=draw)
    else:
        whole = trained_states() if scenario.logits == "smollm2" else torch.eye(scenario.hidden_size)
        states = whole[(torch.arange(wanted) + step * scenario.rows) % len(whole)]
    shown = states[list(plan.row_order)] if plan.row_order and rows is None else states
    return shown.to(DTYPES[scenario.head])


def true_logits(plan: Plan, step: int) -> tuple[Tensor, Tensor]:
    """The unsharded logits of a step in float64, and how far a right computation may be from each.

    Returns two (rows, org_vocab_size) float64 tensors. The rounding point is the head's logits dtype. Planted logits
    are products with one single term, so they are exact and their bound is zero.
    """
    scenario = plan.scenario
    hidden, weight = hidden_states(plan, step), _true_weight(plan)
    logits = reference_logits(hidden, weight)
    if scenario.logits in ("gaussian", "smollm2") or scenario.head in FORMATS:
        bound = error_bound(hidden, weight, DTYPES[scenario.head])
    else:
        bound = torch.zeros_like(logits)
    for one in scenario.overwrites:
        logits[one.row, one.token_id], bound[one.row, one.token_id] = one.value, 0.0
    return logits, bound


def full_weight(plan: Plan) -> Tensor:
    """The whole head before packing and padding, one row per org and added token; shared, so do not write."""
    return _weight(_weight_key(plan.scenario), plan.weight_seed)


def _true_weight(plan: Plan) -> Tensor:
    scenario, org = plan.scenario, plan.scenario.org_vocab_size
    if scenario.head not in FORMATS:
        return full_weight(plan)[:org]
    return FORMATS[scenario.head].dequantise(_packed(_weight_key(scenario), plan.weight_seed))[:org]


def _on_device(head: QuantizedHead, device: torch.device) -> QuantizedHead:
    """On `device`, with the method that true_logits can bound on any: activations are not quantized."""
    stored = {field.name: getattr(head, field.name) for field in fields(head)}
    moved: dict[str, Any] = {name: value.to(device) for name, value in stored.items() if isinstance(value, Tensor)}
    method = TiledMethod() if isinstance(head, Fp8Head) else head.quant_method
    return replace(head, quant_method=method, **moved)


_WeightKey = tuple[int, int, HeadFormat, Logits]  # tokens, hidden_size, head, logits


def _weight_key(scenario: Scenario) -> _WeightKey:
    tokens = scenario.org_vocab_size + scenario.added_vocab_size
    return tokens, scenario.hidden_size, scenario.head, scenario.logits


@lru_cache(maxsize=4)
def _packed(key: _WeightKey, seed: int) -> dict[str, Tensor]:
    head = key[2]
    if head not in FORMATS:
        raise ScenarioError(f"head={head!r} is not packed: use one of {', '.join(FORMATS)}.")
    return FORMATS[head].pack(_weight(key, seed))


@lru_cache(maxsize=8)
def _weight(key: _WeightKey, seed: int) -> Tensor:
    tokens, hidden_size, head, logits = key
    if logits == "smollm2":
        return head_weight(DTYPES[head])[:tokens]
    draw = torch.Generator().manual_seed(seed)
    if logits == "gaussian":
        return torch.randn(tokens, hidden_size, generator=draw).to(DTYPES[head])
    ranks = torch.stack([torch.randperm(tokens, generator=draw) for _ in range(hidden_size)], dim=1)
    return _planted(ranks, tokens, logits).to(DTYPES[head])


def _planted(ranks: Tensor, tokens: int, logits: Logits) -> Tensor:
    if logits == "equal":
        return torch.ones_like(ranks, dtype=torch.float32)
    if logits == "tied":
        return ladder(ranks // 4)
    if logits == "distinct":
        return ladder((ranks - max(tokens - LADDER, 0)).clamp_min(0))
    if logits == "negative":
        return -ladder((tokens - 1 - ranks).clamp_max(LADDER - 1))
    raise ScenarioError(f"logits={logits!r} are not planted: use distinct, negative, tied or equal.")


def ladder(rungs: Tensor) -> Tensor:
    """Distinct float32 values for whole numbers: the rung-th bfloat16 from 1 upward, exact in float16 up to rung 1,919.

    rungs: int64, 0 to 16,255.
    """
    return (rungs.to(torch.int32) + 0x3F80).to(torch.int16).view(torch.bfloat16).float()
