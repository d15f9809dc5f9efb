"""Messages of all ranks, as they belong together: the n-th send of a pair and tag to the n-th receive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tpbed.tp.ledger import DROPPED, Ledger, MessageRecord

Line = tuple[str, int, int, int]  # group, source and destination (global ranks), tag


@dataclass(slots=True)
class _Ends:
    """What was sent along one line, and what was received or is to be, in the order of the calls."""

    sends: list[MessageRecord] = field(default_factory=list)
    receives: list[MessageRecord] = field(default_factory=list)


class Mail:
    """The messages in some ledgers."""

    def __init__(self, ledgers: Sequence[Ledger]) -> None:
        self._ledgers = ledgers
        self._lines: dict[Line, _Ends] = {}
        self._dropped: list[tuple[int, MessageRecord, int]] = []
        self._open: dict[tuple[str, int, int], int] = {}  # receives from anybody, under way: group, rank, tag
        for ledger in ledgers:
            for record in ledger.messages:
                if record.error == DROPPED and record.peer is not None:
                    self._dropped.append((ledger.rank, record, ledger.groups[record.group][record.peer]))
                elif not _is_void(ledger, record):
                    self._sort(ledger, record)

    def pairs(self) -> Iterator[tuple[int, MessageRecord, int, MessageRecord]]:
        """Source, its send, destination, its receive: of each message that both ends have called."""
        for (_, source, target, _), ends in self._lines.items():
            for send, receive in zip(ends.sends, ends.receives, strict=False):
                yield source, send, target, receive

    def unpaired(self) -> Iterator[tuple[int, MessageRecord, int]]:
        """Rank, its end of a message, and the peer that had not called the other end in time."""
        yield from self._dropped
        for (_, source, target, _), ends in self._lines.items():
            for send in ends.sends[len(ends.receives) :]:
                yield source, send, target
            for receive in ends.receives[len(ends.sends) :]:
                yield target, receive, source

    def missing_ranks(self, rank: int, record: MessageRecord) -> tuple[int, ...]:
        """Whom the message of `rank` waits for: its peer, unless that has called its end; one of many, if anysource."""
        if record.peer is None:
            return self._possible_sources(rank, record)
        peer = self._ledgers[rank].groups[record.group][record.peer]
        line = _line(rank, peer, record)
        ends = self._lines.get(line, _Ends())
        mine, theirs = (ends.sends, ends.receives) if record.op == "send" else (ends.receives, ends.sends)
        spare = self._open.get((record.group, peer, record.tag), 0) if record.op == "send" else 0
        is_met = record in mine and mine.index(record) < len(theirs) + spare
        return () if is_met else (peer,)

    def _possible_sources(self, rank: int, record: MessageRecord) -> tuple[int, ...]:
        others = tuple(other for other in self._ledgers[rank].groups[record.group] if other != rank)
        lines = (self._lines.get(_line(rank, other, record), _Ends()) for other in others)
        return () if any(len(ends.sends) > len(ends.receives) for ends in lines) else others

    def _sort(self, ledger: Ledger, record: MessageRecord) -> None:
        if record.peer is None:
            place = (record.group, ledger.rank, record.tag)
            self._open[place] = self._open.get(place, 0) + 1
            return
        peer = ledger.groups[record.group][record.peer]
        ends = self._lines.setdefault(_line(ledger.rank, peer, record), _Ends())
        (ends.sends if record.op == "send" else ends.receives).append(record)


def _line(rank: int, peer: int, record: MessageRecord) -> Line:
    source, target = (rank, peer) if record.op == "send" else (peer, rank)
    return record.group, source, target, record.tag


def _is_void(ledger: Ledger, record: MessageRecord) -> bool:
    """Refused at the call, taken back, or under way when its rank died or raised; one too long has come, though."""
    gone = ledger.end is not None and ledger.end.how != "returned"
    failed = record.state == "failed" and not record.error.startswith("OverrunError")
    return failed or (gone and record.state not in ("completed", "failed"))
