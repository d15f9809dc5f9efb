"""Mailbox: where the messages of one simulated group meet, and the handle that each end waits on.

As gloo does it (torch 2.13, measured): a send is over only when it is received, so two ranks that both send first wait
for ever; what is sent is read at that moment. Only bytes count: a longer receive keeps its tail, another dtype reads
the bytes as its own, and one that is too short ends the process; here it raises. A handle says that it is completed
only when it was waited on, and has no result and no future.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from tpbed.tp.isolation import quietly
from tpbed.tp.payload import OverrunError
from tpbed.tp.refusal import UnsupportedCollectiveError
from tpbed.tp.simulated_rank import SimulatedRank
from tpbed.tp.simulated_run import SimulatedRun


class MessageWork(dist.Work):
    """One end of a message. `peer` is a place in the group, and None for a receive from anybody until one has come."""

    vetted = False  # it is waited on later, and elsewhere
    called = 0
    done = waited = False
    size = -1  # bytes that came
    stream: Any = None  # CUDA: on which the rank works
    moved: Any = None  # CUDA: the event after which the data are there

    def __init__(
        self, run: SimulatedRun, rank: SimulatedRank, op: str, tensor: Tensor, *, place: int, peer: int | None, tag: int
    ) -> None:
        super().__init__()
        self.run, self.rank, self.op, self.tensor = run, rank, op, tensor
        self.place, self.peer, self.tag = place, peer, tag

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Give way until the other end has come.

        Raises RuntimeError when `timeout`, on the world's clock, is over first, OverrunError for a message too long.
        """
        try:
            self.run.wait_for(self, max(timeout.total_seconds(), 0.0))
        except RuntimeError:
            self._give_up(timeout)
        if self.size > self.tensor.nbytes:
            raise OverrunError(
                f"a message of {self.size} bytes comes to a tensor of {self.tensor.nbytes}, and gloo ends the process "
                "of the rank that receives it: receive into a tensor as large as what is sent."
            )
        if self.moved is not None:
            torch.cuda.current_stream().wait_event(self.moved)
        self.waited = True
        return True

    def _give_up(self, timeout: timedelta) -> NoReturn:
        after = timeout // timedelta(milliseconds=1)
        raise RuntimeError(f"Timed out waiting {after}ms for {self.op} operation to complete") from None

    def is_completed(self) -> bool:
        """Whether somebody has waited on it; if not, others may have a turn first."""
        if not self.waited:
            self.run.poll(self.rank)
        return self.waited

    def is_success(self) -> bool:
        """True, as gloo says unless something has failed."""
        return True

    def exception(self) -> None:
        """None: what can fail fails where it is waited on."""

    def synchronize(self) -> None:
        """Nothing to do."""

    def result(self) -> NoReturn:
        """As gloo's handles of messages."""
        raise RuntimeError("result() not implemented.")

    def get_future(self) -> NoReturn:
        """As gloo's handles of messages."""
        raise RuntimeError("Work::getFuture not implemented.")

    def source_rank(self) -> int:
        """Who sent it, as a place in the group."""
        return -1 if self.peer is None else self.peer

    _source_rank = source_rank  # the name that torch.distributed uses

    def complete(self) -> None:
        """The data are moved: if the rank waits for them, it can go on."""
        self.done = True
        if self.rank.waits_for is self:
            self.run.wake(self.rank)

    def fulfil(self) -> None:
        """No future to fulfil."""


Waiting = ref[MessageWork]


class Mailbox:
    """Ends of messages that wait for their other ends, by destination and tag, in the order of the calls.

    One whose handle is dropped is taken back, as gloo does: so the mailbox holds none of them.
    """

    def __init__(self) -> None:
        self._sends: dict[tuple[int, int], list[Waiting]] = {}
        self._receives: dict[tuple[int, int], list[Waiting]] = {}

    def send(self, work: MessageWork) -> None:
        """To the first receive that takes it."""
        assert work.peer is not None
        receive = _take(self._receives, (work.peer, work.tag), lambda other: other.peer in (None, work.place))
        if receive is None:
            self._sends.setdefault((work.peer, work.tag), []).append(ref(work))
        else:
            _meet(work, receive)

    def receive(self, work: MessageWork) -> None:
        """From the first send that it takes."""
        send = _take(self._sends, (work.place, work.tag), lambda other: work.peer in (None, other.place))
        if send is None:
            self._receives.setdefault((work.place, work.tag), []).append(ref(work))
        else:
            _meet(send, work)


def _take(
    ends: dict[tuple[int, int], list[Waiting]], place: tuple[int, int], fits: Callable[[MessageWork], bool]
) -> MessageWork | None:
    """The first that fits; it waits no more."""
    waiting = ends.get(place, [])
    for number, waits in enumerate(waiting):
        work = waits()
        if work is not None and fits(work):
            del waiting[number]
            return work
    return None


def _meet(send: MessageWork, receive: MessageWork) -> None:
    receive.peer, receive.size = send.place, send.tensor.nbytes
    if receive.size <= receive.tensor.nbytes:
        _move(send, receive)
    send.complete()
    receive.complete()


def _move(send: MessageWork, receive: MessageWork) -> None:
    if send.stream is None:
        quietly(_copy, (send.tensor, receive.tensor))
        return
    stream = torch.cuda.current_stream()
    for work in (send, receive):
        stream.wait_stream(work.stream)
    quietly(_copy, (send.tensor, receive.tensor))
    send.moved = receive.moved = stream.record_event()


def _copy(tensors: tuple[Tensor, Tensor]) -> None:
    source, target = (tensor.detach().view(-1).view(torch.uint8) for tensor in tensors)
    target[: len(source)].copy_(source)


def require_message(tensors: list[Tensor], peer: int | None, tag: int, place: int, size: int) -> Tensor:
    """The one tensor, if gloo would take this call; in gloo's words if not."""
    if len(tensors) != 1:
        raise RuntimeError("ProcessGroupGloo::send takes a single tensor")
    if not tensors[0].is_contiguous():
        raise RuntimeError("input tensor has to be contiguous")
    if tag < 0:
        raise RuntimeError("Tag must be nonnegative")
    if peer is not None and not 0 <= peer < size:
        raise dist.DistStoreError(f"wait timeout, keys: {peer}")
    if peer == place:
        raise RuntimeError("Pair is not connected: a rank has no connection to itself")
    if tensors[0].layout is not torch.strided:
        raise UnsupportedCollectiveError(
            f"a message with layout {tensors[0].layout} is not simulated: use a dense one."
        )
    return tensors[0]
