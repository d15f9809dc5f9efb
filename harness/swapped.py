"""swap_ranks: the ledgers of a run in which another rank did what the culprit did; and what must be found there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tpbed.harness.findings import Finding
from tpbed.tp.ledger import Ledger
from tpbed.tp.world import Liveness

Names = Mapping[int, int]  # of two ranks, each that of the other


def swap_ranks(
    ledgers: Sequence[Ledger], liveness: Sequence[Liveness], one: int, other: int
) -> tuple[tuple[Ledger, ...], tuple[Liveness, ...]]:
    """The same run, had these two ranks changed places: each has the other's ledger, and its place in all groups.

    Roots and peers stay: they are places within groups.
    """
    names = {one: other, other: one}
    moved = {named.rank: named for named in (_renamed(ledger, names) for ledger in ledgers)}
    ranks = range(len(ledgers))
    return tuple(moved[rank] for rank in ranks), tuple(liveness[names.get(rank, rank)] for rank in ranks)


def _renamed(ledger: Ledger, names: Names) -> Ledger:
    groups = {name: _all(members, names) for name, members in ledger.groups.items()}
    return replace(ledger, rank=names.get(ledger.rank, ledger.rank), groups=groups)


def _all(ranks: Sequence[int], names: Names) -> tuple[int, ...]:
    return tuple(names.get(rank, rank) for rank in ranks)


Gist = tuple[Any, ...]


def gist(findings: Sequence[Finding], names: Names | None = None) -> frozenset[Gist]:
    """What findings say, in any order and words: kinds, places, ranks and causes. names: what ranks are called.

    The step is left out: at one place ranks may be in several, and a finding has that of the first of them.
    """
    known = names or {}
    return frozenset(
        (
            (one.kind, one.op, one.seq, one.group),
            frozenset(_all(one.ranks, known)),
            frozenset(_all(one.waiting_ranks, known)),
            frozenset((known.get(c.rank, c.rank), c.error_type, c.site) for c in one.causes),
        )
        for one in findings
    )
