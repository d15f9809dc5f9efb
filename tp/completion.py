"""CompletionWatch: finds out when asynchronous collectives and messages start and end, and writes it to the ledger."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tpbed.tp.rank import Call
from tpbed.tp.recorder import Recorder

_PAUSE_S = (0.0002, 0.005)  # between two looks: after something happened, and the longest
_BLOCKED_S = 0.2  # a host that has stood at one place for so long, with a collective open, is waiting for it
_SLEEPS = frozenset(("35", "230", "23", "270", "101", "115"))  # nanosleep and select calls, of x86-64 and of arm64


@dataclass(slots=True, kw_only=True)
class _Open:
    """A collective or message that is about to be issued, or was and has not completed."""

    group: str
    seq: int
    may_start: Any  # a CUDA event: what was on the stream before the collective is done
    work: dist.Work | None = None  # of an asynchronous call
    has_ended: Callable[[], bool] | None = None  # once it is issued
    started: bool = False
    is_message: bool = False


class CompletionWatch:
    """Follows the collectives and messages of one rank on its GPU, in one run; a thread of the rank polls what is open.

    The host does not say that it waits: it blocks in some synchronisation that nobody sees. So a main thread that has
    stood at one place of its program for 0.2 s, not asleep, is taken to wait for the oldest that is open.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._open: list[_Open] = []
        self._changed = threading.Condition()
        self._is_over = False
        self._place, self._since = (0, 0), 0.0  # of the main thread in its program, and since when it is there
        threading.Thread(target=self._run, name="tpbed-completion", daemon=True).start()

    def before(self, call: Call) -> Call:
        """A hook: a collective is about to be issued, if no other hook swallows it."""
        with self._changed:
            self._open = [collective for collective in self._open if collective.has_ended is not None]
            self._open.append(_Open(group=call.group, seq=call.seq, may_start=_event()))
            self._changed.notify()
        return call

    def watch(self, work: dist.Work | None, group: str, seq: int) -> None:
        """It was issued; there is no handle if the stream itself waits for it."""
        with self._changed:
            issued = self._open[-1]
            issued.work, issued.has_ended = work, _event().query if work is None else work.is_completed
            self._changed.notify()

    def message(self, group: str, seq: int) -> Callable[[dist.Work | None], None]:
        """A message is about to be issued. Returns what is to be told when it was, with its handle, or its batch's."""
        opened = _Open(group=group, seq=seq, may_start=_event(), is_message=True)
        self._recorder.message_state(group, seq, "scheduled")
        with self._changed:
            self._open.append(opened)  # the call itself waits for the peer, where the two have to connect first
            self._changed.notify()

        def issued(work: dist.Work | None) -> None:
            with self._changed:
                opened.work, opened.has_ended = work, _event().query if work is None else work.is_completed
                self._changed.notify()

        return issued

    def finish(self) -> None:
        """Wait until all collectives are done and written down."""
        torch.cuda.synchronize()
        while any(collective.has_ended is not None for collective in self._open):
            self._look()

    def close(self) -> None:
        """Look no further."""
        with self._changed:
            self._is_over = True
            self._open.clear()
            self._changed.notify()

    def _run(self) -> None:
        pause_s = _PAUSE_S[0]
        while not self._is_over:
            pause_s = _PAUSE_S[0] if self._look() else min(2 * pause_s, _PAUSE_S[1])
            self._infer_wait()
            with self._changed:
                self._changed.wait(pause_s if self._open else None)

    def _look(self) -> bool:
        """True if a collective has started or ended since the last look."""
        with self._changed:
            return sum(self._look_at(collective) for collective in list(self._open)) > 0

    def _look_at(self, collective: _Open) -> bool:
        if collective.has_ended is None:
            return False
        place, ends = (collective.group, collective.seq), collective.has_ended()
        write = self._recorder.message_state if collective.is_message else self._recorder.state
        starts = not collective.started and (ends or collective.may_start.query())
        if starts:
            collective.started = True
            write(*place, "started")
        if ends:
            self._open.remove(collective)
            error = _error_of(collective.work)
            write(*place, "failed" if error else "completed", error)
        return starts or ends

    def _infer_wait(self) -> None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        place = (id(frame), frame.f_lasti) if frame is not None and not _main_sleeps() else (0, 0)
        if place != self._place or place == (0, 0):
            self._place, self._since = place, time.monotonic()
        elif time.monotonic() - self._since > _BLOCKED_S:
            self._since = float("inf")  # once at a place
            with self._changed:
                issued = [collective for collective in self._open if collective.has_ended is not None]
                waited = issued[:1] or self._open[-1:]
            for oldest in waited:
                if oldest.is_message:
                    self._recorder.message_wait(oldest.group, oldest.seq)
                elif self._recorder.seqs[oldest.group] >= oldest.seq:  # no hook holds it up or has swallowed it
                    self._recorder.wait(oldest.group, oldest.seq)


def _event() -> Any:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def _error_of(work: dist.Work | None) -> str:
    with suppress(Exception):
        error = None if work is None else work.exception()
        return "" if error is None else str(error)
    return ""


def _main_sleeps() -> bool:
    try:
        return Path(f"/proc/self/task/{os.getpid()}/syscall").read_text().split()[0] in _SLEEPS
    except OSError:
        return False
