"""CompletionWatch: finds out when asynchronous collectives start and end, and writes it to the ledger."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tpbed.tp.rank import Call
from tpbed.tp.recorder import Recorder

_PAUSE_S = (0.0002, 0.005)  # between two looks: the first after something happened, and the longest
_BLOCKED_S = 0.5  # a host that has stood at one place for so long, with a collective open, is waiting for it
_SLEEPS = frozenset(("35", "230", "23", "270", "101", "115"))  # nanosleep and select calls, x86-64 and arm64


@dataclass(slots=True, kw_only=True)
class _Pending:
    work: dist.Work
    recorder: Recorder
    group: str
    seq: int
    may_start: Any  # a CUDA event: what was on the stream before the collective is done
    started: bool = False


class CompletionWatch:
    """Follows the collectives of one rank on its GPU; a thread of the rank polls what is open.

    The host does not say that it waits: it blocks in some synchronisation that nobody sees. So a main thread that has
    stood at one place of the program for half a second, not asleep, is taken to wait for the oldest open collective.
    """

    def __init__(self, recorder_of: Callable[[], Recorder]) -> None:
        """recorder_of: the recorder of the current run."""
        self._recorder_of = recorder_of
        self._pending: list[_Pending] = []
        self._wake = threading.Event()
        self._may_start: Any = None
        self._stood = ((0, 0), 0.0)  # a place of the main thread, and since when it has been there
        self._waited: _Pending | None = None
        threading.Thread(target=self._run, name="tpbed-completion", daemon=True).start()

    def before(self, call: Call) -> Call:
        """A hook: note on the stream what comes before a collective."""
        self._may_start = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._may_start.record()
        return call

    def watch(self, work: dist.Work, group: str, seq: int) -> None:
        """A collective was issued."""
        pending = _Pending(work=work, recorder=self._recorder_of(), group=group, seq=seq, may_start=self._may_start)
        self._pending.append(pending)
        self._wake.set()

    def forget(self) -> None:
        """The run is over: look no further."""
        self._pending.clear()

    def _run(self) -> None:
        pause = _PAUSE_S[0]
        while True:
            if not self._pending:
                self._wake.wait()
            self._wake.clear()
            changed = [self._look(pending) for pending in list(self._pending)]
            pause = _PAUSE_S[0] if any(changed) else min(2 * pause, _PAUSE_S[1])
            self._infer_wait()
            time.sleep(pause)

    def _look(self, pending: _Pending) -> bool:
        place = pending.group, pending.seq
        done = bool(pending.work.is_completed())
        starts = not pending.started and (done or pending.may_start is None or pending.may_start.query())
        if starts:
            pending.started = True
            pending.recorder.state(*place, "started")
        if done and pending in self._pending:
            self._pending.remove(pending)
            pending.recorder.state(*place, "completed" if pending.work.is_success() else "failed")
        return starts or done

    def _infer_wait(self) -> None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        here = (id(frame), frame.f_lasti) if frame is not None and self._pending and not _main_sleeps() else (0, 0)
        if here != self._stood[0] or here == (0, 0):
            self._stood = here, time.monotonic()
        elif time.monotonic() - self._stood[1] > _BLOCKED_S and self._waited is not self._pending[0]:
            self._waited = self._pending[0]
            self._waited.recorder.wait(self._waited.group, self._waited.seq)


def _main_sleeps() -> bool:
    try:
        with open(f"/proc/self/task/{os.getpid()}/syscall", encoding="ascii") as file:
            return file.read().split()[0] in _SLEEPS
    except OSError:
        return False
