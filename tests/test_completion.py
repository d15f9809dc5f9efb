"""Messages over an asynchronous transport: scheduled, started, completed as it goes on; waited for where it hangs."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from tpbed.tp import batches, completion
from tpbed.tp.completion import CompletionWatch
from tpbed.tp.ledger import read_ledger
from tpbed.tp.rank import RankContext
from tpbed.tp.recorder import Recorder
from tpbed.tp.recording import RecordingGroup


class Device:
    """Does what is queued on it when the test says so; its events are places in the queue."""

    def __init__(self) -> None:
        self.queued, self.done = 0, 0

    def event(self) -> Event:
        return Event(self, self.queued)


class Event:
    def __init__(self, device: Device, place: int) -> None:
        self.device, self.place = device, place

    def query(self) -> bool:
        return self.device.done >= self.place


class FakeWork(dist.Work):
    """Waiting on it does not block, as over NCCL."""

    def __init__(self, event: Event, error: str = "") -> None:
        super().__init__()
        self.event, self.error = event, error

    def wait(self, timeout=None):
        return True

    def is_completed(self):
        return self.event.query()

    def exception(self):
        return self.error or None


class FakeNccl:
    """Queues messages on the device; a batch is one entry of the queue, with one handle."""

    supports_coalescing = True

    def __init__(self, device: Device) -> None:
        self.device, self.calls, self.error, self.in_batch = device, [], "", False

    def send(self, tensors, peer, tag):
        return self.issue("send", peer)

    def recv(self, tensors, peer, tag):
        return self.issue("recv", peer)

    def recv_anysource(self, tensors, tag):
        raise RuntimeError("no receiving from anybody")

    def issue(self, op, peer):
        self.calls.append((op, peer))
        return None if self.in_batch else self.launch()

    def launch(self):
        self.device.queued += 1
        return FakeWork(self.device.event(), self.error)

    def _start_coalescing(self):
        self.in_batch = True

    def _end_coalescing(self):
        self.in_batch = False
        return self.launch()


class Rank:
    """Rank 0 of two on the fake transport, with its ledger."""

    def __init__(self) -> None:
        self.device, self.events, self.waits = Device(), [], threading.Event()
        self.nccl = FakeNccl(self.device)
        recorder = Recorder(self.take, lambda: 7)
        context = RankContext(
            rank=0, world_size=2, recorder=recorder, sleep=lambda _s: None, pause=lambda _s: None, die=lambda *_: None
        )
        self.watch = CompletionWatch(recorder)
        self.group = RecordingGroup(
            self.nccl,
            context,
            label="world",
            ranks=(0, 1),
            asynchronous=True,
            watch=self.watch.watch,
            watch_message=self.watch.message,
        )

    def take(self, event):
        self.events.append(event)
        if event[0] == "message_wait":
            self.waits.set()

    def states(self):
        self.watch._look()
        return [message.state for message in self.messages()]

    def messages(self):
        return read_ledger(self.events, rank=0, world_size=2).messages


@pytest.fixture
def rank(monkeypatch):
    monkeypatch.setattr(completion, "_event", lambda: made.device.event())
    monkeypatch.setattr(completion, "_main_sleeps", lambda: True)
    made = Rank()
    yield made
    made.watch.close()


TENSOR = torch.zeros(4)


def test_a_message_is_scheduled_then_started_when_the_stream_comes_to_it_then_completed(rank):
    rank.device.queued = 1  # a kernel before it
    work = rank.group.send([TENSOR], 1, 0)
    assert work.wait() and rank.states() == ["scheduled"]
    rank.device.done = 1
    assert rank.states() == ["started"]
    rank.device.done = 2
    assert rank.states() == ["completed"]
    [message] = rank.messages()
    assert (message.op, message.peer, message.payload_bytes, message.waited) == ("send", 1, 16, False)
    assert message.ended_ns == 7


def test_a_message_that_has_not_completed_has_no_end(rank):
    rank.group.recv([TENSOR], 1, 0)
    assert rank.states() == ["started"] and rank.messages()[0].ended_ns is None


def test_a_message_that_the_transport_gives_up_has_failed_with_its_error(rank):
    rank.nccl.error = "remote process exited"
    rank.group.recv([TENSOR], 1, 0)
    rank.device.done = 1
    assert rank.states() == ["failed"] and rank.messages()[0].error == "remote process exited"


def test_a_message_that_is_refused_at_the_call_has_failed(rank):
    with pytest.raises(RuntimeError, match="no receiving"):
        rank.group.recv_anysource([TENSOR], 0)
    assert rank.states() == ["failed"]


def test_a_main_thread_that_stands_still_waits_for_the_oldest_message(rank, monkeypatch):
    rank.group.send([TENSOR], 1, 0)
    rank.group.recv([TENSOR], 1, 0)
    monkeypatch.setattr(completion, "_BLOCKED_S", 0.01)
    monkeypatch.setattr(completion, "_main_sleeps", lambda: False)
    assert rank.waits.wait(30)  # standing here
    assert [message.waited for message in rank.messages()] == [True, False]
    ledger = read_ledger(rank.events, rank=0, world_size=2)
    assert ledger.waiting_in() == ledger.messages[0]


def test_a_call_that_does_not_return_waits_for_its_peer(rank, monkeypatch):
    def connect(op, peer):  # NCCL connects two ranks when the first message passes between them
        assert rank.waits.wait(30)
        raise RuntimeError("aborted")

    monkeypatch.setattr(rank.nccl, "issue", connect)
    monkeypatch.setattr(completion, "_BLOCKED_S", 0.01)
    monkeypatch.setattr(completion, "_main_sleeps", lambda: False)
    with pytest.raises(RuntimeError, match="aborted"):
        rank.group.send([TENSOR], 1, 0)
    assert [(message.waited, message.state) for message in rank.messages()] == [(True, "failed")]


def test_tags_are_left_out_since_nccl_has_none(rank):
    rank.group.send([TENSOR], 1, 5)
    assert rank.messages()[0].tag == 0


def test_a_batch_is_one_launch_and_its_messages_complete_together(rank, monkeypatch):
    works = batches.batch_isend_irecv(batch(rank.group, monkeypatch))
    assert len(works) == 1 and rank.nccl.calls == [("send", 1), ("recv", 1)] and rank.device.queued == 1
    assert rank.states() == ["started", "started"]
    rank.device.done = 1
    assert rank.states() == ["completed", "completed"]
    assert works[0].is_completed()


def test_after_a_batch_messages_are_single_again(rank, monkeypatch):
    batches.batch_isend_irecv(batch(rank.group, monkeypatch))
    assert rank.group.send([TENSOR], 1, 0) is not None and rank.device.queued == 2


def test_a_batch_that_is_refused_in_the_middle_is_ended(rank, monkeypatch):
    ops = batch(rank.group, monkeypatch)
    monkeypatch.setattr(rank.nccl, "recv", rank.nccl.recv_anysource)
    with pytest.raises(TypeError):
        batches.batch_isend_irecv(ops)
    assert not rank.nccl.in_batch and rank.group.batch is None


def test_a_transport_that_cannot_coalesce_gets_the_batch_one_by_one(rank, monkeypatch):
    rank.nccl.supports_coalescing = False
    works = batches.batch_isend_irecv(batch(rank.group, monkeypatch))
    assert len(works) == 2 and rank.device.queued == 2


def batch(group, monkeypatch):
    """A send to rank 1 and a receive from it; torch's register of groups is told of this one."""
    monkeypatch.setitem(dist.distributed_c10d._world.pg_group_ranks, group, {0: 0, 1: 1})
    return [dist.P2POp(op, TENSOR, 1, group=group) for op in (dist.isend, dist.irecv)]
