"""VirtualExit: what ends a process ends the simulated rank that calls it, and not the session that it runs in.

For a rank, and for nobody else: another thread, a process that a rank has forked, and the test bed itself keep the real
functions. A signal that a rank sends to its own process does what it does to a process: one that a handler of Python
catches calls that handler, one that is ignored is ignored, and the others end or stop the rank.

A KeyboardInterrupt that a rank raises with no SIGINT behind it is the rank's own error; Ctrl-C ends the session.

Out of reach is what does not look its function up in the module: `from os import _exit` at the head of a file, crashes
and exits of C code. os.exec replaces the session.
"""

from __future__ import annotations

import operator
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from greenlet import getcurrent

from tpbed.tp.ledger import End
from tpbed.tp.recorder import call_site
from tpbed.tp.simulated_run import SimulatedRun

_STOP = frozenset({signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU})
_HARMLESS = frozenset({0, signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH})  # unless they are caught


class VirtualExit:
    """Stands in for the functions that end a process while a run lasts. One serves all runs, which never overlap."""

    def __init__(self) -> None:
        self._run: SimulatedRun | None = None
        self._pid = 0
        self._interrupt: Any = None  # the handler of SIGINT that was there
        self._real: dict[tuple[Any, str], Any] = {}
        self._served = {
            (os, "_exit"): self._exit,
            (os, "abort"): self._abort,
            (os, "kill"): self._kill,
            (signal, "raise_signal"): self._raise_signal,
        }

    @contextmanager
    def in_place(self, run: SimulatedRun) -> Iterator[None]:
        """Meanwhile they end ranks; whatever happens, the functions that were there come back."""
        self._real = {(module, name): getattr(module, name) for module, name in self._served}
        self._run, self._pid = run, os.getpid()
        try:
            _put(self._served)
            with self._watching_for_interrupts():
                yield
        finally:
            _put(self._real)
            self._run = None

    @contextmanager
    def _watching_for_interrupts(self) -> Iterator[None]:
        """Only the main thread can be interrupted, and only where SIGINT has a handler in Python."""
        self._interrupt = handler = signal.getsignal(signal.SIGINT)
        watches = callable(handler) and threading.current_thread() is threading.main_thread()
        if not watches:
            yield
            return
        signal.signal(signal.SIGINT, self._interrupted)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self._run is not None:
            self._run.interrupted = True
        self._interrupt(number, frame)

    def _exit(self, status: Any) -> None:
        """os._exit. The low byte of the status counts, as in a process."""
        run = self._asked()
        if run is None:
            self._real[os, "_exit"](status)
            return
        code = operator.index(status) & 0xFF
        run.leave(_end(run, how="exited", exit_code=code, message=f"exited with status {code}"))

    def _abort(self) -> None:
        run = self._asked()
        self._real[os, "abort"]() if run is None else _kill(run, signal.SIGABRT)

    def _kill(self, pid: int, number: int, /) -> None:
        run = self._asked() if pid == self._pid else None
        self._real[os, "kill"](pid, number) if run is None else self._send(run, number)

    def _raise_signal(self, number: int, /) -> None:
        run = self._asked()
        self._real[signal, "raise_signal"](number) if run is None else self._send(run, number)

    def _send(self, run: SimulatedRun, number: int) -> None:
        """To the rank's own process."""
        handler = signal.getsignal(number) if number in set(signal.Signals) else None
        if handler == self._interrupted:
            self._interrupt(number, sys._getframe(2))
        elif handler is signal.SIG_DFL and number in _STOP:
            run.die("stop", signal.Signals(number).name)
        elif handler is signal.SIG_DFL and number not in _HARMLESS:
            _kill(run, signal.Signals(number))
        else:
            self._real[os, "kill"](self._pid, number)

    def _asked(self) -> SimulatedRun | None:
        """The run, if it is one of its ranks that asks."""
        run = self._run
        rank = None if run is None else run.current
        ours = rank is not None and rank.greenlet is getcurrent() and os.getpid() == self._pid
        return run if ours else None


def _kill(run: SimulatedRun, number: signal.Signals) -> None:
    run.leave(_end(run, how="killed", signal=int(number), message=f"killed by {number.name}"))


def _end(run: SimulatedRun, **fields: Any) -> End:
    return End(site=call_site(sys._getframe(1)), at_ns=run.clock(), **fields)


def _put(functions: dict[tuple[Any, str], Any]) -> None:
    for (module, name), function in functions.items():
        setattr(module, name, function)
