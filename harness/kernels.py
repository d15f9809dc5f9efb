"""KERNELS: top-ks with one defect each, as kernels in the field had it; right where the defect does not reach.

All take logits and k as tpbed.selector.topk.TopK says.
"""

from __future__ import annotations

from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from tpbed.selector.topk import TopK, canonical_topk, torch_topk
from tpbed.tp.rank import current

SHORT = 512  # columns of a row, below which another back end is chosen
SLOTS = 64  # of the buffer that a threshold bucket must fit into
WRAP = 2  # rows, after which an offset overflows


def spins_on_masked_rows(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Searches the range of the values for a threshold, and never ends where all of them are -inf."""
    if (logits == -inf).all(dim=-1).any():
        current().die("stall", f"in topk over {tuple(logits.shape)} logits of which a row is -inf throughout")
    return torch_topk(logits, k)


def deadlocks_at_three_rows(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Pads 3 rows to 4 with one of negative length, for which its blocks wait for ever."""
    if len(logits) == 3:
        current().die("stall", "in topk over 3 rows, padded to 4")
    return torch_topk(logits, k)


def fills_with_zeros(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Gives index -1 and value 0 where no finite logit is left, and sorts by value afterwards."""
    values, columns = torch_topk(logits, k)
    empty = values == -inf
    values, columns = values.masked_fill(empty, 0.0), columns.masked_fill(empty, -1)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return values, columns.gather(-1, order)


def leaves_counters(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Skips the select phase in rows of up to k finite logits, and leaves their counts to the next row."""
    few = (logits != -inf).sum(dim=-1) <= k
    after = F.pad(few[:-1], (1, 0)) & ~few
    values, columns = torch_topk(logits, min(2 * k, logits.shape[1]))
    shifted = torch.where(after.unsqueeze(-1), torch.arange(k, 2 * k).to(logits.device), torch.arange(k).to(columns))
    shifted = shifted.clamp_max(values.shape[1] - 1)
    return values.gather(-1, shifted), columns.gather(-1, shifted)


def overflows_its_bucket(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Keeps the first SLOTS of the columns that share their exponent with the k-th best, and drops the rest."""
    bucket = logits.float().abs().log2().floor() * logits.float().sign()
    threshold = bucket.gather(-1, torch_topk(logits, k)[1][:, -1:])
    inside = bucket == threshold
    dropped = inside & (inside.cumsum(dim=-1) > SLOTS)
    return torch_topk(logits.masked_fill(dropped, -inf), k)


def wraps_rows(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Overflows in the offset of a row: from row WRAP on it reads the first ones again."""
    return torch_topk(logits[torch.arange(len(logits), device=logits.device) % WRAP], k)


def drops_infinity_of_short_rows(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Takes a sampling back end for rows below SHORT columns, whose threshold leaves +inf out."""
    if logits.shape[1] >= SHORT:
        return torch_topk(logits, k)
    return torch_topk(logits.masked_fill(logits == inf, -inf), k)


def reads_k_too_wide(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Reads an array of 32-bit k, one for each row, as 64-bit: half as many, and beyond its end for the rest."""
    array = F.pad(torch.full((len(logits),), k, dtype=torch.int32), (0, len(logits) % 2)).view(torch.int64)
    read = F.pad(array, (0, len(logits) - len(array))).clamp_max(k).to(logits.device)
    values, columns = torch_topk(logits, k)
    beyond = torch.arange(k, device=logits.device) >= read.unsqueeze(-1)
    return values.masked_fill(beyond, -inf), columns


def counts_in_16_bits(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Keeps columns in 16 bits, which hold 65,536 of them."""
    values, columns = torch_topk(logits, k)
    return values, columns & 0xFFFF


def finds_four(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Finds 4 in each row, a constant of the kernel, whatever k is."""
    return torch_topk(logits, min(k, 4))


def repeats_an_id_at_nan(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Never advances beyond a comparison with NaN: its best finite column comes k times."""
    values, columns = torch_topk(logits.nan_to_num(nan=-inf, posinf=inf, neginf=-inf), k)
    stuck = logits.isnan().any(dim=-1, keepdim=True)
    return torch.where(stuck, values[:, :1], values), torch.where(stuck, columns[:, :1], columns)


def ranks_nan_last(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """A back end to which NaN is below everything."""
    return torch_topk(logits.nan_to_num(nan=-inf, posinf=inf, neginf=-inf), k)


def by_column(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The right k in the order of their columns: repeatable is not sorted."""
    columns = canonical_topk(logits, k)[1].sort(dim=-1).values
    return logits.gather(-1, columns), columns


def ties_to_larger_columns(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Of columns that tie with the k-th best the larger ones: repeatable is not canonical."""
    values, columns = canonical_topk(logits.flip(-1), k)
    return values, logits.shape[1] - 1 - columns


KERNELS: dict[str, TopK] = {
    "spins-on-masked-rows": spins_on_masked_rows,
    "deadlocks-at-three-rows": deadlocks_at_three_rows,
    "fills-with-zeros": fills_with_zeros,
    "leaves-counters": leaves_counters,
    "overflows-its-bucket": overflows_its_bucket,
    "wraps-rows": wraps_rows,
    "drops-infinity-of-short-rows": drops_infinity_of_short_rows,
    "reads-k-too-wide": reads_k_too_wide,
    "counts-in-16-bits": counts_in_16_bits,
    "finds-four": finds_four,
    "repeats-an-id-at-nan": repeats_an_id_at_nan,
    "ranks-nan-last": ranks_nan_last,
    "by-column": by_column,
    "ties-to-larger-columns": ties_to_larger_columns,
}
