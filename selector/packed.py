"""Packed keys: a value and a token id as one int64 whose order is the canonical one; and the merge by them."""

from __future__ import annotations

from math import inf, nan

import torch
import torch.distributed as dist
from torch import Tensor

from tpbed.selector.errors import SelectionError
from tpbed.selector.merge import gather_columns
from tpbed.selector.shard import NO_TOKEN

MAX_ID = 2**31 - 1  # the largest token id that a key holds
_LOW = 2**32 - 1


def pack_keys(values: Tensor, ids: Tensor) -> Tensor:
    """One int64 for each candidate: the larger the key, the better - value descending, then id ascending.

    values: any shape, any floating dtype, read as float32; ids: the same shape, integers from NO_TOKEN to MAX_ID.
    The high half is the value's float32 bits, brought into the order of integers; the low half is 2**32 - 1 - id.
    -0 counts as +0. NaN of either sign is one key half, above +inf. -inf stands for no token, whatever its id.
    Cost: some passes over int64 copies; exact.
    """
    bits = (values.float() + 0.0).masked_fill(values.isnan(), nan).view(torch.int32)  # -0 + 0 is +0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    absent = (ids < 0) | (values == -inf)
    low = (_LOW - ids.long()).masked_fill(absent, 0)
    return ordered * 2**32 + low


def unpack_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Values float32 and ids int64 of keys, as pack_keys took them; NO_TOKEN where no token is."""
    ordered, low = (keys >> 32).int(), keys & _LOW
    values = torch.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).view(torch.float32)
    return values, torch.where(low == 0, NO_TOKEN, _LOW - low)


def best_keys(keys: Tensor, k: int) -> Tensor:
    """The k largest of each row, largest first: (rows, k). Keys of tokens differ, so that there is but one answer."""
    return torch.topk(keys, k, dim=-1, sorted=True).values


def keyed_topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """canonical_topk by keys: value descending, then column ascending, -0 equal to +0, NaN first; a TopK.

    A -inf keeps its column. Cost: an int64 copy of the logits and one torch.topk, and no sort of whole rows.
    """
    columns = torch.arange(logits.shape[-1], device=logits.device).expand_as(logits)
    bits = (logits.float() + 0.0).masked_fill(logits.isnan(), nan).view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() * 2**32 + (_LOW - columns)
    chosen = _LOW - (best_keys(keys, k) & _LOW)
    return logits.gather(-1, chosen) + 0.0, chosen


def packed_merge(values: Tensor, ids: Tensor, *, k: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Gather every rank's candidates as keys and keep the k best in canonical order; every rank calls this.

    values: (rows, up to k) of any floating dtype, ids: the same shape, global token ids up to MAX_ID.
    Returns values (rows, k) float32 and ids (rows, k) int64, as merge_gathered does: a row with NaN is invalid.
    The same bits at every TP, whatever rows stand beside a row and in whatever order shards come, if each rank's
    candidates hold its k best by canonical order (canonical_topk, keyed_topk).
    Cost: one all_gather of k * 8 bytes per row and rank; none in a group of one.
    Source: the key is ours; ordered float bits as in radix sorts (Terdiman, Radix Sort Revisited, 2000).
    """
    return best_candidates(gather_keys(pack_keys(values, ids), k=k, group=group), k)


def gather_keys(keys: Tensor, *, k: int, group: dist.ProcessGroup | None) -> Tensor:
    """All ranks' keys side by side, each rank's (rows, up to k) brought to k columns: (rows, k * world_size)."""
    keys = torch.nn.functional.pad(keys, (0, k - keys.shape[1]), value=NO_KEY)
    alone = not dist.is_initialized() or dist.get_world_size(group) == 1
    return keys if alone else gather_columns(keys, group)


def best_candidates(keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row's keys as values (rows, k) float32 and ids (rows, k) int64; screened as screen_keys."""
    return screen_keys(best_keys(keys, k))


def screen_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Values and ids of best-first keys; a row with NaN, which comes first, has ids of -1 and values of NaN."""
    values, ids = unpack_keys(keys)
    invalid = values[:, :1].isnan()
    return values.masked_fill(invalid, nan), ids.masked_fill(invalid, NO_TOKEN)


def require_packable(org_vocab_size: int) -> None:
    """Raise SelectionError, on every rank alike, for a vocabulary with ids that a key cannot hold."""
    if org_vocab_size - 1 > MAX_ID:
        raise SelectionError(
            f"org_vocab_size={org_vocab_size} has ids above {MAX_ID}, which a packed key cannot hold: "
            f'use merge="two_gather".'
        )


NO_KEY = int(pack_keys(torch.tensor([-inf]), torch.tensor([NO_TOKEN])))
