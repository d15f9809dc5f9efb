"""VocabShard: which rows of a vocabulary one rank holds, and which of them are real tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd, lcm
from numbers import Integral

import torch
from torch import Tensor

from tpbed.selector.errors import SelectionError

NO_TOKEN = -1  # the id of a row or slot that stands for no token


def is_whole(number: object) -> bool:
    """Whether number is an integer, of Python or numpy; a bool, a float and a tensor are not, whatever they hold."""
    return isinstance(number, Integral) and not isinstance(number, bool)


class ShardError(SelectionError):
    """A vocabulary that cannot be shared out as asked, or rows that do not belong to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabShard:
    """The rows one rank holds, in order: num_org real tokens, org padding, num_added added tokens, added padding.

    Built by `even` (padded, equal widths, as engines do) or `uneven` (unpadded, a width per rank).
    Only the num_org rows can become candidates; num_org may be 0, and width too in an uneven shard.
    Source: VocabParallelEmbedding of SGLang and vLLM.
    """

    rank: int
    world_size: int
    org_vocab_size: int  # tokens before padding, over all ranks
    org_start: int  # token id of row 0
    num_org: int  # rows that hold org tokens
    num_org_padded: int  # rows before the first added token
    width: int  # rows held, padding and added tokens included
    added_vocab_size: int = 0  # added (LoRA) tokens over all ranks; their ids follow the org ones
    added_start: int = 0  # token id of row num_org_padded, if num_added
    num_added: int = 0  # rows that hold added tokens
    equal_widths: bool = True  # every rank holds width rows: a fact that all ranks know alike
    edge_divisor: int = 0  # divides each org token id at which one rank's share ends and another's begins; 0 if none

    def __post_init__(self) -> None:
        _check_rank(self.rank, self.world_size)
        if not 0 <= self.num_org <= self.num_org_padded <= self.num_org_padded + self.num_added <= self.width:
            raise ShardError(
                f"num_org={self.num_org}, num_org_padded={self.num_org_padded} and num_added={self.num_added} do not "
                f"fit into width={self.width} rows: build shards with VocabShard.even or VocabShard.uneven."
            )

    @classmethod
    def even(
        cls, rank: int, world_size: int, org_vocab_size: int, added_vocab_size: int = 0, pad_to: int = 64
    ) -> VocabShard:
        """Share org and added tokens out in equal parts, each kind padded to a multiple of pad_to tokens.

        A trailing rank may get few org tokens or none; added tokens fill the ranks from rank 0.
        Raises ShardError on every rank alike if a padded part does not divide by world_size.
        Source: SGLang's pad_vocab_size and get_masked_indices arithmetic, without its CPU-only widening of pad_to.
        """
        _check_sizes(world_size, org_vocab_size, added_vocab_size, pad_to)
        _check_rank(rank, world_size)
        org_padded = _round_up(org_vocab_size, pad_to)
        added_padded = _round_up(org_padded + added_vocab_size, pad_to) - org_padded
        org_share = _share("org_vocab_size", org_vocab_size, org_padded, world_size, pad_to)
        added_share = _share("added_vocab_size", added_vocab_size, added_padded, world_size, pad_to)
        org_start, org_end = _clamped(rank, org_share, 0, org_vocab_size)
        added_start, added_end = _clamped(rank, added_share, org_vocab_size, org_vocab_size + added_vocab_size)
        return cls(
            rank=rank,
            world_size=world_size,
            org_vocab_size=org_vocab_size,
            org_start=org_start,
            num_org=org_end - org_start,
            num_org_padded=org_share,
            width=org_share + added_share,
            added_vocab_size=added_vocab_size,
            added_start=added_start,
            num_added=added_end - added_start,
            edge_divisor=_edge_divisor(range(0, org_padded, org_share), org_vocab_size),
        )

    @classmethod
    def uneven(cls, rank: int, widths: Sequence[int]) -> VocabShard:
        """Give rank r the next widths[r] tokens, without padding; widths is the same list on every rank.

        Raises ShardError on every rank alike if a width is negative or no whole number, or all are 0.
        """
        if not all(map(is_whole, widths)) or min(widths, default=0) < 0 or sum(widths) < 1:
            raise ShardError(
                f"widths={list(widths)} hold no vocabulary: give each rank a whole number of 0 or more tokens, one at "
                f"least."
            )
        if is_whole(rank) and rank >= len(widths):
            raise ShardError(f"rank={rank} has no entry in widths={list(widths)}: list the width of every rank.")
        _check_rank(rank, len(widths))
        return cls(
            rank=rank,
            world_size=len(widths),
            org_vocab_size=sum(widths),
            org_start=sum(widths[:rank]),
            num_org=widths[rank],
            num_org_padded=widths[rank],
            width=widths[rank],
            added_start=sum(widths),
            equal_widths=len(set(widths)) == 1,
            edge_divisor=_edge_divisor(accumulate(widths), sum(widths)),
        )

    def token_ids(self) -> Tensor:
        """The token id of every row held: (width,) int64, NO_TOKEN (-1) in padding rows."""
        ids = torch.full((self.width,), NO_TOKEN, dtype=torch.int64)
        ids[: self.num_org] = torch.arange(self.org_start, self.org_start + self.num_org)
        ids[self._added_rows()] = torch.arange(self.added_start, self.added_start + self.num_added)
        return ids

    def shard_rows(self, weight_full: Tensor, *, padding: float | Tensor = 0.0) -> Tensor:
        """Lay out this rank's rows of a full weight or scale, in the order of the class.

        weight_full: (org_vocab_size + added_vocab_size, ...) of any dtype, row i for token id i.
        padding: what padding rows hold, a number or a tensor that broadcasts to the result; NaN and garbage are fine.
        Returns a new (width, ...) tensor of the same dtype and device.
        Raises ShardError on every rank alike if weight_full has another number of rows.
        """
        rows = self.org_vocab_size + self.added_vocab_size
        if weight_full.ndim < 1 or weight_full.shape[0] != rows:
            raise ShardError(
                f"weight_full has shape {tuple(weight_full.shape)}, but this vocabulary has {rows} tokens "
                f"({self.org_vocab_size} org, {self.added_vocab_size} added): give one row per token, unpadded."
            )
        local = weight_full.new_empty((self.width, *weight_full.shape[1:])).copy_(torch.as_tensor(padding))
        local[: self.num_org] = weight_full[self.org_start : self.org_start + self.num_org]
        local[self._added_rows()] = weight_full[self.added_start : self.added_start + self.num_added]
        return local

    def _added_rows(self) -> slice:
        return slice(self.num_org_padded, self.num_org_padded + self.num_added)


def _check_rank(rank: int, world_size: int) -> None:
    if not is_whole(rank) or not 0 <= rank < world_size:
        raise ShardError(f"rank={rank!r} is no rank of world_size={world_size}: use 0 to {world_size - 1}.")


def _edge_divisor(edges: Iterable[int], org_vocab_size: int) -> int:
    return gcd(*(edge for edge in edges if 0 < edge < org_vocab_size))


def _check_sizes(world_size: int, org_vocab_size: int, added_vocab_size: int, pad_to: int) -> None:
    whole = all(map(is_whole, (world_size, org_vocab_size, added_vocab_size, pad_to)))
    if not whole or min(world_size, org_vocab_size, pad_to) < 1 or added_vocab_size < 0:
        raise ShardError(
            f"world_size={world_size}, org_vocab_size={org_vocab_size}, added_vocab_size={added_vocab_size} and "
            f"pad_to={pad_to} describe no vocabulary: added_vocab_size must be 0 or more, the others 1 or more, all "
            f"whole numbers."
        )


def _share(name: str, tokens: int, padded: int, world_size: int, pad_to: int) -> int:
    if padded % world_size:
        raise ShardError(
            f"{name}={tokens} pads to {padded} columns, which world_size={world_size} cannot share equally: "
            f"use pad_to={lcm(pad_to, world_size)}."
        )
    return padded // world_size


def _clamped(rank: int, share: int, first: int, end: int) -> tuple[int, int]:
    return min(first + rank * share, end), min(first + (rank + 1) * share, end)


def _round_up(tokens: int, pad_to: int) -> int:
    return -(-tokens // pad_to) * pad_to
