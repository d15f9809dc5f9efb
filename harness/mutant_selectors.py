"""Selectors that are wrong by one change in one stage: padding, offsets, values, ids, the merge."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbed.harness.scenario import Overwrite
from tpbed.harness.staged import Staged
from tpbed.selector.errors import SelectionError
from tpbed.selector.merge import merge_gathered


class Crop(Staged):
    """Crops the padding off instead of masking it: the view is strided where it is real (sgl-project/sglang#35462)."""

    def mask(self, logits: Tensor) -> Tensor:
        return logits[:, : self.shard.num_org]


class NoMask(Staged):
    """Lets the padding columns compete: where every real logit is below theirs they win (mirage-project/mirage#751)."""

    def mask(self, logits: Tensor) -> Tensor:
        return logits


class LateMask(NoMask):
    """Masks after the local top-k, in which padding has taken the places of candidates (tenstorrent/tt-metal#47021)."""

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        values, columns = super().choose(logits)
        return values.masked_fill(columns >= self.shard.num_org, -inf), columns


class NoOffset(Staged):
    """Gathers columns of shards as if they were token ids (ggml-org/llama.cpp#27858)."""

    def name_tokens(self, columns: Tensor) -> Tensor:
        return columns.long()


class OffsetByWidth(Staged):
    """Takes rank * width for a shard's first id, which added rows and uneven shares shift (vllm-project/vllm#20843)."""

    def name_tokens(self, columns: Tensor) -> Tensor:
        return columns.long() + self.shard.rank * self.shard.width


class OffsetByLocalRank(Staged):
    """Counts shards by the rank within a node of two, where that of the group is meant (sglang-omni#2156)."""

    def name_tokens(self, columns: Tensor) -> Tensor:
        return columns.long() + self.shard.rank % 2 * self.shard.num_org_padded


class OffsetOneMore(Staged):
    """Lets shards but the first begin one id later, as if bounds were inclusive (ggml-org/llama.cpp#27858)."""

    def name_tokens(self, columns: Tensor) -> Tensor:
        return columns.long() + self.shard.org_start + (self.shard.rank > 0)


class OneRealColumnLess(Staged):
    """Masks from num_org - 1 on, and so the last token of each shard (vllm-project/vllm#15978)."""

    def mask(self, logits: Tensor) -> Tensor:
        logits[:, max(self.shard.num_org - 1, 0) :] = -inf
        return logits


class OnePaddingColumnMore(Staged):
    """Masks from num_org + 1 on, and lets one column of padding compete (tenstorrent/vllm#330)."""

    def mask(self, logits: Tensor) -> Tensor:
        logits[:, self.shard.num_org + 1 :] = -inf
        return logits


class AddedTokensCompete(Staged):
    """Masks the padding before the added rows, and leaves these open (sgl-project/sglang#35496 masks them)."""

    def mask(self, logits: Tensor) -> Tensor:
        logits[:, self.shard.num_org : self.shard.num_org_padded] = -inf
        logits[:, self.shard.num_org_padded + self.shard.num_added :] = -inf
        return logits


class MaskOfMinusTenThousand(Staged):
    """Masks with -1e4, which beats a real logit of -inf, and any below it (mirage-project/mirage#751)."""

    def mask(self, logits: Tensor) -> Tensor:
        logits[:, self.shard.num_org :] = -1e4
        return logits


class NanAsLowest(Staged):
    """Makes -inf of NaN, so that an invalid row looks sound (sgl-project/sglang#33187)."""

    def mask(self, logits: Tensor) -> Tensor:
        return self._sound(super().mask(logits))

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        values, columns = super().choose(logits)
        return self._sound(values), columns

    def _sound(self, values: Tensor) -> Tensor:
        return values.masked_fill(values.isnan(), -inf)


class CapsValues(Staged):
    """Hands out softcapped scores for logits: the same ids, other values (SGLang caps after the choice, in fp32)."""

    def prepare(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = super().prepare(hidden)
        return torch.where(values.isfinite(), 30 * torch.tanh(values / 30), values), ids


class Bf16Gather(Staged):
    """Gathers the values in bfloat16: those that differ by less than a step of it tie (sgl-project/sglang#33627)."""

    def gather(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = super().gather(values.bfloat16(), ids)
        return values.float(), ids


class FloatIds(Staged):
    """Gathers the ids in bfloat16, which holds whole numbers up to 256 (tenstorrent/tt-metal#25359)."""

    def gather(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return super().gather(values, ids.bfloat16().long())


class RanksReversed(Staged):
    """Lays gathered values out last rank first, and ids first rank first (NVIDIA/TensorRT-LLM#18155)."""

    def gather(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = super().gather(values, ids)
        return values.view(len(values), -1, self.k).flip(1).flatten(1), ids


class ScatterRowsFirst(Staged):
    """Views gathered parts as (ranks, rows, k), though they lie as (rows, ranks, k) (NVIDIA/TensorRT-LLM#7128)."""

    def gather(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = super().gather(values, ids)
        return self._rows_first(values), self._rows_first(ids)

    def _rows_first(self, parts: Tensor) -> Tensor:
        rows, ranks = len(parts), self.shard.world_size
        return parts.reshape(ranks, rows, self.k).transpose(0, 1).reshape(rows, ranks * self.k)


class KSharedOut(Staged):
    """Lets each rank bring only its share of the k places, rounded up (Atlas-Inf/atlas#46)."""

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        values, columns = super().choose(logits)
        share = -(-self.k // self.shard.world_size)
        return values[:, :share], columns[:, :share]


class LastPartLeftOut(Staged):
    """Loops over world_size - 1 of the gathered parts (NVIDIA/TensorRT-LLM#18155)."""

    def finish(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        count = max(values.shape[1] - self.k, self.k)
        return super().finish(values[:, :count], ids[:, :count])


class OwnPartTwice(Staged):
    """Writes its own candidates over those of the first rank, as an in-place gather with the wrong slot does."""

    def gather_one(self, local: Tensor) -> Tensor:
        gathered = super().gather_one(local)
        gathered[:, : self.k] = local
        return gathered


class OneBufferForAllParts(Staged):
    """Gathers into one tensor listed world_size times: the last part is every part (`[empty] * n`)."""

    def gather_one(self, local: Tensor) -> Tensor:
        parts = [torch.empty_like(local)] * self.shard.world_size
        dist.all_gather(parts, local, group=self.group)
        return torch.cat(parts, dim=-1)


class MaskedSlotsKeepIds(Staged):
    """Leaves the ids of -inf slots as they are: columns that are no tokens surface (flashinfer-ai/flashinfer#4123)."""

    def blank(self, values: Tensor, ids: Tensor) -> Tensor:
        return ids


class NanRowsKeepIds(Staged):
    """Marks the values of a row with NaN, and leaves its ids standing (vllm-project/vllm#40376)."""

    def screen(self, values: Tensor, ids: Tensor, invalid: Tensor) -> tuple[Tensor, Tensor]:
        return values.masked_fill(invalid, nan), ids


class TiesToHigherIds(Staged):
    """Lets the higher of two ids with one value go first (pytorch/pytorch#27542: the order is open)."""

    def order_of_ids(self, ids: Tensor) -> Tensor:
        return ids.sort(dim=-1, descending=True, stable=True).indices


class KeysOfRawBits(Staged):
    """Compares the bits of values as whole numbers: among negative ones the worst goes first (Terdiman, 2000)."""

    def keys(self, values: Tensor) -> Tensor:
        return values.view(torch.int32)


class MinusZeroBelowZero(Staged):
    """Ranks -0 below +0, as a radix top-k does, where the order has them equal (flashinfer.top_k, measured)."""

    def keys(self, values: Tensor) -> Tensor:
        bits = values.view(torch.int32)
        return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


class IdsLeftBehind(Staged):
    """Sorts the gathered values and takes the ids as they lie (vllm-project/vllm#52816)."""

    def finish(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return super().finish(values, ids)[0], ids[:, : self.k]


class EqualValuesOnce(Staged):
    """Keeps one token of each value, as a set of values would."""

    def finish(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        best, tokens = merge_gathered(values, ids, values.shape[1])
        again = torch.zeros_like(best, dtype=torch.bool)
        again[:, 1:] = best[:, 1:] == best[:, :-1]
        return merge_gathered(best.masked_fill(again, -inf), tokens, self.k)


class TorchMerge(Staged):
    """Merges with torch.topk, as SGLang does: the order among equals is open, and not the same at every TP."""

    def finish(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        best, slots = torch.topk(values, self.k, dim=-1)
        invalid = values.isnan().any(dim=-1, keepdim=True)
        return self.screen(best, self.blank(values, ids).gather(-1, slots), invalid)


class WorstFirst(Staged):
    """Gives the right candidates in ascending order (flashinfer-ai/flashinfer#3095)."""

    def finish(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = super().finish(values, ids)
        return values.flip(-1), ids.flip(-1)


class LastSlotRepeated(Staged):
    """Fills the last place with the candidate before it, as an index clamped to k - 2 does."""

    def finish(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = super().finish(values, ids)
        slots = torch.arange(self.k).clamp_max(max(self.k - 2, 0))
        return values[:, slots], ids[:, slots]


class OneRowLess(Staged):
    """Answers for all rows but the last, on every rank alike (sgl-project/sglang#27221 drops one on a rank)."""

    def finish(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = super().finish(values, ids)
        return values[:-1], ids[:-1]


class AddedRowsBetweenShares(Staged):
    """Gathers whole shards and crops to org_vocab_size, though added rows lie between (sgl-project/sglang#34859)."""

    def prepare(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.mask(self.project(hidden)).float()
        return logits, self.name_tokens(torch.arange(logits.shape[1])).expand_as(logits)

    def finish(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        whole = values[:, : self.shard.org_vocab_size]
        return super().finish(whole, torch.arange(whole.shape[1]).expand_as(whole))


class RefuseWideK(Staged):
    """Refuses a k beyond the columns of a shard, which all ranks together can serve (vllm-ascend#16628)."""

    def prepare(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if self.k > self.shard.width:
            raise SelectionError(f"k={self.k} exceeds the {self.shard.width} columns of a shard.")
        return super().prepare(hidden)


class KBeyondVocabulary(MaskedSlotsKeepIds):
    """Never asks whether there are k tokens: masked columns come out with ids of padding (sgl-project/sglang#35580)."""

    def check(self, hidden: Tensor) -> None:
        pass


SELECTORS: dict[str, type[Staged]] = {
    "crop": Crop,
    "no-mask": NoMask,
    "late-mask": LateMask,
    "no-offset": NoOffset,
    "offset-by-width": OffsetByWidth,
    "offset-by-local-rank": OffsetByLocalRank,
    "offset-one-more": OffsetOneMore,
    "one-real-column-less": OneRealColumnLess,
    "one-padding-column-more": OnePaddingColumnMore,
    "added-tokens-compete": AddedTokensCompete,
    "mask-of-minus-ten-thousand": MaskOfMinusTenThousand,
    "nan-as-lowest": NanAsLowest,
    "caps-values": CapsValues,
    "bf16-gather": Bf16Gather,
    "float-ids": FloatIds,
    "ranks-reversed": RanksReversed,
    "scatter-rows-first": ScatterRowsFirst,
    "k-shared-out": KSharedOut,
    "last-part-left-out": LastPartLeftOut,
    "own-part-twice": OwnPartTwice,
    "one-buffer-for-all-parts": OneBufferForAllParts,
    "masked-slots-keep-ids": MaskedSlotsKeepIds,
    "nan-rows-keep-ids": NanRowsKeepIds,
    "ties-to-higher-ids": TiesToHigherIds,
    "keys-of-raw-bits": KeysOfRawBits,
    "minus-zero-below-zero": MinusZeroBelowZero,
    "ids-left-behind": IdsLeftBehind,
    "equal-values-once": EqualValuesOnce,
    "torch-merge": TorchMerge,
    "worst-first": WorstFirst,
    "last-slot-repeated": LastSlotRepeated,
    "one-row-less": OneRowLess,
    "added-rows-between-shares": AddedRowsBetweenShares,
    "refuse-wide-k": RefuseWideK,
    "k-beyond-vocabulary": KBeyondVocabulary,
}
_SMALL = {"world_size": 2, "widths": None, "added_vocab_size": 0, "head": "bf16", "logits": "negative", "rows": 1}
_ZEROS = (Overwrite(row=0, token_id=3, value=-0.0), Overwrite(row=0, token_id=5, value=0.0))
_RAW = {"topk": "torch", "ties": "canonical"}  # leaves -0 as it is, and only zeros tie
_MASKED = tuple(Overwrite(row=0, token_id=token, value=-inf) for token in range(4))
_NAN = {"rows": 1, "overwrites": (Overwrite(row=0, token_id=0, value=nan),)}
NEEDS: dict[str, dict[str, Any]] = {
    "crop": {"topk": "contract", "ties": "equivalent"},  # which refuses views, as kernels do
    "nan-as-lowest": _NAN,
    "nan-rows-keep-ids": _NAN,
    "offset-by-width": {"widths": None, "added_vocab_size": 5},
    "mask-of-minus-ten-thousand": {**_SMALL, "org_vocab_size": 12, "pad_to": 10, "k": 12, "overwrites": _MASKED},
    "masked-slots-keep-ids": {**_SMALL, "org_vocab_size": 12, "pad_to": 10, "k": 12, "overwrites": _MASKED},
    "bf16-gather": {"head": "fp32", "logits": "gaussian"},
    "float-ids": {"widths": None, "org_vocab_size": 800, "pad_to": 840},
    "added-rows-between-shares": {"overwrites": ()},  # which come through the top-k, and it calls none
    "k-beyond-vocabulary": {**_SMALL, "org_vocab_size": 10, "pad_to": 64, "k": 16, "overwrites": ()},
    "minus-zero-below-zero": {**_SMALL, "org_vocab_size": 12, "pad_to": 2, "k": 4, "overwrites": _ZEROS, **_RAW},
}
