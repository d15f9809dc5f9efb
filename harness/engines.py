"""Selectors in the shape of engines, with the bugs that these shapes have: `--selector tpbed.harness.engines:...`.

Written from what the engines do, in a few plain steps each, as a model of adapters to the real ones. What each gets
wrong, and where it is right, is in tpbed.scenarios.adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

AllGather = Callable[..., Tensor]
TopK = Callable[[Tensor, int], tuple[Tensor, Tensor]]
DENSE = (torch.float16, torch.bfloat16, torch.float32)
UNQUANTIZED = ("UnquantizedEmbeddingMethod", "UnquantizedLinearMethod", "PackWeightMethod")


def sglang_candidates(hidden: Tensor, lm_head: Any, k: int, topk: TopK, all_gather: AllGather) -> tuple[Tensor, Tensor]:
    """SGLang's candidate selector of DFlash drafts: a local top-k of each shard, two gathers, torch.topk of these.

    A dense head is multiplied without its padding, so that a shard may be narrower than k; a quantized one with it, and
    masked. Nothing checks k, and both top-ks leave the order of equal values open.
    Source: pull requests 35496 and 35580 of sgl-project/sglang.
    """
    values, columns = topk(_sglang_logits(hidden, lm_head), k)
    if lm_head.tp_size == 1:
        return columns, values
    ids = columns + lm_head.shard_indices.org_vocab_start_index
    values, ids = all_gather(values.float(), dim=-1), all_gather(ids, dim=-1)
    best, slots = torch.topk(values, k, dim=-1)
    return ids.gather(-1, slots), best


def _sglang_logits(hidden: Tensor, lm_head: Any) -> Tensor:
    one = lm_head.tp_size == 1
    num_org = lm_head.org_vocab_size if one else lm_head.shard_indices.num_org_elements
    method = lm_head.quant_method
    if callable(getattr(method, "apply", None)) and type(method).__name__ not in UNQUANTIZED:
        logits: Tensor = method.apply(lm_head, hidden).contiguous()
        logits[:, num_org:] = -inf
        return logits
    if lm_head.weight.dtype not in DENSE:
        raise RuntimeError(f"the head is {lm_head.weight.dtype}, and no quant method of it can be used.")
    return F.linear(hidden.to(lm_head.weight.dtype), lm_head.weight[:num_org])


def vllm_candidates(hidden_states: Tensor, lm_head: Any, k: int, all_gather: AllGather) -> tuple[Tensor, Tensor]:
    """vLLM's way from logits to tokens: gather whole rows, crop what is beyond the org vocabulary, one torch.topk.

    The crop is right while all padding lies at the end: added tokens lie between the org shares of two ranks.
    Source: LogitsProcessor of vllm-project/vllm.
    """
    shards = lm_head.quant_method.apply(lm_head, hidden_states, bias=lm_head.bias)
    logits = shards if lm_head.tp_size == 1 else all_gather(shards, dim=-1)
    values, ids = torch.topk(logits[..., : lm_head.org_vocab_size], k, dim=-1)
    return ids, values


def vllm_draft_token(hidden_states: Tensor, lm_head: Any, k: int, all_gather: AllGather) -> Tensor:
    """vLLM's draft tokens without whole rows: each rank's best and its id go as one float32 pair; k is 1, ids alone.

    Masks as many columns as the org share has padding, but the last ones of the shard, where added tokens lie.
    Source: LogitsProcessor.get_top_tokens of vllm-project/vllm.
    """
    if k != 1:
        raise ValueError(f"a draft token is one token, and k={k} were asked for.")
    shard = lm_head.shard_indices
    logits = lm_head.quant_method.apply(lm_head, hidden_states, bias=lm_head.bias)
    if shard.num_org_vocab_padding:
        logits[..., -shard.num_org_vocab_padding :] = -inf
    values, columns = logits.max(dim=-1)
    ids = columns + shard.org_vocab_start_index
    if lm_head.tp_size == 1:
        alone: Tensor = ids.unsqueeze(-1)
        return alone
    pairs = all_gather(torch.stack([values.float(), ids.float()], dim=-1), dim=-1).view(len(ids), -1, 2)
    best = pairs[..., 0].argmax(dim=-1, keepdim=True)
    best_ids: Tensor = pairs[..., 1].gather(-1, best)
    return best_ids.long()
