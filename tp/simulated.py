"""SimulatedWorld: ranks as greenlets of this process. No real clock, no sockets.

Everything is repeatable: the order of ranks, the clock - the `time` module's too (tp/virtual_time.py) -, and the result
of every collective.

What this world cannot do. A rank that computes for ever without a call to torch.distributed or to its context keeps the
whole world waiting, and so does one that waits for something outside it. What it refuses by name is in tp/refusal.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from greenlet import getcurrent, greenlet

from tpbed.tp.attribution import Attribution
from tpbed.tp.errors import TestbedError
from tpbed.tp.isolation import CallersOwn
from tpbed.tp.schedule import RoundRobin, Schedule
from tpbed.tp.simulated_run import REFUSALS, SimulatedRun
from tpbed.tp.torch_seam import TorchSeam
from tpbed.tp.virtual_exit import VirtualExit
from tpbed.tp.virtual_time import VirtualTime
from tpbed.tp.world import RankProgram, WorldRun, require_world_size

_running: SimulatedRun | None = None
_TIME, _EXIT, _ATTRIBUTION = VirtualTime(), VirtualExit(), Attribution()


class NestedWorldError(TestbedError):
    """A simulated world was to run while one was running in this process."""


class ClosedWorldError(TestbedError):
    """A world was to run after it was closed."""


class UnwindError(TestbedError):
    """A rank program did not let its run end: it catches every exception and goes on."""


class SimulatedWorld:
    """A world whose ranks are greenlets of the calling thread, on the CPU or on one CUDA device that they share.

    world_size: ranks. A thousand are fine, and cost a thousand times what one costs.
    schedule: who runs next, round-robin by default. It starts over with every run, so a run can be repeated exactly.
    device: where the contexts of the ranks say that they work.
    """

    name = "sim"

    make_run: Callable[..., SimulatedRun] = SimulatedRun

    def __init__(
        self, world_size: int = 4, schedule: Schedule | None = None, device: str | torch.device = "cpu"
    ) -> None:
        require_world_size(world_size)
        self.world_size = world_size
        self.schedule: Schedule = RoundRobin() if schedule is None else schedule
        self.device = torch.device(device)
        self.choices: tuple[int, ...] = ()  # of the last run: Replayed(choices) repeats it
        self._closed = False
        self._base: Any = None  # where the last program was run: in which greenlet, and how many frames deep
        self._idle: list[greenlet] = []  # that served it

    def run(self, program: RankProgram, *, stall_after_s: float = 10.0) -> WorldRun:
        """Run `program` on every rank until all have ended or the rest are stuck for good.

        stall_after_s: of no use here, where nothing depends on a clock.
        Every rank starts in the state of a fresh process: torch's defaults, seeds START_SEED, the caller's environment.
        Raises NestedWorldError inside a rank program, ScheduleError where the schedule cannot be followed, UnwindError
        if a program did not let the run end. This world can run the next program after any of them.
        """
        self._require_free()
        run = self.make_run(
            program, world_size=self.world_size, schedule=self.schedule, device=self.device, idle=self._greenlets()
        )
        seam = TorchSeam(run)
        with _in_place(run, seam):
            try:
                self.schedule.begin()
                seam.enlist()
                run.launch()
                run.drive()
                report = run.conclude(self.name)
            finally:
                self.choices = tuple(run.choices)
                run.unwind()
        _require_end(run)
        return report()

    def close(self) -> None:
        """Run no more; idempotent. Between runs a world holds nothing else but idle greenlets."""
        self._closed = True
        self._idle = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _greenlets(self) -> list[greenlet]:
        """Those that can serve again: of this thread, and made as deep in the stack."""
        base = getcurrent(), _depth()
        if base != self._base:
            self._base, self._idle = base, []
        return self._idle

    def _require_free(self) -> None:
        if self._closed:
            raise ClosedWorldError("this world is closed: make another one.")
        if _running is not None:
            raise NestedWorldError(
                "a simulated world is running in this process: call run outside rank programs, and from one thread."
            )


def _depth() -> int:
    """Frames in the stack."""
    frame, count = sys._getframe(1).f_back, 0
    while frame is not None:
        frame, count = frame.f_back, count + 1
    return count


@contextmanager
def _in_place(run: SimulatedRun, seam: TorchSeam) -> Iterator[None]:
    """Put the caller's state away and let torch.distributed speak for ranks; undo both."""
    global _running
    caller, hook = CallersOwn(), sys.excepthook
    try:
        _running = run
        with seam.in_place(), _TIME.in_place(run), _EXIT.in_place(run), _ATTRIBUTION.in_place(run):
            yield
    finally:
        run.dissolve()
        seam.dissolve()
        _running, sys.excepthook = None, hook
        caller.put_back()


def _require_end(run: SimulatedRun) -> None:
    if run.failure is not None:
        raise run.failure
    if run.alive:
        raise UnwindError(
            f"ranks {list(run.alive)} caught {REFUSALS} exceptions that were to end them, and went on: let "
            "BaseException pass in the rank program. This world can run the next one."
        )
