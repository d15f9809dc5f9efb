"""VirtualTime: the functions of the `time` module, on the clock of a simulated world while its ranks run.

For a rank, and for nobody else: another thread, and the test bed itself, keep the real ones. The clock starts at
START_S with every run, so that a run repeats itself exactly; a turn takes a microsecond, a sleep what it says, and
computing nothing.

Out of reach is what does not look its function up in the module: `from time import sleep` at the head of a file,
threading's and queue's waits with a time-out, datetime.now(), the C library; process_time and thread_time stay real.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from greenlet import getcurrent

from tpbed.tp.refusal import cannot_wait
from tpbed.tp.simulated_run import SimulatedRun

START_S = 1_700_000_000  # time.time() of every rank when it starts; monotonic clocks start at 0

_CLOCKS = {"monotonic": 0, "perf_counter": 0, "time": START_S}


class VirtualTime:
    """Stands in for the functions of `time` while a run lasts. One serves all runs, since they never overlap."""

    def __init__(self) -> None:
        self._run: SimulatedRun | None = None
        self._real: dict[str, Any] = {}  # what was there
        self._served: dict[str, Any] = {"sleep": self._sleep}
        for name, start_s in _CLOCKS.items():
            self._served[name] = partial(self._seconds, name, start_s)
            self._served[f"{name}_ns"] = partial(self._nanoseconds, f"{name}_ns", start_s * 10**9)

    @contextmanager
    def in_place(self, run: SimulatedRun) -> Iterator[None]:
        """Let ranks find simulated time meanwhile; whatever happens, the functions that were there come back."""
        module = vars(time)
        self._real = {name: module[name] for name in self._served}
        self._run = run
        try:
            module.update(self._served)
            yield
        finally:
            module.update(self._real)
            self._run = None

    def _sleep(self, seconds: Any, /) -> None:
        """time.sleep: others run meanwhile, if the rank is where it can wait."""
        run, _ = self._asked()
        if run is None or not seconds >= 0:  # the real one says what is wrong
            self._real["sleep"](seconds)
        elif cannot_wait():
            run.now_ns += round(seconds * 1e9)
        else:
            run.sleep(seconds)

    def _seconds(self, name: str, start_s: int) -> float:
        run, rank = self._asked()
        return float(self._real[name]() if run is None else start_s + run.look_at_clock(rank) / 1e9)

    def _nanoseconds(self, name: str, start_ns: int) -> int:
        run, rank = self._asked()
        return int(self._real[name]() if run is None else start_ns + run.look_at_clock(rank))

    def _asked(self) -> tuple[SimulatedRun | None, Any]:
        """The run, and the rank that asks; nothing where somebody else does."""
        run = self._run
        rank = None if run is None else run.current
        return (run, rank) if rank is not None and rank.greenlet is getcurrent() else (None, None)
