"""count_orders: in how many orders steps can be taken, some of which need others before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import accumulate
from math import comb
from operator import and_

MOST = 10_000  # sets of steps that are held at a time to count the orders of a tangle


def count_orders(pasts: Sequence[int]) -> int | None:
    """The number of linear extensions of a partial order; None if it is too tangled to count.

    pasts: of each step, all that must come before it, as bits.
    What does not interleave is counted apart: parts that follow each other, and parts that have nothing to do with each
    other; what is left is counted set by set.
    """
    return _count(pasts, list(range(len(pasts))))


def _count(pasts: Sequence[int], steps: list[int]) -> int | None:
    orders = 1
    for part in _in_series(pasts, steps):
        placed = 0
        for piece in _side_by_side(pasts, part):
            placed += len(piece)
            alone = _count(pasts, piece) if len(piece) < len(steps) else _tangle(pasts, piece)
            if alone is None:
                return None
            orders *= comb(placed, len(piece)) * alone
    return orders


def _in_series(pasts: Sequence[int], steps: list[int]) -> Iterator[list[int]]:
    """Parts of which each comes wholly after the one before it."""
    among = _bits(steps)
    ranked = sorted(steps, key=lambda step: (pasts[step] & among).bit_count())
    common = list(accumulate((pasts[step] for step in reversed(ranked)), and_))[::-1]  # to this one and all after it
    begun, before = 0, 0
    for place in range(1, len(ranked) + 1):
        before |= 1 << ranked[place - 1]
        if place == len(ranked) or not before & ~common[place]:
            yield ranked[begun:place]
            begun = place


def _side_by_side(pasts: Sequence[int], steps: list[int]) -> Iterator[list[int]]:
    """Parts between which no step needs another."""
    parts: list[int] = []
    for step in steps:
        mine = pasts[step] & _bits(steps) | 1 << step
        parts, joined = [p for p in parts if not p & mine], [p for p in parts if p & mine]
        parts.append(reduce(lambda one, other: one | other, joined, mine))
    yield from ([step for step in steps if part >> step & 1] for part in parts)


def _tangle(pasts: Sequence[int], steps: list[int]) -> int | None:
    """By the sets of steps that can come first: the orders of each are those of the sets with one step less."""
    among, ways = _bits(steps), {0: 1}
    for _ in steps:
        longer: dict[int, int] = {}
        for taken, orders in ways.items():
            for step in steps:
                if not taken >> step & 1 and not pasts[step] & among & ~taken:
                    longer[taken | 1 << step] = longer.get(taken | 1 << step, 0) + orders
        if len(longer) > MOST:
            return None
        ways = longer
    return ways[among]


def _bits(steps: Sequence[int]) -> int:
    return sum(1 << step for step in steps)
