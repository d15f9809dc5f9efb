"""two_gather_merge: every rank's k best to the k best of the vocabulary, the same on every rank."""

from __future__ import annotations

from math import inf, nan

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpbed.selector.shard import NO_TOKEN


def two_gather_merge(values: Tensor, ids: Tensor, *, k: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Gather every rank's candidates and keep the k best in canonical order; every rank calls this.

    values: (rows, up to k) of any floating dtype, ids: the same shape, global token ids of any integer dtype.
    Returns values (rows, k) float32 and ids (rows, k) int64, ordered and screened as merge_gathered says.
    Cost: two all_gathers, of k * 4 and k * 8 bytes per row and rank whatever a shard holds; none in a group of one.
    Source: candidate_topk of SGLang; the order among equals and the rules for -inf and NaN are ours.
    """
    values, ids = pad_candidates(values.float(), ids.long(), k)
    if dist.get_world_size(group) > 1:
        values, ids = gather_columns(values, group), gather_columns(ids, group)
    return merge_gathered(values, ids, k)


def pad_candidates(values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Bring best-first lists to exactly k columns with (-inf, -1), so that no gather's width depends on the rank."""
    missing = k - values.shape[1]
    return F.pad(values, (0, missing), value=-inf), F.pad(ids, (0, missing), value=NO_TOKEN)


def gather_columns(local: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """all_gather local (rows, k) and lay the parts side by side: (rows, world_size * k), rank 0 first."""
    local = local.contiguous()
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, local, group=group)
    return torch.cat(parts, dim=-1)


def merge_gathered(values: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of gathered candidates: value descending, then id ascending, -0 equal to +0.

    values: (rows, candidates) float32, ids: the same shape, int64; candidates is at least k.
    Returns values (rows, k) and ids (rows, k). A candidate of -inf has id -1, so that padding and masked tokens never
    surface. A row with a NaN among its candidates is invalid: all its ids are -1, all its values NaN.
    """
    ids, by_id = ids.masked_fill(values == -inf, NO_TOKEN).sort(dim=-1, stable=True)
    values = values.gather(-1, by_id) + 0.0  # -0 + 0 is +0
    values, by_value = values.sort(dim=-1, descending=True, stable=True)
    ids, invalid = ids.gather(-1, by_value), values.isnan().any(dim=-1, keepdim=True)
    return values[:, :k].masked_fill(invalid, nan), ids[:, :k].masked_fill(invalid, NO_TOKEN)
