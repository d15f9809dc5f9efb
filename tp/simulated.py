"""SimulatedWorld: ranks as greenlets of this process, and SimulatedGroup: what they talk through. No clock, no sockets.

A rank runs until it must wait for another; then the schedule says who goes on. When no rank can, and none sleeps, the
run is over, and whoever waits in a collective is proved stuck. Everything is repeatable: the order of ranks, the clock,
and the result of every collective.

How collectives behave. They follow gloo (torch 2.13, measured), which real runs use, and are nowhere kinder:
- Members meet at the same place in the same group's order of calls. If they differ there in op, root or payload bytes,
  that collective never completes; with equal bytes and other dtypes each reads the others' bytes as its own dtype, and
  with other reduce ops each gets the result of its own.
- A tensor that is sent is read when the last member arrives, so writing to it before an asynchronous call has completed
  is the same race as in the field; outputs are written at that moment too.
- Reductions go in rank order, one rounding per addition. Minimum and maximum keep the earlier value unless the later
  one compares as better, so NaN wins or loses by its place. A rank that is not the root of a reduce is left with
  scratch in the last world_size-th of its tensor.
- all_reduce, reduce, broadcast and scatter take the memory of a tensor from its first element on, whatever its strides;
  reduce_scatter does so with what it gets from the peers; all_gather, gather and all_to_all go by index;
  all_to_all_single refuses what is not contiguous.
- A group's time-out never expires, since a hang is proved instead; one that is given to `wait` or `barrier` expires on
  the world's own clock.

What cannot be seen from here: a rank that computes for ever without a call to torch.distributed or to its context keeps
the whole world waiting, and so does one that waits for something outside it.
"""

from __future__ import annotations

import heapq
import sys
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from greenlet import getcurrent, greenlet
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tpbed.tp.errors import TestbedError
from tpbed.tp.isolation import Isolation, RankGroups, Start, quietly
from tpbed.tp.ledger import WORLD, End, Event, read_ledger
from tpbed.tp.rank import Death, RankContext
from tpbed.tp.recorder import Recorder
from tpbed.tp.recording import BACKEND, RecordingGroup
from tpbed.tp.schedule import RoundRobin, Schedule, ScheduleError
from tpbed.tp.world import Liveness, RankProgram, RankState, WorldRun

TURN_NS = 1_000  # of the world's clock, for each turn
IDLE_POLLS = 1_000  # a rank that asks so often whether a collective is done, while nothing else happens, asks for ever
REFUSALS = 100  # a rank that so often catches the end of its run is given up

_running: _Run | None = None
_abandoned: list[greenlet] = []  # kept: a greenlet that is collected is woken once more


class NestedWorldError(TestbedError):
    """A simulated world was to run while one was running in this process."""


class ClosedWorldError(TestbedError):
    """A world was to run after it was closed."""


class ForeignGroupError(TestbedError):
    """A process group was used by another rank than the one it was made for, or after its run."""


class UnsupportedCollectiveError(TestbedError):
    """A simulated world cannot do this, though a real one may."""


class OverrunError(TestbedError):
    """A collective would go past the end of a tensor's storage, as gloo does without a word."""


class UnwindError(TestbedError):
    """A rank program did not let its run end: it catches every exception and goes on."""


class _Unwind(BaseException):
    """Ends a rank whose run is over; `except Exception` does not see it."""


class _Rank:
    """One rank of one run."""

    def __init__(self, index: int, context: RankContext, events: list[Event]) -> None:
        self.index, self.context, self.events = index, context, events
        self.groups = RankGroups()
        self.formed: dict[tuple[str, tuple[int, ...]], int] = {}  # how many groups, by name and members
        self.greenlet: Any = None
        self.isolation: Any = None
        self.state: RankState = "running"
        self.detail = ""
        self.result: Any = None
        self.waits_for: SimulatedWork | None = None
        self.waits = 0  # that are over: a time-out of an earlier one is void
        self.owed: list[SimulatedWork] = []  # with futures to fulfil when the rank goes on
        self.polls = self.polled_at = self.refusals = 0


class _Run:
    """One run: whose turn it is, the world's clock, the groups, and in the end the proof that nobody can move."""

    def __init__(self, world: SimulatedWorld, program: RankProgram) -> None:
        self.program, self.schedule, self.device = program, world.schedule, world.device
        self.hub = getcurrent()  # the greenlet of the caller
        self.members = tuple(range(world.world_size))
        self.ready = list(self.members)
        self.sleepers: list[tuple[int, int, int, int]] = []  # when, order, rank, its count of waits
        self.now_ns = self.progress = 0
        self.choices: list[int] = []
        self.current: _Rank | None = None
        self.failure: BaseException | None = None
        self.unwinding = self.over = False
        self.channels: dict[Any, _Channel] = {}
        self.registered: list[Any] = []  # names in torch's C++ registry
        self.store = _RefusedStore()
        self.ranks = [self._rank(index) for index in self.members]

    def _rank(self, index: int) -> _Rank:
        events: list[Event] = []
        recorder = Recorder(events.append, self.clock)
        size = len(self.members)
        context = RankContext(
            rank=index, world_size=size, recorder=recorder, sleep=self.sleep, die=self.die, device=self.device
        )
        return _Rank(index, context, events)

    def clock(self) -> int:
        """Nanoseconds since the run began; no two events have the same."""
        self.now_ns += 1
        return self.now_ns

    # In the hub.

    def launch(self) -> None:
        """Make the ranks, and the default group of each; the caller's own state must be put away."""
        places = {rank: rank for rank in self.members}
        for rank in self.ranks:
            group = form(self, rank, "0", self.members, WORLD)
            enter_group(rank.groups, group, "0", places, BACKEND, self.store)
            rank.groups.default_pg, rank.groups.group_count = group, 1
            rank.isolation = Isolation(Start(rank.context, rank.groups, _variables(rank.index, len(self.members))))
            rank.greenlet = greenlet(self._live)

    def drive(self) -> None:
        """Give turns until nobody can take one."""
        while (rank := self._next()) is not None:
            self.current = rank
            rank.isolation.enter()
            rank.greenlet.switch(rank)
            if self.failure is not None:
                raise self.failure

    def unwind(self) -> None:
        """End the ranks that have not ended, by an exception where they stand. Nothing of it is recorded."""
        self.unwinding = True
        for rank in self.ranks:
            if rank.greenlet:  # has started, and not finished
                self.current = rank
                rank.isolation.enter()
                rank.greenlet.throw(_Unwind)
                rank.isolation.leave()

    def dissolve(self) -> tuple[int, ...]:
        """Take the run apart, so that nothing of it waits for the garbage collector; returns the ranks still alive."""
        self.current, self.over = None, True
        for name in self.registered:
            c10d._unregister_process_group(name)
        alive = [rank for rank in self.ranks if rank.greenlet]
        _abandoned.extend(rank.greenlet for rank in alive)
        for rank in self.ranks:
            rank.greenlet = rank.isolation = rank.waits_for = None
        self.channels.clear()
        self.ranks = []
        return tuple(rank.index for rank in alive)

    # In the greenlet of a rank.

    def _live(self, rank: _Rank) -> None:
        try:
            if self.device.index is not None:
                torch.cuda.set_device(self.device)
            rank.result = self.program(rank.index)
            self._end(rank, rank.context.recorder.returned)
        except _Unwind:
            pass
        except KeyboardInterrupt as interrupt:
            self.failure = interrupt
        except BaseException as error:  # SystemExit too: it ends a rank, not the world
            self._end(rank, lambda: rank.context.recorder.raised(error))

    def _end(self, rank: _Rank, record: Callable[[], None]) -> None:
        if not self.unwinding:
            record()
            rank.state = "ended"
            self.progress += 1
            rank.isolation.leave()

    def here(self, rank: _Rank | None = None) -> _Rank:
        """The rank whose turn it is, which must be the caller, and `rank` if that is given."""
        current = self.current
        if self.over or current is None or (rank is not None and rank is not current):
            raise ForeignGroupError(_foreign(rank, current, self.over))
        if current.greenlet is not getcurrent():
            raise UnsupportedCollectiveError(
                f"rank {current.index} called from another thread or greenlet than the one its program runs in: "
                "a simulated rank has one thread; use a real world for this program."
            )
        if self.unwinding:
            self._refuse(current)
        return current

    def _refuse(self, rank: _Rank) -> NoReturn:
        rank.refusals += 1
        while rank.refusals > REFUSALS:
            self.hub.switch()
        raise _Unwind

    def wait_for(self, work: SimulatedWork, timeout_s: float) -> None:
        """Until the collective is complete; even if it is, another rank may have the turn first."""
        rank = self.here()
        if work.done:
            if self.ready:
                insort(self.ready, rank.index)
                self._give_way(rank)
            return
        rank.waits_for = work
        if timeout_s:
            self._call_back(rank, timeout_s)
        self._give_way(rank)
        if not work.done:
            raise RuntimeError("Operation timed out!")

    def wake(self, rank: _Rank) -> None:
        """Its wait is over, and it can have a turn."""
        rank.waits += 1
        rank.waits_for = None
        self.progress += 1
        insort(self.ready, rank.index)

    def sleep(self, seconds: float) -> None:
        """RankContext.sleep, for the rank whose turn it is."""
        rank = self.here()
        if seconds > 0:
            self._call_back(rank, seconds)
            self._give_way(rank)
        else:
            self.poll()

    def poll(self) -> None:
        """The rank asks for something instead of waiting for it: all others first; then time passes, if that helps."""
        rank = self.here()
        rank.polls = rank.polls + 1 if rank.polled_at == self.progress else 1
        rank.polled_at = self.progress
        if rank.polls > IDLE_POLLS:
            self._freeze(rank, "stalled", "asks for ever whether a collective is done that can never be")
        chosen = self._chosen()
        if chosen is not None or self.failure is not None:
            insort(self.ready, rank.index)
            self._hand_over(rank, chosen)

    def die(self, death: Death, why: str) -> None:
        """RankContext.die, for the rank whose turn it is; it does not return, and runs no `finally` while the run lasts."""
        rank = self.here()
        if death == "kill":
            rank.context.recorder.end(End(how="killed", message=why, signal=9, at_ns=self.clock()))
            self._freeze(rank, "dead", "signal 9")
        elif death == "exit":
            rank.context.recorder.end(End(how="exited", message=why, exit_code=1, at_ns=self.clock()))
            self._freeze(rank, "dead", "exit status 1")
        else:
            self._freeze(rank, "stopped" if death == "stop" else "stalled", why)

    def _freeze(self, rank: _Rank, state: RankState, detail: str) -> None:
        rank.state, rank.detail = state, detail
        self.progress += 1
        self._give_way(rank)

    # Turns.

    def _give_way(self, rank: _Rank) -> None:
        self._hand_over(rank, self._chosen())

    def _hand_over(self, rank: _Rank, chosen: _Rank | None) -> None:
        if chosen is not rank:
            rank.isolation.leave()
            if chosen is None:
                self.hub.switch()
            else:
                self.current = chosen
                chosen.isolation.enter()
                chosen.greenlet.switch(chosen)
        if rank.owed:
            _fulfil(rank)

    def _chosen(self) -> _Rank | None:
        try:
            return self._next()
        except Exception as error:  # of the schedule: the caller of the world gets it, not the rank
            self.failure = error
            return None

    def _next(self) -> _Rank | None:
        self.now_ns += TURN_NS
        if self.sleepers:
            self._wake_sleepers()
        if not self.ready:
            return None
        return self.ranks[self.ready.pop() if len(self.ready) == 1 else self._choose()]

    def _choose(self) -> int:
        choice = self.schedule.choose(self.ready)
        place = bisect_left(self.ready, choice)
        if self.ready[place : place + 1] != [choice]:
            raise ScheduleError(f"the schedule chose rank {choice}: it must choose one of {self.ready}.")
        self.choices.append(choice)
        return self.ready.pop(place)

    def _call_back(self, rank: _Rank, seconds: float) -> None:
        order = self.progress = self.progress + 1
        heapq.heappush(self.sleepers, (self.now_ns + round(seconds * 1e9), order, rank.index, rank.waits))

    def _wake_sleepers(self) -> None:
        """Those whose time has come; if nobody else can run, the first, whose time comes now."""
        while self.sleepers and (not self.ready or self.sleepers[0][0] <= self.now_ns):
            when, _, index, waits = heapq.heappop(self.sleepers)
            if self.ranks[index].waits == waits:
                self.now_ns = max(self.now_ns, when)
                self.wake(self.ranks[index])


def _foreign(rank: _Rank | None, current: _Rank | None, over: bool) -> str:
    whose = "a process group" if rank is None else f"a process group of rank {rank.index}"
    who = "outside a rank program" if current is None else f"by rank {current.index}"
    return (
        f"{whose} was used {'after its run' if over else who}: ranks of a simulated world share modules and closures, "
        "so keep groups and contexts in the rank program's own variables, not in globals."
    )


def _fulfil(rank: _Rank) -> None:
    owed, rank.owed = rank.owed, []
    for work in owed:
        work.fulfil()


def _variables(rank: int, world_size: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",  # nobody listens there
    }


# torch.distributed's own machinery, made to speak for the rank whose turn it is.


class _RefusedStore(dist.Store):
    """Stands where torch.distributed expects a store; a rank that would wait for a key would stop the whole world."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing waits here."""


class SimulatedProcessGroup(RecordingGroup):
    """A process group as one rank sees it. What is not simulated is refused by name when it is called."""

    run: _Run
    description = ""
    _name: Any = None

    @property
    def group_name(self) -> Any:
        """The name in torch's C++ registry, where all ranks' groups lie side by side: unlike the label, one per rank."""
        if self._name is None:
            self._name = f"{self.label}@{self.rank()}.{len(self.run.registered)}"
            self.run.registered.append(self._name)
            c10d._register_process_group(self._name, self)
        return self._name

    @property
    def group_desc(self) -> str:
        """As given to new_group."""
        return self.description


def _refusing(what: str) -> Callable[..., NoReturn]:
    def refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise UnsupportedCollectiveError(
            f"{what} is not simulated: run this program in a real world, or use the collectives that "
            f"{SimulatedGroup.__name__} has."
        )

    return refuse


_REFUSED_OPS = (
    "send", "recv", "recv_anysource", "monitored_barrier", "_start_coalescing", "_end_coalescing",
    "allreduce_coalesced", "allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single_coalesced",
    "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced", "gather_single", "gather_into_tensor",
    "split_group", "merge_remote_group",
)  # fmt: skip
_REFUSED_STORE = (
    "set", "get", "add", "wait", "check", "compare_set", "delete_key", "num_keys", "append", "multi_get", "multi_set",
    "queue_push", "queue_pop", "queue_len",
)  # fmt: skip
for _name in _REFUSED_OPS:
    setattr(SimulatedProcessGroup, _name, _refusing(_name))
for _name in _REFUSED_STORE:
    setattr(_RefusedStore, _name, _refusing(f"Store.{_name}"))


def form(run: _Run, rank: _Rank, name: str, members: tuple[int, ...], label: str) -> SimulatedProcessGroup:
    """The rank's end of a group; the members' ends meet if each has formed it as often as the others."""
    count = rank.formed[name, members] = rank.formed.get((name, members), 0) + 1
    channel = run.channels.get((name, members, count))
    if channel is None:
        channel = run.channels[name, members, count] = _Channel(len(members))
    inner = SimulatedGroup(run, rank, channel, members.index(rank.index))
    group = SimulatedProcessGroup(inner, rank.context, label=label, ranks=members)
    group.run = run
    return group


def enter_group(
    groups: RankGroups, group: Any, name: str, places: dict[int, int], backend: str, store: Any, tag: str | None = None
) -> None:
    """Enter a group in a rank's book, as torch.distributed enters one that it has made."""
    groups.pg_map[group] = (backend, store)
    groups.pg_names[group] = name
    groups.pg_group_ranks[group] = places
    groups.pg_backend_config[group] = f"cpu:{backend},cuda:{backend}"
    if not tag:
        groups.tags_to_pg.setdefault("", []).append(group)
    key = groups.pg_to_tag[group] = f"user:{tag}" if tag else f"ptd:{name}"
    groups.tags_to_pg.setdefault(key, []).append(group)


def _new_process_group(
    run: _Run, group_size: int, group_rank: int, ranks: list[int], backend: str, store: Any, name: str, **options: Any
) -> tuple[Any, Any]:
    rank, tag = run.here(), options.get("pg_tag")
    existing = c10d._find_pg_by_ranks_and_tag(tag, ranks) if tag else None
    if existing is not None:
        return existing, run.store
    members = tuple(ranks) or run.members
    if rank.index not in members:
        return dist.GroupMember.NON_GROUP_MEMBER, None
    group = form(run, rank, name, members, name if ranks else WORLD)
    group.description = options.get("group_desc") or "undefined"
    places = {member: place for place, member in enumerate(members)}
    enter_group(rank.groups, group, name, places, str(backend), run.store, tag)
    return group, run.store


@contextmanager
def _in_place(run: _Run) -> Iterator[None]:
    """Put the caller's state away and make torch.distributed speak for the rank that runs; undo both."""
    global _running
    caller, hook = Isolation(), sys.excepthook
    caller.leave()
    replaced = {name: (getattr(c10d, name), new) for name, new in _replacements(run).items() if hasattr(c10d, name)}
    try:
        _running = run
        for name, (_, new) in replaced.items():
            setattr(c10d, name, new)
        yield
    finally:
        for name, (old, _) in replaced.items():
            setattr(c10d, name, old)
        _running, sys.excepthook = None, hook
        run.isolation_of_nobody()
        caller.enter()


def _replacements(run: _Run) -> dict[str, Any]:
    """New groups are simulated ones, whatever backend they ask for, and nobody removes another rank's names."""
    return {
        "_new_process_group_helper": lambda *args, **options: _new_process_group(run, *args, **options),
        "rendezvous": lambda *args, **options: iter([(run.store, run.here().index, len(run.members))]),
        "_unregister_all_process_groups": lambda: None,
    }


class SimulatedWork(dist.Work):
    """One rank's part in a collective: what it brings, what it gets, and the handle that it waits on."""

    run: _Run
    rank: _Rank

    def __init__(
        self,
        op: str,
        move: Move,
        inputs: Sequence[Tensor] = (),
        outputs: Sequence[Tensor] = (),
        *,
        payload_bytes: int = 0,
        root: int = -1,
        reduce_op: Any = None,
        whole: bool = False,
        splits: tuple[list[int], list[int]] | None = None,
    ) -> None:
        super().__init__()
        self.terms = (op, root, payload_bytes)  # on which the members must agree
        self.move, self.inputs, self.outputs, self.reduce_op = move, inputs, outputs, reduce_op
        self.whole = whole  # one tensor stands for a list of equal parts
        self.splits = splits  # bytes to, and from, each member
        self.done = False
        self.timeout_s = 0.0
        self.stream: Any = None  # CUDA: on which the rank works
        self.moved: Any = None  # CUDA: an event
        self._future: SimulatedFuture | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Give way until the collective is complete.

        Raises RuntimeError when `timeout`, on the world's clock, is over first.
        """
        self.run.wait_for(self, max(timeout.total_seconds(), 0.0) or self.timeout_s)
        if self.moved is not None:
            torch.cuda.current_stream().wait_event(self.moved)
        return True

    def is_completed(self) -> bool:
        """Whether it is, after all others have had their turn."""
        if not self.done:
            self.run.poll(self.rank)
        return self.done

    def is_success(self) -> bool:
        """True, as gloo says while nothing has failed."""
        return True

    def exception(self) -> None:
        """None: what can fail fails when the collective is called."""

    def synchronize(self) -> None:
        """Nothing to do."""

    def result(self) -> list[Tensor]:
        """The outputs."""
        if not self.done:
            raise RuntimeError("Work needs to be completed before calling result(). Should call wait() before result().")
        return list(self.outputs or self.inputs)

    def get_future(self) -> SimulatedFuture:
        """A future of the outputs; its callbacks run in this rank, when it next goes on."""
        if self._future is None:
            self._future = SimulatedFuture(self)
            if self.done:
                self.fulfil()
        return self._future

    def complete(self) -> None:
        """All that it was for is done; whoever waits for it can go on."""
        self.done = True
        if self._future is not None:
            self.rank.owed.append(self)
        if self.rank.waits_for is self:
            self.run.wake(self.rank)

    def fulfil(self) -> None:
        """Hand the outputs to the future, and so to its callbacks."""
        if self._future is not None and not self._future.fulfilled:
            self._future.fulfilled = True
            self._future.set_result(self.result())


class SimulatedFuture(torch.futures.Future[Any]):
    """Waits as its collective does. torch.futures.wait_all waits in C++, and so for ever unless all are complete."""

    def __init__(self, work: SimulatedWork) -> None:
        super().__init__()
        self.work, self.fulfilled = work, False

    def done(self) -> bool:
        """Whether the collective is complete."""
        return self.work.is_completed()

    def wait(self) -> Any:
        """The outputs, when it is."""
        self.work.wait()
        self.work.fulfil()
        return super().wait()


class _Channel:
    """Where the members of one group meet: each brings its parts in its own order, and equal places belong together."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._meetings: dict[int, list[SimulatedWork | None]] = {}
        self._missing: dict[int, int] = {}

    def arrive(self, seq: int, place: int, part: SimulatedWork) -> list[SimulatedWork] | None:
        """All parts, in group order, once the last one is there."""
        parts: Any = self._meetings.setdefault(seq, [None] * self.size)
        parts[place] = part
        missing = self._missing[seq] = self._missing.get(seq, self.size) - 1
        if missing:
            return None
        del self._meetings[seq], self._missing[seq]
        return list(parts)


def _settle(parts: list[SimulatedWork]) -> None:
    """Move the data, if the members agree; if not, the collective stays incomplete for ever, as with gloo."""
    first = parts[0]
    if any(part.terms != first.terms for part in parts) or (first.splits and not _splits_fit(parts)):
        return
    if first.stream is None:
        quietly(first.move, parts)
    else:
        _move_on_cuda(parts)
    for part in parts:
        part.complete()


def _splits_fit(parts: list[SimulatedWork]) -> bool:
    sent = [part.splits[0] for part in parts if part.splits]
    got = [part.splits[1] for part in parts if part.splits]
    return all(sent[source][target] == got[target][source] for source in range(len(sent)) for target in range(len(got)))


def _move_on_cuda(parts: list[SimulatedWork]) -> None:
    stream = torch.cuda.current_stream()
    for part in parts:
        stream.wait_stream(part.stream)
    quietly(parts[0].move, parts)
    moved = stream.record_event()
    for part in parts:
        part.moved = moved


class SimulatedGroup:
    """One rank's end of a simulated group, under the names that process groups have for their collectives.

    Each call checks what gloo checks, in gloo's words, and returns a handle; nothing waits here.
    """

    def __init__(self, run: _Run, rank: _Rank, channel: _Channel, place: int) -> None:
        self._run, self._rank, self._channel, self._place = run, rank, channel, place
        self._size, self._seq = channel.size, 0

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SimulatedWork:
        """dist.all_gather."""
        self._require_size("invalid output tensor list at index 0 (expected length {}, got {})", outputs[0])
        _require_alike("all_gather", outputs[0], inputs[0])
        return self._join(
            SimulatedWork("all_gather", _all_gather, inputs, outputs[0], payload_bytes=_payload_bytes(inputs[0]))
        )

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> SimulatedWork:
        """dist.all_gather_single, which was all_gather_into_tensor."""
        if output.dtype is not input.dtype or output.shape != (self._size * input.shape[:1].numel(), *input.shape[1:]):
            self.allgather([list(output.chunk(self._size))], [input])
