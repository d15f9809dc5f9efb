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

What this world cannot do. A rank that computes for ever without a call to torch.distributed or to its context keeps the
whole world waiting, and so does one that waits for something outside it. A rank cannot wait inside an operator of
torch.ops, backward(), a future's callback or a graph capture, and is told so; inside a callback from C++ that this
module does not know of, it would abort the process.
"""

from __future__ import annotations

import heapq
import sys
import time
import warnings
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from greenlet import getcurrent, greenlet
from torch import Tensor
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed import c10d_logger
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


class WorldSizeError(TestbedError):
    """A world cannot have so many ranks."""


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


# The run: ranks, turns, time.


class _Rank:
    """One rank of one run."""

    def __init__(self, index: int, context: RankContext, events: list[Event]) -> None:
        self.index, self.context, self.events = index, context, events
        self.groups: Any = RankGroups()
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
        self.starts: _Rank | None = None
        self.failure: BaseException | None = None
        self.unwinding = self.over = False
        self.channels: dict[Any, _Channel] = {}
        self.registered: list[Any] = []  # names in torch's C++ registry
        self.store = _RefusedStore()
        self.alive: tuple[int, ...] = ()  # ranks that did not let their run end
        self.ranks = [self._rank(index) for index in self.members]

    def _rank(self, index: int) -> _Rank:
        events: list[Event] = []
        context = RankContext(
            rank=index,
            world_size=len(self.members),
            recorder=Recorder(events.append, self.clock),
            sleep=self.sleep,
            die=self.die,
            device=self.device,
        )
        return _Rank(index, context, events)

    def clock(self) -> int:
        """Nanoseconds since the run began; no two events have the same."""
        self.now_ns += 1
        return self.now_ns

    # In the greenlet of the caller.

    def launch(self) -> None:
        """Make each rank ready to start, with its default group; the caller's own state must be put away."""
        places = {rank: rank for rank in self.members}
        variables, filters = _variables(len(self.members)), warnings.filters
        for rank in self.ranks:
            variables[b"RANK"] = variables[b"LOCAL_RANK"] = str(rank.index).encode()
            group = _form(self, rank, "0", self.members, WORLD)
            _enter_in_book(rank.groups, group, "0", places, BACKEND, self.store)
            rank.groups.default_pg, rank.groups.group_count = group, 1
            rank.isolation = Isolation(Start(rank.context, rank.groups, variables, filters))
            rank.greenlet = greenlet(self._live)

    def drive(self) -> None:
        """Give turns until nobody can take one. Ranks pass the turn on among themselves, but all start from here."""
        while (rank := self.starts or self._next()) is not None:
            self.current, self.starts = rank, None
            rank.isolation.enter()
            rank.greenlet.switch(rank)
            if self.failure is not None:
                raise self.failure

    def conclude(self) -> Callable[[], WorldRun]:
        """Nobody can move: write down what the ranks did, and which are stuck. Call the answer when all is cleared."""
        silent = time.perf_counter()
        size = len(self.members)
        ledgers = tuple(read_ledger(rank.events, rank=rank.index, world_size=size) for rank in self.ranks)
        liveness = tuple(_liveness(rank) for rank in self.ranks)
        stuck = tuple(rank.index for rank in self.ranks if rank.state == "running" or rank.polls > IDLE_POLLS)
        proved = time.perf_counter()
        hung = any(seen.state not in ("ended", "dead") for seen in liveness)
        results = tuple(rank.result for rank in self.ranks)
        return lambda: WorldRun(
            world=SimulatedWorld.name,
            results=results,
            ledgers=ledgers,
            liveness=liveness,
            stuck=stuck,
            proof_ms=(proved - silent) * 1e3 if hung else None,
            recovery_ms=(time.perf_counter() - proved) * 1e3 if hung else None,
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
            _unregister_process_group(name)
        self.alive = tuple(rank.index for rank in self.ranks if rank.greenlet)
        _abandoned.extend(self.ranks[index].greenlet for index in self.alive)
        for rank in self.ranks:
            rank.greenlet = rank.isolation = rank.groups = rank.waits_for = None
        self.channels.clear()
        self.ranks = []

    # In the greenlet of a rank.

    def _live(self, rank: _Rank) -> None:
        try:
            self._live_to_the_end(rank)
        except _Unwind:
            pass
        except KeyboardInterrupt as interrupt:
            self.failure = interrupt
        finally:
            if not self.unwinding:
                rank.isolation.leave()

    def _live_to_the_end(self, rank: _Rank) -> None:
        recorder = rank.context.recorder
        try:
            if self.device.type == "cuda" and self.device.index is not None:
                torch.cuda.set_device(self.device)
            result = self.program(rank.index)
            self._end(rank, recorder.returned, result)
        except (_Unwind, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - SystemExit too: it ends a rank, and not the world
            self._end(rank, partial(recorder.raised, error))

    def _end(self, rank: _Rank, record: Callable[[], None], result: Any = None) -> None:
        if not self.unwinding:
            record()
            rank.state, rank.result = "ended", result
            self.progress += 1

    def here(self, owner: _Rank | None = None, *, waits: bool = True) -> _Rank:
        """The rank whose turn it is; it must be the caller, and `owner` if that is given; and able to wait."""
        rank = self.current
        if rank is None or self.over:
            raise ForeignGroupError(_foreign(owner, "outside its run"))
        if rank.greenlet is not getcurrent():
            raise UnsupportedCollectiveError(
                f"rank {rank.index} called from another thread or greenlet than its program runs in: a simulated rank "
                "has but one; use a real world for this program."
            )
        if self.unwinding:
            self._refuse(rank)
        if owner is not None and owner is not rank:
            raise ForeignGroupError(_foreign(owner, f"by rank {rank.index}"))
        if waits and len(self.members) > 1 and (inside := _cannot_wait()):
            raise UnsupportedCollectiveError(
                f"rank {rank.index} would wait inside {inside}, where a simulated rank cannot: call from outside, or "
                "use a real world."
            )
        return rank

    def _refuse(self, rank: _Rank) -> NoReturn:
        rank.refusals += 1
        while rank.refusals > REFUSALS:
            self.hub.switch()
        raise _Unwind

    def wait_for(self, work: SimulatedWork, timeout_s: float) -> None:
        """Until the collective is complete; even if it is, another rank may have the turn first."""
        rank = self.here(work.rank, waits=not work.done and not work.vetted)
        if work.done:
            if self.ready and (work.vetted or not _cannot_wait()):
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
            self.poll(rank)

    def poll(self, owner: _Rank) -> None:
        """A rank asks for something instead of waiting for it: all others first; if it asks in vain, time passes."""
        rank = self.here(owner)
        self._wake_due()
        if rank.polled_at != self.progress:
            rank.polled_at, rank.polls = self.progress, 0
        if all(self.ranks[index].polled_at == self.progress for index in self.ready):  # nobody else can do anything
            rank.polls += 1
            if rank.polls > 1 and self.sleepers:
                self._wake_first()
        if rank.polls > IDLE_POLLS:
            self._freeze(rank, "stalled", "asks for ever for what can never be")
        if self.ready:
            chosen = self._chosen()
            insort(self.ready, rank.index)
            self._hand_over(rank, chosen)

    def die(self, death: Death, why: str) -> None:
        """RankContext.die, for the rank whose turn it is. It does not return; `finally` blocks run after the run."""
        rank = self.here()
        if death in ("stop", "stall"):
            self._freeze(rank, "stopped" if death == "stop" else "stalled", why)
        killed = death == "kill"
        rank.context.recorder.end(
            End(how="killed", message=why, signal=9, at_ns=self.clock())
            if killed
            else End(how="exited", message=why, exit_code=1, at_ns=self.clock())
        )
        self._freeze(rank, "dead", "signal 9" if killed else "exit status 1")

    def _freeze(self, rank: _Rank, state: RankState, detail: str) -> None:
        rank.state, rank.detail = state, detail
        self.progress += 1
        self._give_way(rank)

    def _give_way(self, rank: _Rank) -> None:
        self._hand_over(rank, self._chosen())

    def _hand_over(self, rank: _Rank, chosen: _Rank | None) -> None:
        if chosen is not rank:
            rank.isolation.leave()
            if chosen is None or not chosen.greenlet:  # a greenlet starts as deep in the stack as its starter is
                self.starts = chosen
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
        except Exception as error:  # noqa: BLE001 - of the schedule: the caller of the world gets it, not the rank
            self.failure = error
            return None

    def _next(self) -> _Rank | None:
        self._wake_due()
        while self.sleepers and not self.ready:
            self._wake_first()
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

    def _wake_due(self) -> None:
        """A turn takes time; those who slept until now can run."""
        self.now_ns += TURN_NS
        while self.sleepers and self.sleepers[0][0] <= self.now_ns:
            self._wake_first()

    def _wake_first(self) -> None:
        """The first of the sleepers, whose time comes now."""
        when, _, index, waits = heapq.heappop(self.sleepers)
        if self.ranks[index].waits == waits:  # else something else has woken it
            self.now_ns = max(self.now_ns, when)
            self.wake(self.ranks[index])


def _cannot_wait() -> str:
    """What the caller is in that cannot be left in the middle, for another rank may enter it meanwhile; "" if nothing.

    torch's Python binding and its autograd engine keep a stack per thread; ranks that leave them in another order than
    they entered would abort the process, or run each other's backward passes.
    """
    if torch._C._current_graph_task_id() != -1:
        return "backward()"
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        return "the capture of a CUDA graph"
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        functions = _INTO_CPP.get(frame.f_code.co_filename)
        if functions is not None and frame.f_code.co_qualname in functions:
            return functions[frame.f_code.co_qualname]
        frame = frame.f_back
    return ""


_WAYS_INTO_CPP: dict[str, tuple[Any, ...]] = {  # through torch's binding and back into Python
    "an operator of torch.ops": (
        torch._ops.OpOverload.__call__,
        torch._ops.OpOverload.redispatch,
        torch._ops.OpOverloadPacket.__call__,
    ),
    "a callback of a future": (
        torch.futures.Future.then,
        torch.futures.Future.add_done_callback,
        torch.futures.Future.set_result,
    ),
}
_INTO_CPP: dict[str, dict[str, str]] = {}  # what, by file and function
for _what, _ways in _WAYS_INTO_CPP.items():
    for _way in _ways:
        _INTO_CPP.setdefault(_way.__code__.co_filename, {})[_way.__code__.co_qualname] = _what


def _foreign(owner: _Rank | None, how: str) -> str:
    whose = "of a simulated rank" if owner is None else f"of rank {owner.index}"
    return (
        f"a process group or context {whose} was used {how}: simulated ranks share modules and closures, so keep them "
        "in the rank program's own variables and not in globals."
    )


def _fulfil(rank: _Rank) -> None:
    owed, rank.owed = rank.owed, []
    for work in owed:
        work.fulfil()


def _variables(world_size: int) -> dict[bytes, bytes]:
    """The caller's environment, and what a launcher adds to it but for the rank itself; nobody listens at the port."""
    size = str(world_size).encode()
    launched = {b"WORLD_SIZE": size, b"LOCAL_WORLD_SIZE": size, b"MASTER_ADDR": b"127.0.0.1", b"MASTER_PORT": b"29500"}
    return environment() | launched


def _liveness(rank: _Rank) -> Liveness:
    frames = () if rank.state in ("ended", "dead") else _frames(rank.greenlet.gr_frame)
    return Liveness(state=rank.state, detail=rank.detail, frames=frames)


def _frames(frame: FrameType | None) -> tuple[str, ...]:
    """Where a rank stands, innermost first, outside torch and the test bed."""
    sites = []
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_OURS):
            sites.append(call_site(frame))
        frame = frame.f_back
    return tuple(sites)


_NOT_OURS = (str(Path(__file__).parent), str(Path(torch.__file__).parent), "<frozen")


# torch.distributed's own machinery, made to speak for the rank whose turn it is.


class _RefusedStore(c10d.Store):
    """Stands where torch.distributed wants a store; a rank that waited for a key in C++ would stop the whole world."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing waits here."""


class SimulatedProcessGroup(RecordingGroup):
    """A process group as one rank sees it. What is not simulated is refused by name, when it is called."""

    run: _Run
    description = ""
    _registered: Any = None

    @property
    def group_name(self) -> Any:
        """Its name in torch's C++ registry, where all ranks' groups lie: unlike the label, it is unique."""
        if self._registered is None:
            self._registered = f"{self.label}@{self.rank()}.{len(self.run.registered)}"
            self.run.registered.append(self._registered)
            _register_process_group(self._registered, self)
        return self._registered

    @property
    def group_desc(self) -> str:
        """As given to new_group."""
        return self.description


def _refusing(what: str) -> Callable[..., NoReturn]:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise UnsupportedCollectiveError(
            f"{what} is not simulated: use the collectives that SimulatedGroup has, or run the program in a real world."
        )

    return refuse


_REFUSED_OPS = """
    send recv recv_anysource _start_coalescing _end_coalescing allreduce_coalesced allgather_coalesced
    allgather_into_tensor_coalesced all_gather_single_coalesced reduce_scatter_tensor_coalesced
    reduce_scatter_single_coalesced gather_single gather_into_tensor monitored_barrier split_group merge_remote_group
"""
_REFUSED_STORE = "set get add wait check compare_set delete_key num_keys append multi_get multi_set"
for _name in _REFUSED_OPS.split():
    setattr(SimulatedProcessGroup, _name, _refusing(_name))
for _name in _REFUSED_STORE.split():
    setattr(_RefusedStore, _name, _refusing(f"Store.{_name}"))


def _form(run: _Run, rank: _Rank, name: str, members: tuple[int, ...], label: str) -> SimulatedProcessGroup:
    """The rank's end of a group. The members' ends meet if each has formed this group as often as the others."""
    count = rank.formed[name, members] = rank.formed.get((name, members), 0) + 1
    channel = run.channels.get((name, members, count))
    if channel is None:
        channel = run.channels[name, members, count] = _Channel(len(members))
    inner = SimulatedGroup(run, rank, channel, members.index(rank.index))
    group = SimulatedProcessGroup(inner, rank.context, label=label, ranks=members)
    group.run = run
    return group


def _enter_in_book(
    book: RankGroups, group: Any, name: str, places: dict[int, int], backend: str, store: Any, tag: str | None = None
) -> None:
    """As torch.distributed does with a group that it has made."""
    book.pg_map[group] = (backend, store)
    book.pg_names[group] = name
    book.pg_group_ranks[group] = places
    book.pg_backend_config[group] = f"cpu:{backend},cuda:{backend}"
    if not tag:
        book.tags_to_pg.setdefault("", []).append(group)
    key = book.pg_to_tag[group] = f"user:{tag}" if tag else f"ptd:{name}"
    book.tags_to_pg.setdefault(key, []).append(group)


def _new_group(
    run: _Run, size: int, place: int | None, ranks: list[int], backend: str, store: Any, name: str, **options: Any
) -> tuple[Any, Any]:
    """In the place of the function of torch.distributed that makes every group, with its arguments and answer."""
    rank, tag = run.here(waits=False), options.get("pg_tag")
    if name in rank.groups.pg_names.values():
        raise ValueError("The specified group name has already been created, please use a different group name")
    existing = c10d._find_pg_by_ranks_and_tag(tag, ranks) if tag else None
    if existing is not None:
        return existing, run.store
    members = tuple(ranks) or run.members
    if rank.index not in members:
        return dist.GroupMember.NON_GROUP_MEMBER, None
    group = _form(run, rank, name, members, name if ranks else WORLD)
    group.description = options.get("group_desc") or "undefined"
    places = {member: number for number, member in enumerate(members)}
    _enter_in_book(rank.groups, group, name, places, str(backend), run.store, tag)
    return group, run.store


def _replacements(run: _Run) -> list[tuple[Any, str, Any]]:
    """Groups are simulated, whatever backend they ask for; no rank clears others; a log does not mask an error."""
    return [
        (c10d, "_new_process_group_helper", partial(_new_group, run)),
        (c10d, "rendezvous", partial(_meet, run)),
        (c10d, "_unregister_all_process_groups", lambda: None),
        (c10d_logger, "_get_msg_dict", lambda name, *args, **kwargs: {"func_name": name}),
    ]


def _meet(run: _Run, *args: Any, **options: Any) -> Iterator[tuple[Any, int, int]]:
    yield run.store, run.here(waits=False).index, len(run.members)


@contextmanager
def _in_place(run: _Run) -> Iterator[None]:
    """Put the caller's state away and let torch.distributed speak for ranks; undo both."""
    global _running
    replaced = [(module, name, getattr(module, name), new) for module, name, new in _replacements(run)]
    caller, hook = Isolation(), sys.excepthook
    caller.leave()
    try:
        _running = run
        for module, name, _, new in replaced:
            setattr(module, name, new)
        yield
    finally:
        for module, name, old, _ in replaced:
            setattr(module, name, old)
        run.dissolve()
        _running, sys.excepthook = None, hook
        caller.enter()


# What a rank brings to a collective, and where the members meet.


class SimulatedWork(dist.Work):
    """One rank's part in a collective: what it brings, what it gets, and the handle that it waits on."""

    run: _Run
    rank: _Rank
    fold: _Fold | None = None  # how the part's rank wants the parts reduced
    whole = False  # its one tensor stands for a list of equal parts
    splits: tuple[list[int], list[int]] | None = None  # bytes to each member, and from each
    timeout_s = 0.0
    vetted = False  # it is waited on where it is called, and that may wait
    stream: Any = None  # CUDA: on which the rank works
    moved: Any = None  # CUDA: the event after which its outputs are there
    done = False
    _future: SimulatedFuture | None = None

    def __init__(
        self,
        op: str,
        payload: Any,
        move: Move | None,
        inputs: Sequence[Tensor] = (),
        outputs: Sequence[Tensor] = (),
        root: int = -1,
    ) -> None:
        super().__init__()
        self.terms = (op, root, payload)  # on which all members must agree; payload in bytes
        self.move, self.inputs, self.outputs = move, inputs, outputs

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Give way until the collective is complete.

        Raises RuntimeError when `timeout`, on the world's clock, is over first.
        """
        self.run.wait_for(self, max(timeout.total_seconds(), 0.0) or self.timeout_s)
        if self.moved is not None:
            torch.cuda.current_stream().wait_event(self.moved)
        return True

    def is_completed(self) -> bool:
        """Whether it is, after all others have had a turn."""
        if not self.done:
            self.run.poll(self.rank)
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


class SimulatedFuture(torch.futures.Future[Any]):
    """Waits as its collective does. torch.futures.wait_all, which waits in C++, would stop the whole world."""

    def __init__(self, work: SimulatedWork) -> None:
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


class _Channel:
    """Where the members of one group meet: those that are equally far in their own order of calls belong together."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._meetings: dict[int, tuple[list[Any], set[int]]] = {}

    def arrive(self, seq: int, place: int, part: SimulatedWork) -> list[SimulatedWork] | None:
        """All parts in group order, once the last is there."""
        meeting = self._meetings.get(seq)
        if meeting is None:
            meeting = self._meetings[seq] = [None] * self.size, set(range(self.size))
        parts, missing = meeting
        parts[place] = part
        missing.discard(place)
        if missing:
            return None
        del self._meetings[seq]
        return parts


def _settle(parts: list[SimulatedWork]) -> None:
    """Move the data, if the members agree; if not, the collective stays incomplete for ever, as with gloo."""
    first = parts[0]
    for part in parts:
        if part.terms != first.terms:
            return
    if first.splits is not None and not _splits_fit(parts):
        return
    if first.stream is not None:
        _move_on_cuda(parts)
    elif first.move is not None:
        quietly(first.move, parts)
    for part in parts:
        part.complete()


def _splits_fit(parts: list[SimulatedWork]) -> bool:
    """Whether each member expects from each other what that one sends."""
    sent, expected = zip(*(part.splits for part in parts if part.splits is not None), strict=True)
    return all(row == tuple(column) for row, column in zip(zip(*sent, strict=True), expected, strict=True))


def _move_on_cuda(parts: list[SimulatedWork]) -> None:
    """After what every rank has queued on its stream, and before what it queues when it has waited."""
    stream = torch.cuda.current_stream()
    for part in parts:
        stream.wait_stream(part.stream)
    if parts[0].move is not None:
        quietly(parts[0].move, parts)
    moved = stream.record_event()
    for part in parts:
        part.moved = moved


class SimulatedGroup:
    """One rank's end of a simulated group, under the names that process groups give their collectives.

    A call checks what gloo checks, says what is wrong in gloo's words, and returns a handle; nothing waits here.
    """

    def __init__(self, run: _Run, rank: _Rank, channel: _Channel, place: int) -> None:
        self._run, self._rank, self._channel, self._place = run, rank, channel, place
        self._size, self._seq = channel.size, 0

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SimulatedWork:
        """dist.all_gather."""
        (given,) = outputs
        self._require_length(given, "all_gather: invalid output tensor list at index 0 (expected length {}, got {})")
        _require_alike("all_gather", given, inputs[0])
        return self._join(SimulatedWork("all_gather", _payload(inputs[0]), _all_gather, inputs, given), opts)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> SimulatedWork:
        """dist.all_gather_single; all_gather_into_tensor before torch 2.13."""
        fits = input.dim() > 0 and output.shape == (self._size * input.shape[0], *input.shape[1:])
        if not fits or output.dtype is not input.dtype:
            return self.allgather([list(output.chunk(self._size))], [input], opts)  # which says what is wrong
        work = SimulatedWork("all_gather", _payload(input), _all_gather, [input], [output])
        work.whole = True
        return self._join(work, opts)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> SimulatedWork:
        """dist.all_reduce."""
        opts = opts or c10d.AllreduceOptions()
        work = SimulatedWork("all_reduce", _payload(tensors[0], in_memory=True), _all_reduce, tensors)
        return self._join(work, opts, _fold(opts, tensors[0]))

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> SimulatedWork:
        """dist.reduce."""
        opts = opts or c10d.ReduceOptions()
        work = SimulatedWork("reduce", _payload(tensors[0], in_memory=True), _reduce, tensors, root=opts.rootRank)
        return self._join(work, opts, _fold(opts, tensors[0]))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> SimulatedWork:
        """dist.broadcast."""
        root = (opts or c10d.BroadcastOptions()).rootRank
        size = _payload(tensors[0], in_memory=True)
        return self._join(SimulatedWork("broadcast", size, _broadcast, tensors, root=root), opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> SimulatedWork:
        """dist.reduce_scatter."""
        (given,) = inputs
        self._require_length(given, "invalid input tensor list size, must be world size")
        _require_alike("reduce_scatter", outputs, given[self._place])
        _payload(outputs[0], in_memory=True)
        opts = opts or c10d.ReduceScatterOptions()
        shares = [_payload(tensor) for tensor in given]
        work = SimulatedWork("reduce_scatter", shares, _reduce_scatter, given, outputs)
        return self._join(work, opts, _fold(opts, outputs[0]))

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> SimulatedWork:
        """dist.reduce_scatter_single; reduce_scatter_tensor before torch 2.13."""
        if not output.dim() or input.shape != (output.shape[0] * self._size, *output.shape[1:]):
            raise RuntimeError(
                f"reduce_scatter: the input must be as long as {self._size} outputs (output {tuple(output.shape)}, "
                f"input {tuple(input.shape)})"
            )
        _require_alike("reduce_scatter", [input], input, of=output)
        opts = opts or c10d.ReduceScatterOptions()
        shares = [_payload(output)] * self._size
        work = SimulatedWork("reduce_scatter", shares, _reduce_scatter, [input], [output])
        work.whole = True
        return self._join(work, opts, _fold(opts, output))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> SimulatedWork:
        """dist.all_to_all."""
        self._require_length(outputs, "all_to_all: output tensor list size {1} does not match world size {0}")
        self._require_length(inputs, "all_to_all: input tensor list size {1} does not match world size {0}")
        _require_alike("all_to_all", outputs, outputs[0])
        _require_alike("all_to_all", inputs, inputs[0])
        work = SimulatedWork("all_to_all", None, _all_to_all, inputs, outputs)
        work.splits = [_payload(tensor) for tensor in inputs], [tensor.nbytes for tensor in outputs]
        return self._join(work, opts)

    def alltoall_base(
        self, output: Tensor, input: Tensor, out_splits: list[int], in_splits: list[int], opts: Any = None
    ) -> SimulatedWork:
        """dist.all_to_all_single."""
        if not input.is_contiguous() and not _is_channels_last(input):
            raise ValueError("Tensors must be contiguous")
        even = not out_splits and not in_splits
        if even and input.nbytes != output.nbytes:
            raise RuntimeError(f"all_to_all: {input.nbytes} bytes go in and {output.nbytes} out: they must be as many")
        _payload(output, in_memory=True)
        work = SimulatedWork("all_to_all", None, _all_to_all, [input], [output])
        work.whole = True
        work.splits = self._split(input, in_splits, even), self._split(output, out_splits, even)
        return self._join(work, opts)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SimulatedWork:
        """dist.gather."""
        root = (opts or c10d.GatherOptions()).rootRank
        given: list[Tensor] = outputs[0] if root == self._place else []
        if root == self._place:
            self._require_length(given, _WRONG_LENGTH.format("gather", "output", "Output"))
            _require_alike("gather", given, inputs[0])
        return self._join(SimulatedWork("gather", _payload(inputs[0]), _all_gather, inputs, given, root), opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> SimulatedWork:
        """dist.scatter."""
        root = (opts or c10d.ScatterOptions()).rootRank
        given: list[Tensor] = inputs[0] if root == self._place else []
        if root == self._place:
            self._require_length(given, _WRONG_LENGTH.format("scatter", "input", "Input"))
            _require_alike("scatter", given, outputs[0])
        size = max(_payload(tensor, in_memory=True) for tensor in (*outputs, *given))
        return self._join(SimulatedWork("scatter", size, _scatter, given, outputs, root), opts)

    def barrier(self, opts: Any = None) -> SimulatedWork:
        """dist.barrier. Its time-out counts, unlike the group's."""
        work = SimulatedWork("barrier", 0, None)
        if opts is not None:
            work.timeout_s = max(opts.timeout.total_seconds(), 0.0)
        return self._join(work, opts)

    def _join(self, work: SimulatedWork, opts: Any, fold: _Fold | None = None) -> SimulatedWork:
        run = self._run
        work.vetted = not getattr(opts, "asyncOp", True)
        work.run, work.rank = run, run.here(self._rank, waits=self._size > 1)
        if fold is not None:
            work.fold = fold
        op, root, _ = work.terms
        if root >= self._size:
            raise RuntimeError(f"{op}: invalid root rank: {root}")
        tensors = work.outputs or work.inputs
        if tensors and tensors[0].is_cuda:
            work.stream = torch.cuda.current_stream()
        self._seq += 1
        run.progress += 1
        parts = self._channel.arrive(self._seq, self._place, work)
        if parts is not None:
            _settle(parts)
        return work

    def _require_length(self, tensors: Sequence[Tensor], message: str) -> None:
        if len(tensors) != self._size:
            raise RuntimeError(message.format(self._size, len(tensors)))

    def _split(self, tensor: Tensor, splits: list[int], even: bool) -> list[int]:
        """Bytes of each member's share; torch counts splits in rows."""
        if even:
            return [tensor.nbytes // self._size] * self._size
        rows = tensor.shape[0]
        if not splits and rows % self._size:
            raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
        splits = splits or [rows // self._size] * self._size
        if len(splits) != self._size:
            raise RuntimeError("Number of tensor splits not equal to group size")
        if sum(splits) != rows:
            raise RuntimeError("Split sizes doesn't match total dim 0 size")
        return [count * (tensor.nbytes // max(rows, 1)) for count in splits]


_WRONG_LENGTH = "{0}: Incorrect {1} list size {{1}}. {2} list size should be {{0}}, same as size of the process group."
_KINDS = frozenset(
    (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8)
) | {torch.bool}


def _payload(tensor: Tensor, *, in_memory: bool = False) -> int:
    """Bytes that a tensor brings. Raises where gloo does, and where it should: past the end of the storage."""
    if tensor.layout is not torch.strided:
        raise UnsupportedCollectiveError(f"a tensor with layout {tensor.layout} is not simulated: use a dense one.")
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


def _require_alike(op: str, tensors: Sequence[Tensor], like: Tensor, of: Tensor | None = None) -> None:
    """Every tensor has the shape of `like`, and its dtype and device, or those of `of`."""
    shape, dtype, device = like.shape, (like if of is None else of).dtype, like.device
    for index, tensor in enumerate(tensors):
        if tensor.dtype is not dtype or tensor.device != device:
            raise RuntimeError(
                f"{op}: invalid tensor type at index {index} (expected {dtype} on {device}, "
                f"got {tensor.dtype} on {tensor.device})"
            )
        if tensor.shape != shape:
            raise RuntimeError(
                f"{op}: invalid tensor size at index {index} (expected {_sizes(shape)}, got {_sizes(tensor.shape)})"
            )


def _sizes(shape: torch.Size) -> str:
    return f"({', '.join(map(str, shape))})"


def _is_channels_last(tensor: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])


# How the data move. `parts` are in group order, and agree.


class _Fold:
    """A reduce op: how a total takes up the next value."""

    def __init__(self, take: Callable[[Tensor, Tensor], Tensor], *, bits: bool = False, mean: bool = False) -> None:
        self.take, self.bits, self.mean = take, bits, mean


_FOLDS = {
    "SUM": _Fold(Tensor.add_),
    "AVG": _Fold(Tensor.add_, mean=True),
    "PRODUCT": _Fold(Tensor.mul_),
    "MIN": _Fold(lambda total, value: torch.where(value < total, value, total)),
    "MAX": _Fold(lambda total, value: torch.where(total < value, value, total)),
    "BAND": _Fold(Tensor.bitwise_and_, bits=True),
    "BOR": _Fold(Tensor.bitwise_or_, bits=True),
    "BXOR": _Fold(Tensor.bitwise_xor_, bits=True),
}
_FOLD_OF = {kind: _FOLDS.get(name) for name, kind in dist.ReduceOp.RedOpType.__members__.items()}


def _fold(opts: Any, tensor: Tensor) -> _Fold:
    kind = opts.reduceOp.op
    fold = _FOLD_OF[kind]
    if fold is None:
        raise UnsupportedCollectiveError(f"ReduceOp.{kind.name} is not simulated: use another one, or a real world.")
    if fold.bits and tensor.is_floating_point():
        raise RuntimeError(f"Cannot use ReduceOp.{kind.name} with non-integral dtype")
    if fold.mean and not tensor.is_floating_point():
        raise RuntimeError(f"result type Float can't be cast to the desired output type {tensor.dtype}")
    return fold


def _total(fold: _Fold | None, dtype: torch.dtype, values: Sequence[Tensor]) -> Tensor:
    """The values folded in their order."""
    assert fold is not None
    total = _read_as(dtype, values[0]).clone()
    for value in values[1:]:
        total = fold.take(total, _read_as(dtype, value))
    if fold.mean:
        total.div_(len(values))
    return total


def _totals(parts: list[SimulatedWork], values: list[Tensor]) -> list[Tensor]:
    """What each part gets: all values folded by its own op, in its own dtype."""
    totals: dict[Any, Tensor] = {}
    for part, value in zip(parts, values, strict=True):
        if (part.fold, value.dtype) not in totals:
            totals[part.fold, value.dtype] = _total(part.fold, value.dtype, values)
    return [totals[part.fold, value.dtype] for part, value in zip(parts, values, strict=True)]


def _all_reduce(parts: list[SimulatedWork]) -> None:
    tensors = [_memory(part.inputs[0]) for part in parts]
    torch._foreach_copy_(tensors, _totals(parts, tensors))


def _reduce(parts: list[SimulatedWork]) -> None:
    root = parts[0].terms[1]
    tensors = [_memory(part.inputs[0]) for part in parts]
    for place, (tensor, total) in enumerate(zip(tensors, _totals(parts, tensors), strict=True)):
        kept = 0 if place == root else tensor.numel() - tensor.numel() // len(parts)
        tensor[kept:].copy_(total[kept:])


def _reduce_scatter(parts: list[SimulatedWork]) -> None:
    if not all(part.whole for part in parts):
        _reduce_scatter_lists(parts)
        return
    dense = [_dense(part.inputs[0]) for part in parts]
    totals = _totals(parts, [_memory(tensor) for tensor in dense])
    for place, (part, tensor, total) in enumerate(zip(parts, dense, totals, strict=True)):
        rows = part.outputs[0].shape[0]
        part.outputs[0].copy_(total.as_strided(tensor.shape, tensor.stride(), 0).narrow(0, place * rows, rows))


def _reduce_scatter_lists(parts: list[SimulatedWork]) -> None:
    shares = [part.inputs[0].chunk(len(parts)) if part.whole else part.inputs for part in parts]
    totals = []
    for place, part in enumerate(parts):
        values = [_memory(_dense(given[place])) for given in shares]
        values[place] = _own_share(part.outputs[0], shares[place][place])
        totals.append(_total(part.fold, part.outputs[0].dtype, values))
    for part, total in zip(parts, totals, strict=True):
        _memory(part.outputs[0]).copy_(total)


def _own_share(output: Tensor, share: Tensor) -> Tensor:
    """A rank's own share goes by index to its output, and from there by memory, as the peers' shares do."""
    if output.is_contiguous():
        return share.reshape(-1)
    output.copy_(share)
    return _memory(output)


def _all_gather(parts: list[SimulatedWork]) -> None:
    """Every part's input to all outputs; of a gather, only the root has outputs."""
    sent = [part.inputs[0] for part in parts]
    if not all(tensor.shape == sent[0].shape and tensor.dtype is sent[0].dtype for tensor in sent):
        _all_gather_bytes(parts, sent)
        return
    row = torch.cat(sent) if any(part.whole for part in parts) else sent[0]
    for part in parts:
        if part.whole:
            part.outputs[0].copy_(row)
        elif part.outputs:
            torch._foreach_copy_(list(part.outputs), sent)


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


def _all_to_all(parts: list[SimulatedWork]) -> None:
    """Through copies: an output may be an input of the same rank."""
    sent = []
    for part in parts:
        flat = [_memory(tensor) if part.whole else tensor.reshape(-1) for tensor in part.inputs]
        sent.append(_shares(torch.cat(flat), part, 0))
    for place, part in enumerate(parts):
        outputs = _shares(_memory(part.outputs[0]), part, 1) if part.whole else part.outputs
        for shares, output in zip(sent, outputs, strict=True):
            _deliver(output, shares[place])


def _shares(flat: Tensor, part: SimulatedWork, direction: int) -> list[Tensor]:
    """Each member's bytes; what is left over where nothing says how to split belongs to nobody."""
    assert part.splits is not None
    sizes = part.splits[direction]
    shares: Sequence[Tensor] = flat.view(torch.uint8).split_with_sizes([*sizes, flat.nbytes - sum(sizes)])
    return list(shares[: len(sizes)])


def _memory(tensor: Tensor) -> Tensor:
    """As many elements in a row as it has, from its first one on, whatever its strides; autograd does not see it."""
    data = tensor.data
    return data.view(-1) if data.is_contiguous() else data.as_strided((data.numel(),), (1,))


def _dense(tensor: Tensor) -> Tensor:
    """Without gaps; the order of its memory stays."""
    return tensor if tensor.is_contiguous() else tensor.clone()


def _read_as(dtype: torch.dtype, flat: Tensor) -> Tensor:
    if flat.dtype is dtype:
        return flat
    aligned = flat.storage_offset() * flat.element_size() % dtype.itemsize == 0
    return (flat if aligned else flat.clone()).view(dtype)


def _deliver(output: Tensor, flat: Tensor) -> None:
    """The bytes of `flat` to `output`, by its index."""
    output.copy_(_read_as(output.dtype, flat).view(output.shape))


Move = Callable[[list[SimulatedWork]], None]


# The world.


class SimulatedWorld:
    """A world whose ranks are greenlets of the calling thread, on the CPU or on one CUDA device that they share.

    world_size: ranks. A thousand are fine, and cost a thousand times what one costs.
    schedule: who runs next, round-robin by default. It starts over with every run, so a run can be repeated exactly.
    device: where the contexts of the ranks say that they work.
    """

    name = "sim"

    def __init__(
        self, world_size: int = 4, schedule: Schedule | None = None, device: str | torch.device = "cpu"
    ) -> None:
        if world_size < 1:
            raise WorldSizeError(f"world_size={world_size}: a world has one rank at least.")
        self.world_size = world_size
        self.schedule: Schedule = RoundRobin() if schedule is None else schedule
        self.device = torch.device(device)
        self.choices: tuple[int, ...] = ()  # of the last run: Replayed(choices) repeats it
        self._closed = False

    def run(self, program: RankProgram, *, stall_after_s: float = 10.0) -> WorldRun:
        """Run `program` on every rank until all have ended or the rest are stuck for good.

        stall_after_s: of no use here, where nothing depends on a clock.
        Every rank starts in the state of a fresh process: torch's defaults, seeds START_SEED, the caller's environment.
        Raises NestedWorldError inside a rank program, ScheduleError where the schedule cannot be followed, UnwindError
        if a program did not let the run end. This world can run the next program after any of them.
        """
        self._require_free()
        run = _Run(self, program)
        with _in_place(run):
            try:
                self.schedule.begin()
                run.launch()
                run.drive()
                report = run.conclude()
            finally:
                self.choices = tuple(run.choices)
                run.unwind()
        _require_end(run)
        return report()

    def close(self) -> None:
        """Run no more; idempotent. Between runs a world holds nothing else."""
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
                "a simulated world is running in this process: call run outside rank programs, and from one thread."
            )


def _require_end(run: _Run) -> None:
    if run.failure is not None:
        raise run.failure
    if run.alive:
        raise UnwindError(
            f"ranks {list(run.alive)} caught {REFUSALS} exceptions that were to end them, and went on: let "
            "BaseException pass in the rank program. This world can run the next one."
        )
