"""SimulatedPart: one rank's part in a collective, and the handle and future that it waits on.

A group's time-out never expires, since a hang is proved instead; one that is given to `wait` or `barrier` expires on
the world's own clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbed.tp.data_movement import Fold, Move
from tpbed.tp.recording import Entry
from tpbed.tp.simulated_rank import SimulatedRank
from tpbed.tp.simulated_run import SimulatedRun


class SimulatedPart:
    """One rank's part in a collective: what it brings, what it gets, and the handle that it waits on."""

    fold: Fold | None = None  # how the part's rank wants the parts reduced
    whole = False  # its one tensor stands for a list of equal parts
    splits: tuple[list[int], list[int]] | None = None  # bytes to each member, and from each
    timeout_s = 0.0
    vetted = False  # it is waited on where it is called, and that may wait
    called = 0  # events that its rank had written then, the last of them of the call
    stream: Any = None  # CUDA: on which the rank works
    moved: Any = None  # CUDA: the event after which its outputs are there
    done = False
    entry: Entry | None = None  # in the ledger
    _future: SimulatedFuture | None = None

    def __init__(
        self,
        run: SimulatedRun,
        rank: SimulatedRank,
        terms: tuple[str, int, Any],
        move: Move | None,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> None:
        self.run, self.rank = run, rank
        self.terms = terms  # op, root, payload in bytes: on which all members must agree
        self.move, self.inputs, self.outputs = move, inputs, outputs

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Give way until the collective is complete.

        Raises RuntimeError when `timeout`, on the world's clock, is over first.
        """
        entry, seconds = self.entry or _UNRECORDED, max(timeout.total_seconds(), 0.0) if timeout else 0.0
        if not entry.waited:
            entry.wait()
        try:
            self.run.wait_for(self, seconds or self.timeout_s)
        except BaseException as error:
            entry.fail(error)
            raise
        if self.moved is not None:
            torch.cuda.current_stream().wait_event(self.moved)
        entry.complete()
        return True

    def is_completed(self) -> bool:
        """Whether it is; if not, others may have a turn before this is said."""
        if self.entry is not None:
            self.entry.ask()
        if not self.done:
            self.run.poll(self.rank, self)
        if self.done and self.entry is not None:
            self.entry.complete()
        return self.done

    def is_success(self) -> bool:
        """True, as gloo says unless something has failed."""
        return True

    def exception(self) -> None:
        """None: what can fail fails when the collective is called."""

    def synchronize(self) -> None:
        """Nothing to do."""

    def result(self) -> list[Tensor]:
        """The tensors that were written to."""
        if not self.done:
            raise RuntimeError(
                "Work needs to be completed before calling result(). Should call wait() before result()."
            )
        return list(self.outputs or self.inputs)

    def get_future(self) -> SimulatedFuture:
        """A future of the result; its callbacks run in this rank, when it next goes on."""
        if self._future is None:
            self._future = SimulatedFuture(self)
            if self.done:
                self.fulfil()
        return self._future

    def complete(self) -> None:
        """The data are moved: whoever waits for them can go on."""
        self.done = True
        if self._future is not None:
            self.rank.owed.append(self)
        if self.rank.waits_for is self:
            self.run.wake(self.rank)

    def fulfil(self) -> None:
        """Give the future its result, and so call its callbacks."""
        if self._future is not None and not self._future.fulfilled:
            self._future.fulfilled = True
            self._future.set_result(self.result())


class SimulatedWork(SimulatedPart, dist.Work):
    """A part as torch's C++ can hold it. Where a call waits at once, a plain one does, at a fraction of the cost."""

    def __init__(self, *part: Any) -> None:
        dist.Work.__init__(self)
        super().__init__(*part)


class _Unrecorded:
    """The entry of a part that is not in the ledger."""

    waited = True

    def wait(self) -> None:
        """Nothing is written."""

    def complete(self) -> None:
        """Nothing is written."""

    def fail(self, error: BaseException) -> None:
        """Nothing is written."""


_UNRECORDED = _Unrecorded()


class SimulatedFuture(torch.futures.Future[Any]):
    """Waits as its collective does. torch.futures.wait_all, which waits in C++, would stop the whole world."""

    def __init__(self, work: SimulatedPart) -> None:
        super().__init__()
        self.work, self.fulfilled = work, False

    def done(self) -> bool:
        """Whether the collective is complete."""
        return self.work.is_completed()

    def wait(self) -> Any:
        """The result, when it is there."""
        self.work.wait()
        self.work.fulfil()
        return super().wait()
