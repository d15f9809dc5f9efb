"""find_stuck: which ranks can never move again, proved from ledgers and liveness, without a clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tpbed.tp.ledger import WORLD, CollectiveRecord, Ledger, MessageRecord
from tpbed.tp.messages import Mail
from tpbed.tp.world import Liveness


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A rank blocked in a collective or message, and who has not issued the same, or died or raised in it."""

    rank: int
    record: CollectiveRecord | MessageRecord
    missing_ranks: tuple[int, ...]

    def is_over(self, movable: set[int]) -> bool:
        """Whether it ends if these ranks can move: all that are missing must come, or any one of them may."""
        if isinstance(self.record, MessageRecord) and self.record.anysource and self.missing_ranks:
            return not movable.isdisjoint(self.missing_ranks)
        return movable.issuperset(self.missing_ranks)


def find_missing(ledgers: Sequence[Ledger]) -> tuple[int, ...]:
    """The ranks for want of which the default group is not formed; all that are not in it, if they all came for it."""
    outside = [ledger for ledger in ledgers if WORLD not in ledger.groups]
    missing = [ledger for ledger in outside if ledger.end is not None or ledger.rendezvous != "arrived"]
    return tuple(ledger.rank for ledger in missing or outside)


def find_waits(ledgers: Sequence[Ledger]) -> dict[int, Wait]:
    """The ranks that are blocked in a collective or message, by rank; where all have joined, nobody is missing."""
    present, mail = [_places(ledger) for ledger in ledgers], Mail(ledgers)
    waits = {}
    for ledger in ledgers:
        record = ledger.waiting_in()
        if isinstance(record, MessageRecord):
            missing = mail.missing_ranks(ledger.rank, record)
            waits[ledger.rank] = Wait(rank=ledger.rank, record=record, missing_ranks=missing)
        elif record is not None:
            place = (record.group, record.seq)
            missing = tuple(r for r in ledger.groups[record.group] if place not in present[r])
            waits[ledger.rank] = Wait(rank=ledger.rank, record=record, missing_ranks=missing)
    return waits


def _places(ledger: Ledger) -> set[tuple[str, int]]:
    gone = ledger.end is not None and ledger.end.how != "returned"
    return {(r.group, r.seq) for r in ledger.collectives if r.state == "completed" or not gone}


def find_stuck(ledgers: Sequence[Ledger], liveness: Sequence[Liveness]) -> frozenset[int]:
    """The ranks that wait for one that can never join them, or for any of some that cannot: ended, dead, or stuck.

    The complement of a least fixpoint: a rank can move if it is running outside a collective, or if everyone that it
    waits for can move; the rest are stuck. A rank that is stopped or stalled may yet be continued, so whoever waits for
    it is not stuck by this proof, nor is a rank in a collective that all its peers have joined.
    Ended and dead are final and ledgers only grow, so the proof holds from the moment it is made; a cycle of waits is
    sound only if the ledgers were read at one moment, or twice with the same answer.
    """
    waits = find_waits(ledgers)
    movable = {r for r, seen in enumerate(liveness) if seen.state not in ("ended", "dead") and r not in waits}
    while True:
        freed = {r for r, wait in waits.items() if r not in movable and wait.is_over(movable)}
        if not freed:
            return frozenset(r for r in waits if r not in movable)
        movable |= freed
