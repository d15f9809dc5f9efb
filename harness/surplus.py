"""Surplus: ranks that wait in a collective too many, for peers that have returned as they should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from tpbed.harness.circle import Place
from tpbed.harness.findings import Cause
from tpbed.tp.ledger import CollectiveRecord, Ledger


def find_surplus(place: Place, ledgers: Sequence[Ledger], frozen: Collection[int]) -> tuple[Cause, ...]:
    """Why those who wait at `place` are at fault, one sentence for each; empty if those who never come are.

    They are, if they are not the majority, where all others have returned or do not get out of their last step, after
    as many collectives in it as the waiting ranks had made there; where finished steps of this run have just as many;
    and where there are none, if they are fewer.
    frozen: ranks that are stopped or stalled.
    """
    record = place.record
    if not isinstance(record, CollectiveRecord) or len(place.waiting) > len(place.absent):
        return ()
    peers = [ledgers[rank] for rank in place.absent]
    made = {_made(ledger, record) for ledger in peers} | {_made(ledgers[rank], record) - 1 for rank in place.waiting}
    if len(made) > 1 or made == {0} or not all(_is_through(ledger, record, frozen) for ledger in peers):
        return ()
    finished = {count for rank in place.waiting for count in _finished(ledgers[rank], record)}
    fewer = len(place.waiting) < len(place.absent) and not set(place.absent) <= set(frozen)
    fits = finished == made if finished else fewer
    return tuple(_cause(ledgers[rank], record, *made) for rank in place.waiting) if fits else ()


def _is_through(ledger: Ledger, record: CollectiveRecord, frozen: Collection[int]) -> bool:
    """Whether this step was the rank's last, and it has returned from it or is stuck in it."""
    last = ledger.steps[-1] if ledger.steps else ""
    returned = ledger.end is not None and ledger.end.how == "returned"
    return last == record.step and (returned or ledger.rank in frozen)


def _made(ledger: Ledger, record: CollectiveRecord) -> int:
    """How many collectives of its group the rank has issued in the step of `record`."""
    return sum(other.step == record.step for other in ledger.in_group(record.group))


def _finished(ledger: Ledger, record: CollectiveRecord) -> list[int]:
    """The same for each earlier step of the rank."""
    counts = Counter(other.step for other in ledger.in_group(record.group))
    return [counts[step] for step in ledger.steps if step != record.step]


def _cause(ledger: Ledger, record: CollectiveRecord, usual: int) -> Cause:
    own = next(other for other in ledger.in_group(record.group) if other.seq == record.seq)
    step = f"in step {own.step}" if own.step else "in all"
    return Cause(
        rank=ledger.rank,
        text=f"rank {ledger.rank} calls {own.op} seq {own.seq}, and its peers had returned after {usual} {step}",
        site=own.site,
    )
