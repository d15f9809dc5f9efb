"""Ledger: one rank's own account of a run, folded from the events it wrote as it went."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, Literal

WORLD = "world"  # the ledger's name of the default group

DROPPED = "dropped: nobody holds its handle any more, so gloo has taken it back"  # the error of such a message
PENDING = "pending"  # the mark of an error that is on its way while its rank issues a collective: type, message, site

State = Literal["scheduled", "started", "completed", "failed"]
Rendezvous = Literal["", "outside", "arrived"]
EndHow = Literal["returned", "raised", "exited", "killed"]
Event = Sequence[Any]  # (kind, field, ...), plain values that JSON can hold


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRecord:
    """One collective as the rank issued it; `waited` says that the rank blocks until it completes."""

    group: str
    seq: int  # counts the rank's collectives in this group, from 1
    op: str
    dtype: str  # of the tensor that the rank contributes; "" where it contributes none
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements
    payload_bytes: int
    reduce_op: str = ""
    root: int | None = None  # rank within the group
    site: str = ""  # file:line function of the nearest caller outside torch and tpbed.tp
    step: str = ""
    state: State = "started"
    waited: bool = True
    asked: bool = False  # whether it is complete, before it was
    error: str = ""
    started_ns: int = 0
    ended_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRecord:
    """One message as the rank sends or receives it. Messages have numbers of their own, as in NCCL."""

    group: str
    seq: int  # counts the rank's messages in this group, sent and received, from 1
    op: Literal["send", "recv"]
    peer: int | None  # rank within the group; None: from whoever sends, until it is known
    tag: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements
    payload_bytes: int
    site: str = ""  # as of a collective
    step: str = ""
    state: State = "started"
    waited: bool = False
    error: str = ""
    started_ns: int = 0
    ended_ns: int | None = None
    anysource: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A choice that the rank took from facts of its own; `issued` collectives came before it."""

    name: str
    value: str
    because: str
    site: str
    step: str
    issued: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A named fact that a harness wants to survive the rank: a planned fault that fired, an answer."""

    name: str
    value: Any  # plain values that JSON can hold
    step: str
    issued: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a rank ended. `how` "exited" and "killed" are deaths of the process, seen from outside it."""

    how: EndHow
    error_type: str = ""
    message: str = ""
    site: str = ""
    traceback: str = ""
    exit_code: int | None = None
    signal: int | None = None
    at_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """All that a rank did in one run, in its own order. It only ever grows while the rank lives."""

    rank: int
    world_size: int
    groups: dict[str, tuple[int, ...]]  # name to global ranks, in group order
    collectives: tuple[CollectiveRecord, ...] = ()
    messages: tuple[MessageRecord, ...] = ()
    decisions: tuple[Decision, ...] = ()
    marks: tuple[Mark, ...] = ()
    steps: tuple[str, ...] = ()
    checks: int = 0
    rendezvous: Rendezvous = ""  # of a group that this run forms: the rank could come, has come; "" in an earlier one's
    end: End | None = None
    truncated: bool = False  # the black box was full: later events are missing

    def in_group(self, group: str) -> tuple[CollectiveRecord, ...]:
        """The rank's collectives in one group, by seq."""
        return tuple(record for record in self.collectives if record.group == group)

    def waiting_in(self) -> CollectiveRecord | MessageRecord | None:
        """The collective or message that the rank is blocked in, if it is in one."""
        if self.end is not None:
            return None
        records: Iterable[CollectiveRecord | MessageRecord] = chain(self.collectives, self.messages)
        return next((r for r in records if r.waited and r.state in ("scheduled", "started")), None)


def read_ledger(events: Iterable[Event], *, rank: int, world_size: int, truncated: bool = False) -> Ledger:
    """Fold a rank's events into its ledger.

    events: as Recorder wrote them, oldest first; unknown kinds are an error, a missing tail is not.
    Raises KeyError for an event kind that this version does not know.
    """
    book = _Book()
    for event in events:
        _FOLD[event[0]](book, *event[1:])
    return Ledger(
        rank=rank,
        world_size=world_size,
        groups=book.groups,
        collectives=tuple(map(_collective, book.collectives.values())),
        messages=tuple([MessageRecord(**fields) for fields in book.messages.values()]),
        decisions=tuple(book.decisions),
        marks=tuple(book.marks),
        steps=tuple(book.steps),
        checks=book.checks,
        rendezvous=book.rendezvous,
        end=book.end,
        truncated=truncated,
    )


_PUT = tuple(getattr(CollectiveRecord, field.name).__set__ for field in fields(CollectiveRecord))


def _collective(values: list[Any]) -> CollectiveRecord:
    """By the order of its fields, in half the time that the constructor of a frozen dataclass takes."""
    record: CollectiveRecord = object.__new__(CollectiveRecord)
    for put, value in zip(_PUT, values, strict=True):
        put(record, value)
    return record


_STATE, _WAITED, _ASKED, _ERROR, _ENDED_NS = (
    [field.name for field in fields(CollectiveRecord)].index(name)
    for name in ("state", "waited", "asked", "error", "ended_ns")
)


class _Book:
    step = ""

    def __init__(self) -> None:
        self.groups: dict[str, tuple[int, ...]] = {}
        self.collectives: dict[tuple[str, int], list[Any]] = {}  # the fields of each record, in their order
        self.messages: dict[tuple[str, int], dict[str, Any]] = {}
        self.decisions: list[Decision] = []
        self.marks: list[Mark] = []
        self.steps: list[str] = []
        self.checks = 0
        self.rendezvous: Rendezvous = ""
        self.end: End | None = None

    def comes(self, where: Rendezvous) -> None:
        self.rendezvous = where

    def group(self, name: str, ranks: Sequence[int]) -> None:
        self.groups[name] = tuple(ranks)

    def start(
        self,
        group: str,
        seq: int,
        op: str,
        dtype: str,
        shape: Sequence[int],
        stride: Sequence[int],
        payload_bytes: int,
        reduce_op: str,
        root: int | None,
        site: str,
        waited: bool,
        state: State,
        at_ns: int,
    ) -> None:
        layout = dtype, tuple(shape), tuple(stride), payload_bytes
        call = reduce_op, root, site, self.step, state, waited, False
        self.collectives[group, seq] = [group, seq, op, *layout, *call, "", at_ns, None]

    def change(self, group: str, seq: int, state: State, error: str, at_ns: int) -> None:
        record = self.collectives[group, seq]
        record[_STATE], record[_ERROR] = state, error
        record[_ENDED_NS] = at_ns if state in ("completed", "failed") else None

    def wait(self, group: str, seq: int) -> None:
        self.collectives[group, seq][_WAITED] = True

    def ask(self, group: str, seq: int) -> None:
        self.collectives[group, seq][_ASKED] = True

    def message(self, group: str, seq: int, op: str, peer: int | None, tag: int, *fields: Any) -> None:
        self.messages[group, seq] = {
            "group": group,
            "seq": seq,
            "op": op,
            "peer": peer,
            "tag": tag,
            "step": self.step,
            "anysource": peer is None,
            **dict(zip(_MESSAGE_FIELDS, fields, strict=True)),
        }
        layout = self.messages[group, seq]
        layout.update(shape=tuple(layout["shape"]), stride=tuple(layout["stride"]))

    def message_changes(self, group: str, seq: int, state: State, error: str, at_ns: int) -> None:
        ended = at_ns if state in ("completed", "failed") else None
        self.messages[group, seq].update(state=state, error=error, ended_ns=ended)

    def message_waits(self, group: str, seq: int) -> None:
        self.messages[group, seq]["waited"] = True

    def message_comes(self, group: str, seq: int, source: int) -> None:
        self.messages[group, seq]["peer"] = source

    def decision(self, name: str, value: str, because: str, site: str) -> None:
        self.decisions.append(
            Decision(name=name, value=value, because=because, site=site, step=self.step, issued=len(self.collectives))
        )

    def mark(self, name: str, value: Any) -> None:
        self.marks.append(Mark(name=name, value=value, step=self.step, issued=len(self.collectives)))

    def step_begins(self, label: str) -> None:
        self.steps.append(label)
        self.step = label

    def check(self, count: int) -> None:
        self.checks += count

    def ended(self, *fields: Any) -> None:
        self.end = End(**dict(zip(END_FIELDS, fields, strict=True)))


_MESSAGE_FIELDS = ("dtype", "shape", "stride", "payload_bytes", "site", "started_ns")
END_FIELDS = ("how", "error_type", "message", "site", "traceback", "exit_code", "signal", "at_ns")

_FOLD: dict[str, Callable[..., None]] = {
    "rendezvous": _Book.comes,
    "group": _Book.group,
    "start": _Book.start,
    "state": _Book.change,
    "wait": _Book.wait,
    "ask": _Book.ask,
    "message": _Book.message,
    "message_state": _Book.message_changes,
    "message_wait": _Book.message_waits,
    "message_from": _Book.message_comes,
    "decision": _Book.decision,
    "mark": _Book.mark,
    "step": _Book.step_begins,
    "check": _Book.check,
    "end": _Book.ended,
}
