"""Ledgers written by hand, as a few words per rank: what diagnosis is tested on without running anything."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tpbed.tp.ledger import PENDING, End, Event, Ledger, read_ledger
from tpbed.tp.world import Liveness

RUNNING, ENDED = Liveness(state="running"), Liveness(state="ended")
DEAD, STOPPED = Liveness(state="dead"), Liveness(state="stopped")
STALLED = Liveness(state="stalled", detail="in top-k")


class Story:
    """One rank's events, told in order; every method returns the story."""

    def __init__(self, rank: int, world_size: int = 4) -> None:
        self.rank, self.world_size = rank, world_size
        self.events: list[Event] = [("group", "world", list(range(world_size)))]
        self.seqs: dict[str, int] = {}

    def comes(self, *where: str) -> Story:
        """On its way to the rendezvous; as yet in no group."""
        self.events[0:1] = [("rendezvous", one) for one in ("outside", *where)]
        return self

    def group(self, name: str, ranks: Sequence[int]) -> Story:
        self.events.append(("group", name, list(ranks)))
        return self

    def step(self, label: str) -> Story:
        self.events.append(("step", label))
        return self

    def calls(
        self,
        op: str = "all_gather",
        *,
        dtype: str = "float32",
        shape: Sequence[int] = (4, 16),
        stride: Sequence[int] | None = None,
        group: str = "world",
        reduce_op: str = "",
        root: int | None = None,
        site: str = "merge.py:1 gather",
        done: bool = True,
        waited: bool = True,
    ) -> Story:
        seq = self.seqs[group] = self.seqs.get(group, 0) + 1
        strides = list(stride) if stride is not None else _contiguous(shape)
        at = len(self.events)
        self.events.append(
            ("start", group, seq, op, dtype, list(shape), strides, 64, reduce_op, root, site, waited, "started", at)
        )
        if done:
            self.events.append(("state", group, seq, "completed", "", at + 1))
        return self

    def message(
        self,
        op: str,
        peer: int | None,
        *,
        tag: int = 0,
        dtype: str = "float32",
        shape: Sequence[int] = (4,),
        done: bool = True,
        waited: bool = True,
    ) -> Story:
        seq = self.seqs["message"] = self.seqs.get("message", 0) + 1
        layout = (dtype, list(shape), _contiguous(shape), 4 * math.prod(shape))
        at = len(self.events)
        self.events.append(("message", "world", seq, op, peer, tag, *layout, "pipe.py:1 pass_on", at))
        if waited:
            self.events.append(("message_wait", "world", seq))
        if done:
            self.events.append(("message_state", "world", seq, "completed", "", at + 1))
        return self

    def waits(self, op: str = "all_gather", **fields: object) -> Story:
        return self.calls(op, done=False, **fields)  # type: ignore[arg-type]

    def fails(self, error: str, **fields: object) -> Story:
        self.calls(done=False, **fields)  # type: ignore[arg-type]
        group = str(fields.get("group", "world"))
        self.events.append(("state", group, self.seqs[group], "failed", error, len(self.events)))
        return self

    def asks(self, op: str = "all_gather", **fields: object) -> Story:
        """It issues a collective and asks in vain whether that is complete."""
        self.calls(op, done=False, waited=False, **fields)  # type: ignore[arg-type]
        group = str(fields.get("group", "world"))
        self.events.append(("ask", group, self.seqs[group]))
        return self

    def decides(self, name: str, value: str, because: str = "it says so") -> Story:
        self.events.append(("decision", name, value, because, "select.py:1 choose"))
        return self

    def holds_back(self, error_type: str, message: str) -> Story:
        """An error is on its way out as it makes its next call."""
        self.events.append(("mark", PENDING, [error_type, message, "topk.py:1 topk"]))
        return self

    def checks(self, count: int) -> Story:
        self.events.append(("check", count))
        return self

    def returns(self) -> Story:
        return self._ends("returned")

    def raises(self, error_type: str = "ValueError", message: str = "no") -> Story:
        return self._ends("raised", error_type, message, "topk.py:1 topk")

    def dies(self, signal: int = 9) -> Story:
        return self._ends("killed", "", "", "", signal)

    def exits(self, code: int = 1) -> Story:
        return self._ends("exited", exit_code=code)

    def _ends(
        self,
        how: str,
        error_type: str = "",
        message: str = "",
        site: str = "",
        signal: int | None = None,
        exit_code: int | None = None,
    ) -> Story:
        self.events.append(("end", how, error_type, message, site, "", exit_code, signal, len(self.events)))
        return self

    def ledger(self) -> Ledger:
        return read_ledger(self.events, rank=self.rank, world_size=self.world_size)


def tell(*stories: Story, frozen: dict[int, Liveness] | None = None) -> tuple[list[Ledger], list[Liveness]]:
    """Ledgers and liveness of a run, from one story per rank."""
    ledgers = [story.ledger() for story in stories]
    return ledgers, [(frozen or {}).get(ledger.rank, _liveness(ledger.end)) for ledger in ledgers]


def _liveness(end: End | None) -> Liveness:
    if end is None:
        return RUNNING
    return DEAD if end.how in ("killed", "exited") else ENDED


def _contiguous(shape: Sequence[int]) -> list[int]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return strides[: len(shape)]
