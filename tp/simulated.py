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
from tpbed.tp.isolation import Isolation, RankGroups, Start, environment, quietly
from tpbed.tp.ledger import WORLD, End, Event, read_ledger
from tpbed.tp.rank import Death, RankContext
from tpbed.tp.recorder import Recorder, call_site
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


Move = Callable[[list["SimulatedWork"]], None]


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
        self.proof_ms: float | None = None
        self.alive: tuple[int, ...] = ()  # ranks that did not let their run end
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
        variables = _variables(len(self.members))
        for rank in self.ranks:
            variables[b"RANK"] = variables[b"LOCAL_RANK"] = str(rank.index).encode()
            group = form(self, rank, "0", self.members, WORLD)
            enter_group(rank.groups, group, "0", places, BACKEND, self.store)
            rank.groups.default_pg, rank.groups.group_count = group, 1
            rank.isolation = Isolation(Start(rank.context, rank.groups, variables))
            rank.greenlet = greenlet(self._live)

    def drive(self) -> None:
        """Give turns until nobody can take one."""
        while (rank := self._next()) is not None:
            self.current = rank
            rank.isolation.enter()
            rank.greenlet.switch(rank)
            if self.failure is not None:
                raise self.failure

    def conclude(self) -> None:
        """Nobody can move: write down what each rank did, and which ranks wait for ever."""
        started = time.perf_counter()
        size = len(self.members)
        self.ledgers = tuple(read_ledger(rank.events, rank=rank.index, world_size=size) for rank in self.ranks)
        self.liveness = tuple(
            Liveness(state=rank.state, detail=rank.detail, frames=_frames(rank.greenlet)) for rank in self.ranks
        )
        self.results = tuple(rank.result for rank in self.ranks)
        self.stuck = tuple(rank.index for rank in self.ranks if rank.state == "running" or rank.polls > IDLE_POLLS)
        self.proved = time.perf_counter()
        if any(rank.state not in ("ended", "dead") for rank in self.ranks):
            self.proof_ms = (self.proved - started) * 1e3

    def report(self) -> WorldRun:
        """What `conclude` wrote down, once the world is ready for the next run."""
        return WorldRun(
            world=SimulatedWorld.name,
            results=self.results,
            ledgers=self.ledgers,
            liveness=self.liveness,
            stuck=self.stuck,
            proof_ms=self.proof_ms,
            recovery_ms=None if self.proof_ms is None else (time.perf_counter() - self.proved) * 1e3,
        )

    def unwind(self) -> None:
        """End the ranks that have not ended, by an exception where they stand. Nothing of it is recorded."""
        self.unwinding = True
        for rank in self.ranks:
            if rank.greenlet:  # has started, and not finished
                self.current = rank
                rank.isolation.enter()
                rank.greenlet.throw(_Unwind)
                rank.isolation.leave()

    def dissolve(self) -> None:
        """Take the run apart, so that nothing of it waits for the garbage collector."""
        self.current, self.over = None, True
        for name in self.registered:
            c10d._unregister_process_group(name)
        self.alive = tuple(rank.index for rank in self.ranks if rank.greenlet)
        _abandoned.extend(self.ranks[index].greenlet for index in self.alive)
        for rank in self.ranks:
            rank.greenlet = rank.isolation = rank.waits_for = None
        self.channels.clear()
        self.ranks = []

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
        rank = self.here(work.rank)
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

    def poll(self, rank: _Rank | None = None) -> None:
        """The rank asks for something instead of waiting for it: all others first; then time passes, if that helps."""
        rank = self.here(rank)
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


def _variables(world_size: int) -> dict[bytes, bytes]:
    """The caller's environment and what a launcher would add to it, but for the rank itself."""
    size = str(world_size).encode()
    launched = {b"WORLD_SIZE": size, b"LOCAL_WORLD_SIZE": size, b"MASTER_ADDR": b"127.0.0.1", b"MASTER_PORT": b"29500"}
    return environment() | launched


def _frames(suspended: Any) -> tuple[str, ...]:
    """Where a suspended rank stands, innermost first, outside torch and the test bed."""
    frame: FrameType | None = suspended.gr_frame if suspended else None
    sites = []
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_OURS):
            sites.append(call_site(frame))
        frame = frame.f_back
    return tuple(sites)


_NOT_OURS = (str(Path(__file__).parent), str(Path(torch.__file__).parent), "<frozen")


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
        run.dissolve()
        _running, sys.excepthook = None, hook
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
            raise RuntimeError(
                "Work needs to be completed before calling result(). Should call wait() before result()."
            )
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
        """dist.all_gather_single; all_gather_into_tensor before torch 2.13."""
        fits = input.dim() > 0 and output.shape == (self._size * input.shape[0], *input.shape[1:])
        if not fits or output.dtype is not input.dtype:
            return self.allgather([list(output.chunk(self._size))], [input])  # says what is wrong
        size = _payload_bytes(input)
        return self._join(SimulatedWork("all_gather", _all_gather, [input], [output], payload_bytes=size, whole=True))

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> SimulatedWork:
        """dist.all_reduce."""
        return self._join_reduction("all_reduce", _all_reduce, tensors, opts or dist.AllreduceOptions())

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> SimulatedWork:
        """dist.reduce."""
        opts = opts or c10d.ReduceOptions()
        return self._join_reduction("reduce", _reduce, tensors, opts, root=opts.rootRank)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> SimulatedWork:
        """dist.broadcast."""
        root = (opts or dist.BroadcastOptions()).rootRank
        size = _payload_bytes(tensors[0], in_memory=True)
        return self._join(SimulatedWork("broadcast", _broadcast, tensors, payload_bytes=size, root=root))

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> SimulatedWork:
        """dist.reduce_scatter."""
        if len(inputs[0]) != self._size:
            raise RuntimeError("invalid input tensor list size, must be world size")
        _require_alike("reduce_scatter", outputs, inputs[0][self._place])
        opts = opts or dist.ReduceScatterOptions()
        return self._join_reduction("reduce_scatter", _reduce_scatter, inputs[0], opts, outputs=outputs)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> SimulatedWork:
        """dist.reduce_scatter_single; reduce_scatter_tensor before torch 2.13."""
        if not output.dim() or input.shape != (output.shape[0] * self._size, *output.shape[1:]):
            raise RuntimeError(
                f"reduce_scatter: the input must be {self._size} outputs in a row (output {tuple(output.shape)}, "
                f"input {tuple(input.shape)})"
            )
        _require_kind("reduce_scatter", 0, output, input)
        opts = opts or dist.ReduceScatterOptions()
        return self._join_reduction("reduce_scatter", _reduce_scatter, [input], opts, outputs=[output], whole=True)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> SimulatedWork:
        """dist.all_to_all."""
        self._require_size("output tensor list size {1} does not match world size {0}", outputs)
        self._require_size("input tensor list size {1} does not match world size {0}", inputs)
        for tensors in (outputs, inputs):
            _require_alike("all_to_all", tensors, tensors[0])
        splits = [_payload_bytes(tensor) for tensor in inputs], [tensor.nbytes for tensor in outputs]
        return self._join(SimulatedWork("all_to_all", _all_to_all, inputs, outputs, splits=splits))

    def alltoall_base(
        self, output: Tensor, input: Tensor, out_splits: list[int], in_splits: list[int], opts: Any = None
    ) -> SimulatedWork:
        """dist.all_to_all_single."""
        if not (input.is_contiguous() or _is_channels_last(input)):
            raise ValueError("Tensors must be contiguous")
        for tensor in (input, output):
            _payload_bytes(tensor, in_memory=True)
        split = bool(out_splits or in_splits)
        if not split and input.nbytes != output.nbytes:
            raise RuntimeError(f"all_to_all: input and output must be equally large ({input.nbytes}, {output.nbytes})")
        splits = self._split(input, in_splits, split), self._split(output, out_splits, split)
        return self._join(SimulatedWork("all_to_all", _all_to_all, [input], [output], splits=splits, whole=True))

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SimulatedWork:
        """dist.gather."""
        root = (opts or c10d.GatherOptions()).rootRank
        if root == self._place:
            self._require_size(_WRONG_LIST.format("output"), outputs[0])
            _require_alike("gather", outputs[0], inputs[0])
        got = outputs[0] if root == self._place else []
        size = _payload_bytes(inputs[0])
        return self._join(SimulatedWork("gather", _all_gather, inputs, got, payload_bytes=size, root=root))

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> SimulatedWork:
        """dist.scatter."""
        root = (opts or c10d.ScatterOptions()).rootRank
        sent = inputs[0] if root == self._place else []
        if root == self._place:
            self._require_size(_WRONG_LIST.format("input"), sent)
            _require_alike("scatter", sent, outputs[0])
        size = max(_payload_bytes(tensor, in_memory=True) for tensor in (*sent, *outputs))
        return self._join(SimulatedWork("scatter", _scatter, sent, outputs, payload_bytes=size, root=root))

    def barrier(self, opts: Any = None) -> SimulatedWork:
        """dist.barrier; its time-out, unlike the group's, counts."""
        work = SimulatedWork("barrier", _nothing)
        work.timeout_s = max(opts.timeout.total_seconds(), 0.0) if opts is not None else 0.0
        return self._join(work)

    def _join_reduction(
        self,
        op: str,
        move: Move,
        inputs: list[Tensor],
        opts: Any,
        *,
        outputs: Sequence[Tensor] = (),
        root: int = -1,
        whole: bool = False,
    ) -> SimulatedWork:
        reduce_op = opts.reduceOp.op
        if reduce_op not in _FOLDS:
            raise UnsupportedCollectiveError(f"{reduce_op} is not simulated: use another reduce op, or a real world.")
        if reduce_op in _BITWISE and inputs[0].is_floating_point():
            raise RuntimeError(f"Cannot use ReduceOp.{reduce_op.name} with non-integral dtype")
        size = sum(_payload_bytes(tensor, in_memory=not outputs) for tensor in inputs)
        work = SimulatedWork(op, move, inputs, outputs, payload_bytes=size, root=root, reduce_op=reduce_op, whole=whole)
        return self._join(work)

    def _join(self, work: SimulatedWork) -> SimulatedWork:
        work.run, work.rank = self._run, self._run.here(self._rank)
        if self._size > 1 and torch._C._current_graph_task_id() != -1:
            raise UnsupportedCollectiveError(
                f"{work.terms[0]} inside backward() is not simulated: torch runs the backward passes of one thread "
                "as one; use a real world for this program."
            )
        tensors = work.outputs or work.inputs
        if tensors and tensors[0].is_cuda:
            work.stream = _stream_outside_capture(work.terms[0])
        self._seq += 1
        self._run.progress += 1
        parts = self._channel.arrive(self._seq, self._place, work)
        if parts is not None:
            _settle(parts)
        return work

    def _require_size(self, message: str, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self._size:
            raise RuntimeError(message.format(self._size, len(tensors)))

    def _split(self, tensor: Tensor, splits: list[int], split: bool) -> list[int]:
        """Bytes of each member's share; torch counts splits in rows."""
        if not split:
            return [tensor.nbytes // self._size] * self._size
        rows = tensor.shape[0]
        if not splits:
            if rows % self._size:
                raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
            splits = [rows // self._size] * self._size
        if len(splits) != self._size:
            raise RuntimeError("Number of tensor splits not equal to group size")
        if sum(splits) != rows:
            raise RuntimeError("Split sizes doesn't match total dim 0 size")
        return [count * (tensor.nbytes // max(rows, 1)) for count in splits]


_WRONG_LIST = "Incorrect {0} list size {{1}}. {0} list size should be {{0}}, same as size of the process group."
_KINDS = frozenset({
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.bool,
})  # fmt: skip


def _payload_bytes(tensor: Tensor, *, in_memory: bool = False) -> int:
    """Bytes that a tensor brings. Raises where gloo would, and where it should: past the end of the storage."""
    if tensor.layout is not torch.strided:
        raise UnsupportedCollectiveError(f"a tensor of layout {tensor.layout} is not simulated: use a dense one.")
    if tensor.dtype not in _KINDS:
        raise RuntimeError("Invalid scalar type")
    size = tensor.nbytes
    if in_memory and not tensor.is_contiguous():
        held = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
        if size > held:
            raise OverrunError(
                f"a collective takes {size} bytes in a row from a tensor of shape {tuple(tensor.shape)} and strides "
                f"{tensor.stride()}, whose storage ends after {held}: make the tensor contiguous."
            )
    return size


def _require_alike(op: str, tensors: Sequence[Tensor], like: Tensor) -> None:
    for index, tensor in enumerate(tensors):
        _require_kind(op, index, tensor, like)
        if tensor.shape != like.shape:
            raise RuntimeError(
                f"{op}: invalid tensor size at index {index} (expected {tuple(like.shape)}, got {tuple(tensor.shape)})"
            )


def _require_kind(op: str, index: int, tensor: Tensor, like: Tensor) -> None:
    if tensor.dtype is not like.dtype or tensor.device != like.device:
        raise RuntimeError(
            f"{op}: invalid tensor type at index {index} (expected {like.dtype} on {like.device}, "
            f"got {tensor.dtype} on {tensor.device})"
        )


def _is_channels_last(tensor: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])


def _stream_outside_capture(op: str) -> Any:
    if torch.cuda.is_current_stream_capturing():
        raise UnsupportedCollectiveError(f"{op} inside a CUDA graph capture is not simulated: stay eager here.")
    return torch.cuda.current_stream()


# How the data move. `parts` are in group order, and agree.

_OPS = dist.ReduceOp.RedOpType
_BITWISE = (_OPS.BAND, _OPS.BOR, _OPS.BXOR)
_FOLDS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    _OPS.SUM: Tensor.add_,
    _OPS.AVG: Tensor.add_,
    _OPS.PRODUCT: Tensor.mul_,
    _OPS.MIN: lambda total, value: torch.where(value < total, value, total),
    _OPS.MAX: lambda total, value: torch.where(total < value, value, total),
    _OPS.BAND: Tensor.bitwise_and_,
    _OPS.BOR: Tensor.bitwise_or_,
    _OPS.BXOR: Tensor.bitwise_xor_,
}


def _nothing(parts: list[SimulatedWork]) -> None:
    pass


def _all_gather(parts: list[SimulatedWork]) -> None:
    """Each part's input to everybody's outputs; only the root has outputs in a gather."""
    sent = [part.inputs[0] for part in parts]
    if not all(tensor.shape == sent[0].shape and tensor.dtype is sent[0].dtype for tensor in sent):
        _all_gather_bytes(parts, sent)
        return
    row = torch.cat(sent) if any(part.whole for part in parts) else None
    for part in parts:
        if part.whole and row is not None:
            part.outputs[0].copy_(row)
        elif part.outputs:
            torch._foreach_copy_(part.outputs, sent)


def _all_gather_bytes(parts: list[SimulatedWork], sent: list[Tensor]) -> None:
    flat = [tensor.reshape(-1) for tensor in sent]
    for part in parts:
        outputs = part.outputs[0].chunk(len(parts)) if part.whole else part.outputs
        for output, values in zip(outputs, flat, strict=False):
            _deliver(output, values)


def _broadcast(parts: list[SimulatedWork]) -> None:
    root = parts[parts[0].terms[1]]
    for part in parts:
        if part is not root:
            _deliver(_memory(part.inputs[0]), _memory(root.inputs[0]))


def _scatter(parts: list[SimulatedWork]) -> None:
    root = parts[parts[0].terms[1]]
    for part, values in zip(parts, root.inputs, strict=True):
        _deliver(_memory(part.outputs[0]), _memory(values))


def _all_reduce(parts: list[SimulatedWork]) -> None:
    tensors = [_memory(part.inputs[0]) for part in parts]
    for tensor, total in zip(tensors, _totals(parts, tensors), strict=True):
        tensor.copy_(total)


def _reduce(parts: list[SimulatedWork]) -> None:
    root = parts[0].terms[1]
    tensors = [_memory(part.inputs[0]) for part in parts]
    for place, (tensor, total) in enumerate(zip(tensors, _totals(parts, tensors), strict=True)):
        scratch = 0 if place == root else tensor.numel() - tensor.numel() // len(parts)
        tensor[scratch:].copy_(total[scratch:])


def _reduce_scatter(parts: list[SimulatedWork]) -> None:
    if not all(part.whole for part in parts):
        _reduce_scatter_lists(parts)
        return
    dense = [_dense(part.inputs[0]) for part in parts]
    totals = _totals(parts, [_memory(tensor) for tensor in dense])
    for place, (part, tensor, total) in enumerate(zip(parts, dense, totals, strict=True)):
        rows = part.outputs[0].shape[0]
        total = total.as_strided(tensor.shape, tensor.stride(), 0)
        part.outputs[0].copy_(total.narrow(0, place * rows, rows))


def _reduce_scatter_lists(parts: list[SimulatedWork]) -> None:
    inputs = [part.inputs[0].chunk(len(parts)) if part.whole else part.inputs for part in parts]
    totals = []
    for place, part in enumerate(parts):
        values = [_memory(_dense(row[place])) for row in inputs]
        values[place] = _own_share(part.outputs[0], inputs[place][place])
        totals.append(_total(part, values))
    for part, total in zip(parts, totals, strict=True):
        _memory(part.outputs[0]).copy_(total)


def _own_share(output: Tensor, share: Tensor) -> Tensor:
    """A rank's own share goes to its output by index, and is then read from there by memory, as the peers' are."""
    if output.is_contiguous():
        return share.reshape(-1)
    output.copy_(share)
    return _memory(output)


def _all_to_all(parts: list[SimulatedWork]) -> None:
    """Through copies, as an output may be an input of the same rank."""
    sent = []
    for part in parts:
        tensors = [_memory(part.inputs[0])] if part.whole else [tensor.reshape(-1) for tensor in part.inputs]
        sent.append(_pieces(torch.cat(tensors), part.splits[0] if part.splits else []))
    for place, part in enumerate(parts):
        outputs: Sequence[Tensor] = part.outputs
        if part.whole:
            outputs = _pieces(_memory(part.outputs[0]), part.splits[1] if part.splits else [])
        for source, output in enumerate(outputs):
            _deliver(output, sent[source][place])


def _pieces(flat: Tensor, sizes: list[int]) -> list[Tensor]:
    rest = flat.nbytes - sum(sizes)  # where no splits are given and the members do not divide the tensor
    return list(flat.view(torch.uint8).split([*sizes, rest]))[: len(sizes)]


def _totals(parts: list[SimulatedWork], tensors: list[Tensor]) -> list[Tensor]:
    """What each part gets: all tensors reduced by its own op, as its own dtype."""
    totals: dict[Any, Tensor] = {}
    for part, tensor in zip(parts, tensors, strict=True):
        key = part.reduce_op, tensor.dtype
        if key not in totals:
            totals[key] = _total(part, tensors)
    return [totals[part.reduce_op, tensor.dtype] for part, tensor in zip(parts, tensors, strict=True)]


def _total(part: SimulatedWork, values: list[Tensor]) -> Tensor:
    dtype, fold = part.inputs[0].dtype, _FOLDS[part.reduce_op]
    total = _read_as(dtype, values[0]).clone()
    for value in values[1:]:
        total = fold(total, _read_as(dtype, value))
    if part.reduce_op is _OPS.AVG or part.reduce_op == _OPS.AVG:
        total = total.div_(len(values), rounding_mode=None if dtype.is_floating_point else "trunc")
    return total


def _memory(tensor: Tensor) -> Tensor:
    """As many elements in a row as it has, from its first one on, whatever its strides."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def _dense(tensor: Tensor) -> Tensor:
    """Without gaps; the order of its memory stays."""
    return tensor if tensor.is_contiguous() else tensor.clone()


def _read_as(dtype: torch.dtype, flat: Tensor) -> Tensor:
    if flat.dtype is dtype:
        return flat
    if flat.storage_offset() * flat.element_size() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype)


def _deliver(output: Tensor, flat: Tensor) -> None:
    """The bytes of `flat` into `output`, by index."""
    output.copy_(_read_as(output.dtype, flat).view(output.shape))


class SimulatedWorld:
    """A world whose ranks are greenlets of the calling thread, on the CPU or on one CUDA device that they share.

    world_size: ranks; a thousand are fine, and cost a thousand times one.
    schedule: who runs next; starts over with every run, so that a program without other inputs repeats itself exactly.
    device: where the context of a rank says that it works.
    """

    name = "sim"

    def __init__(
        self, world_size: int = 4, schedule: Schedule | None = None, device: str | torch.device = "cpu"
    ) -> None:
        if world_size < 1:
            raise TestbedError(f"world_size={world_size}: a world has one rank at least.")
        self.world_size = world_size
        self.schedule: Schedule = schedule or RoundRobin()
        self.device = torch.device(device)
        self.choices: tuple[int, ...] = ()  # of the last run: Replayed(choices) repeats it
        self._closed = False

    def run(self, program: RankProgram, *, stall_after_s: float = 10.0) -> WorldRun:
        """Run `program` on every rank until all have ended or the rest are stuck for good.

        stall_after_s: not needed here, as nothing waits for a clock.
        Raises NestedWorldError inside a rank program of a simulated world, and UnwindError if a program did not let the
        run end; the world can run the next one all the same.
        """
        self._require_free()
        run = _Run(self, program)
        with _in_place(run):
            try:
                self.schedule.begin()
                run.launch()
                run.drive()
                run.conclude()
            finally:
                self.choices = tuple(run.choices)
                run.unwind()
        if run.alive:
            raise UnwindError(
                f"ranks {list(run.alive)} caught {REFUSALS} exceptions that were to end them and went on: let "
                "BaseException pass in the rank program (this world can run the next one)."
            )
        if run.failure is not None:
            raise run.failure
        return run.report()

    def close(self) -> None:
        """Run no more; idempotent. Nothing else is held between runs."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_free(self) -> None:
        if self._closed:
            raise ClosedWorldError("this world is closed: make another one.")
        if _running is not None:
            raise NestedWorldError(
                "a simulated world is running in this process: call run outside rank programs, from one thread at a time."
            )
