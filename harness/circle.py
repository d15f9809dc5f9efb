"""Circles: ranks that wait for each other, none of which has ended; and the one of them that left the common order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tpbed.harness.findings import Cause, Finding, name_group, name_ranks
from tpbed.harness.messages import tell_message
from tpbed.tp.ledger import CollectiveRecord, Ledger, MessageRecord

Record = CollectiveRecord | MessageRecord
Order = tuple[tuple[str, str], ...]  # op and site of each collective that a rank called


@dataclass(frozen=True, slots=True)
class Place:
    """A collective that some ranks are blocked in and some will never join; or a message, and one rank in it."""

    record: Record
    waiting: tuple[int, ...]
    absent: tuple[int, ...]
    roots: tuple[int, ...]  # absent for a reason of their own


def tell(record: Record, ledgers: Sequence[Ledger]) -> str:
    """`all_reduce seq 3 of group 2 (ranks 0, 1)`."""
    if isinstance(record, MessageRecord):
        return tell_message(record, ledgers)
    return f"{record.op} seq {record.seq} of {name_group(record.group, ledgers)}"


def explain_circle(circle: Sequence[Place], blocked: Mapping[int, Record], ledgers: Sequence[Ledger]) -> Finding:
    """A hang in which every rank waits for another.

    circle: where ranks wait, without bystanders; blocked: what each rank waits in.
    At fault are the ranks of the circle; or one of them alone, where all others call the same in the same order, and it
    does not.
    """
    ranks = tuple(sorted(rank for place in circle for rank in place.waiting))
    stray = _find_stray(ledgers)
    causes = tuple(_cause(rank, place, blocked[rank]) for place in circle for rank in place.waiting)
    if stray is not None and stray.rank in ranks:
        ranks, causes = (stray.rank,), (stray,)
    record = circle[0].record
    waits = "; ".join(f"{name_ranks(place.waiting)} in {tell(place.record, ledgers)}" for place in circle)
    return Finding(
        kind="hang",
        ranks=ranks,
        op=record.op,
        seq=record.seq,
        group=record.group,
        step=record.step,
        waiting_ranks=tuple(sorted(blocked)),
        text=f"ranks wait for each other in a circle: {waits}",
        causes=causes,
    )


def without_bystanders(places: Sequence[Place]) -> list[Place]:
    """The places with only those ranks for which somebody waits who is waited for, too, and so on.

    None is left where one waits for nobody who is known, as in dumps that do not list the members of groups.
    """
    circle = list(places)
    while True:
        wanted = {rank for place in circle for rank in place.absent}
        kept = [replace(place, waiting=tuple(r for r in place.waiting if r in wanted)) for place in circle]
        kept = [place for place in kept if place.waiting]
        if kept == circle:
            return circle
        circle = kept


def _cause(rank: int, place: Place, record: Record) -> Cause:
    return Cause(rank=rank, text=f"rank {rank} waits for {name_ranks(place.absent)}", site=record.site)


def _find_stray(ledgers: Sequence[Ledger]) -> Cause | None:
    """The one rank that calls something else where the others, as far as each of them has come, call the same.

    At least two others must have come as far, and be ranks that call as it does elsewhere or belong to its group: a
    part that only this rank and those who wait for it have is no departure.
    """
    orders = {ledger.rank: tuple((record.op, record.site) for record in ledger.collectives) for ledger in ledgers}
    for usual in sorted(orders.values(), key=len)[-2:]:
        odd = [rank for rank, order in orders.items() if usual[: len(order)] != order]
        if len(odd) == 1:
            return _stray(odd[0], orders, usual, ledgers)
    return None


def _stray(rank: int, orders: Mapping[int, Order], usual: Order, ledgers: Sequence[Ledger]) -> Cause | None:
    own = orders[rank]
    index = next((i for i, (mine, theirs) in enumerate(zip(own, usual, strict=False)) if mine != theirs), len(usual))
    if index == len(usual):
        return None
    record = ledgers[rank].collectives[index]
    group = ledgers[rank].groups[record.group]
    peers = [
        p for p, order in orders.items() if p != rank and len(order) > index and (p in group or own[index] in order)
    ]
    if len(peers) < 2:
        return None
    op, site = usual[index]
    told = f"{name_ranks(peers)} call {op} at {site}, and it calls {tell(record, ledgers)}"
    return Cause(rank=rank, text=f"rank {rank} leaves the order of its peers: {told}", site=record.site)
