"""SimulatedRun: ranks as greenlets, whose turn it is, and the world's clock.

A rank runs until it must wait for another; then the schedule says who goes on. When no rank can, and none sleeps, the
run is over, and whoever waits in a collective is proved stuck.
"""

from __future__ import annotations

import heapq
import warnings
from bisect import bisect_left, insort
from collections.abc import Callable
from functools import partial
from time import perf_counter  # the caller's own: ranks find simulated time in the module
from typing import NoReturn

import torch
from greenlet import getcurrent, greenlet

from tpbed.tp.errors import TestbedError
from tpbed.tp.isolation import Isolation, quiet_start
from tpbed.tp.ledger import End, Event, read_ledger
from tpbed.tp.rank import Death, RankContext
from tpbed.tp.recorder import Recorder
from tpbed.tp.refusal import UnsupportedCollectiveError, cannot_wait
from tpbed.tp.registers import Start, environment
from tpbed.tp.schedule import Schedule, ScheduleError
from tpbed.tp.simulated_rank import Awaited, SimulatedRank, observe
from tpbed.tp.world import RankProgram, RankState, WorldRun

TURN_NS = 1_000  # of the world's clock, for each turn
IDLE_POLLS = 1_000  # a rank that asks so often whether a collective is done, while nothing else happens, asks for ever
IDLE_LOOKS = 100  # a rank that looks so often at the clock, while nothing else happens, waits for a time to come
IDLE_NAPS = 1_000_000  # a rank that sleeps so often, while ranks do nothing but sleep, does so for ever
PATIENCE = 1.125  # the time between two questions in vain grows so, for a rank that looks at the clock
LONGEST_NS = 3_600 * 10**9  # and no further
_SIGNALS: dict[Death, int] = {"kill": 9, "crash": 11}  # by which a rank dies
_TOO_MUCH = 1 << 62  # bytes
REFUSALS = 100  # a rank that so often catches the end of its run is given up

_abandoned: list[greenlet] = []  # kept: a greenlet that is collected is woken once more


class ForeignGroupError(TestbedError):
    """A process group was used by another rank than the one it was made for, or after its run."""


class _Unwind(BaseException):
    """Ends a rank whose run is over; `except Exception` does not see it."""


class SimulatedRun:
    """One run: whose turn it is, the world's clock, and in the end the proof that nobody can move."""

    def __init__(
        self, program: RankProgram, *, world_size: int, schedule: Schedule, device: torch.device, idle: list[greenlet]
    ) -> None:
        """idle: greenlets of the caller's thread that have served other runs; taken from there, and given back."""
        self.program, self.schedule, self.device, self.idle = program, schedule, device, idle
        self.hub = getcurrent()  # the greenlet of the caller
        self.members = tuple(range(world_size))
        self.ready = list(self.members)
        self.sleepers: list[tuple[int, int, int, int]] = []  # when, order, rank, its count of waits
        self.now_ns = self.progress = self.slept = 0
        self.choices: list[int] = []
        self.current: SimulatedRank | None = None
        self.starts: SimulatedRank | None = None
        self.failure: BaseException | None = None
        self.unwinding = self.over = False
        self.interrupted = False  # by SIGINT: a KeyboardInterrupt is then the caller's, and no error of a rank
        self.alive: tuple[int, ...] = ()  # ranks that did not let their run end
        self.ranks = [self._rank(index) for index in self.members]

    def _rank(self, index: int) -> SimulatedRank:
        events: list[Event] = []
        context = RankContext(
            rank=index,
            world_size=len(self.members),
            recorder=Recorder(events.append, self.clock),
            sleep=self.sleep,
            die=self.die,
            pause=self.sleep,
            device=self.device,
        )
        return SimulatedRank(index, context, events)

    def clock(self) -> int:
        """Nanoseconds since the run began; no two events have the same."""
        self.now_ns += 1
        return self.now_ns

    # In the greenlet of the caller.

    def launch(self) -> None:
        """Make each rank ready to start; it has its default group, and the caller's own state is put away."""
        variables, filters, kept = _variables(len(self.members)), warnings.filters, quiet_start()
        for rank in self.ranks:
            variables[b"RANK"] = variables[b"LOCAL_RANK"] = str(rank.index).encode()
            rank.isolation = Isolation(Start(rank.context, rank.groups, variables, filters), kept)

    def drive(self) -> None:
        """Give turns until nobody can take one. Ranks pass the turn on among themselves, and here where they end."""
        self.starts = self._next()
        while self.starts is not None:
            rank, self.starts = self.starts, None
            self._go_on_with(rank)
            if self.failure is not None:
                raise self.failure

    def _go_on_with(self, rank: SimulatedRank) -> None:
        """Give the rank its turn; it starts if it has not yet."""
        self.current = rank
        rank.isolation.enter()
        if rank.greenlet is None:
            rank.greenlet = self._idle_greenlet() if self.idle else _new_greenlet()
            rank.greenlet.switch(self, rank)
        else:
            rank.greenlet.switch()

    def _idle_greenlet(self) -> greenlet:
        one = self.idle.pop()
        one.gr_context = None  # whoever it served last may have set variables there
        return one

    def conclude(self, world: str) -> Callable[[], WorldRun]:
        """Nobody can move: write down what the ranks did, and which are stuck. Call the answer when all is cleared.

        world: its name.
        """
        silent = perf_counter()
        size = len(self.members)
        ledgers = tuple([read_ledger(rank.events, rank=rank.index, world_size=size) for rank in self.ranks])
        liveness = tuple(map(observe, self.ranks))
        stuck = tuple([rank.index for rank in self.ranks if rank.state == "running" or rank.polls > IDLE_POLLS])
        proved = perf_counter()
        hung = not {seen.state for seen in liveness} <= {"ended", "dead"}
        results = tuple([rank.result for rank in self.ranks])
        return lambda: WorldRun(
            world=world,
            results=results,
            ledgers=ledgers,
            liveness=liveness,
            stuck=stuck,
            proof_ms=(proved - silent) * 1e3 if hung else None,
            recovery_ms=(perf_counter() - proved) * 1e3 if hung else None,
        )

    def unwind(self) -> None:
        """End the ranks that have not ended, by an exception where they stand. Nothing of it is recorded."""
        self.unwinding = True
        for rank in self.ranks:
            if rank.greenlet is not None:  # has started, and not finished
                self.current = rank
                rank.isolation.enter()
                rank.greenlet.throw(_Unwind)
                rank.isolation.leave()

    def dissolve(self) -> None:
        """Take the run apart, so that nothing of it waits for the garbage collector."""
        self.current, self.over = None, True
        self.alive = tuple(rank.index for rank in self.ranks if rank.greenlet is not None)
        _abandoned.extend(self.ranks[index].greenlet for index in self.alive)
        for rank in self.ranks:
            rank.greenlet = rank.isolation = rank.groups = rank.waits_for = None
        self.ranks = []

    # In the greenlet of a rank.

    def live(self, rank: SimulatedRank) -> None:
        """The whole life of the rank, in its greenlet."""
        try:
            self._live_to_the_end(rank)
        except _Unwind:
            pass
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(f"in rank {rank.index} of a simulated world")
            self.failure = interrupt
        finally:
            if not self.unwinding:
                rank.isolation.leave()
            self.idle.append(rank.greenlet)
            rank.greenlet = None

    def starts_next(self) -> SimulatedRank | None:
        """The rank whose turn it is now that one has ended, if it has yet to start: it is served where that one was."""
        if self.unwinding or self.failure is not None:
            return None
        try:
            chosen = self._next()
        except Exception as error:  # noqa: BLE001 - as in _give_way
            self.failure, chosen = error, None
        if chosen is None or chosen.greenlet is not None:
            self.starts = chosen
            return None
        self.current, chosen.greenlet = chosen, self._idle_greenlet()
        chosen.isolation.enter()
        return chosen

    def _live_to_the_end(self, rank: SimulatedRank) -> None:
        recorder = rank.context.recorder
        try:
            if self.device.type == "cuda" and self.device.index is not None:
                torch.cuda.set_device(self.device)
            rank.result = self.program(rank.index)
            self._end(rank, recorder.returned)
        except _Unwind:
            raise
        except BaseException as error:
            if self.interrupted and isinstance(error, KeyboardInterrupt):
                raise
            self._end(rank, partial(recorder.raised, error))
            _forget_place(error)

    def _end(self, rank: SimulatedRank, record: Callable[[], None]) -> None:
        if not self.unwinding:
            record()
            rank.state = "ended"
            self.progress += 1

    def here(self, owner: SimulatedRank | None = None, waits: bool = True) -> SimulatedRank:
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
        if owner is not rank and owner is not None:
            raise ForeignGroupError(_foreign(owner, f"by rank {rank.index}"))
        if waits and len(self.members) > 1 and (inside := cannot_wait()):
            raise UnsupportedCollectiveError(
                f"rank {rank.index} would wait inside {inside}, where a simulated rank cannot: call from outside, or "
                "use a real world."
            )
        return rank

    def _refuse(self, rank: SimulatedRank) -> NoReturn:
        rank.refusals += 1
        while rank.refusals > REFUSALS:
            self.hub.switch()
        raise _Unwind

    def wait_for(self, work: Awaited, timeout_s: float) -> None:
        """Until the collective is complete; even if it is, another rank may have the turn first."""
        rank = work.rank
        if not work.vetted or rank is not self.current or rank.greenlet is not getcurrent() or self.unwinding:
            rank = self.here(rank, not work.done and not work.vetted)
        if work.done:
            if self.ready and (work.vetted or not cannot_wait()):
                insort(self.ready, rank.index)
                self._give_way(rank)
            return
        rank.waits_for = work
        if timeout_s:
            self._count_naps(rank)
            self.call_back(rank, timeout_s)
        self._give_way(rank)
        if not work.done:
            raise RuntimeError("Operation timed out!")

    def wake(self, rank: SimulatedRank) -> None:
        """Its wait is over, and it can have a turn."""
        rank.waits += 1
        rank.waits_for = None
        self.progress += 1
        insort(self.ready, rank.index)

    def sleep(self, seconds: float) -> None:
        """RankContext.sleep, for the rank whose turn it is."""
        rank = self.here()
        if seconds > 0:
            self._count_naps(rank)
            self.call_back(rank, seconds)
            self._give_way(rank)
        else:
            self.poll(rank)

    def _count_naps(self, rank: SimulatedRank) -> None:
        self.slept += 2  # steps of progress that are none: going to sleep, and waking up
        if rank.napped_at + self.slept < self.progress + 2:
            rank.napped_at, rank.naps = self.progress + 2 - self.slept, 0
        rank.naps += 1
        if rank.naps > IDLE_NAPS:
            self._freeze(rank, "stalled", "sleeps for ever, again and again")

    def look_at_clock(self, rank: SimulatedRank) -> int:
        """The world's time. A rank that does nothing but look at it lets others run, and time pass."""
        self.now_ns += 1
        if rank.looked_at != self.progress:
            rank.looked_at, rank.looks = self.progress, 0
        rank.looks += 1
        if rank.looks > IDLE_LOOKS and not self.unwinding and not cannot_wait():
            self.poll(rank)
        return self.now_ns

    def poll(self, owner: SimulatedRank, about: Awaited | None = None) -> None:
        """A rank asks for something instead of waiting for it: others may go on first; if none can, time passes.

        about: the collective that it asks for, if it is one; of use to a search alone.
        """
        rank = self.here(owner)
        self.now_ns += TURN_NS
        self._wake_due()
        if rank.polled_at != self.progress:
            rank.polled_at, rank.polls = self.progress, 0
        if all(self.ranks[index].polled_at == self.progress for index in self.ready):  # nobody else can do anything
            rank.polls += 1
            self._let_time_pass(rank)
        if rank.polls > IDLE_POLLS:
            self._freeze(rank, "stalled", "asks for ever for what can never be")
        if self.ready:
            self.offer_turn(rank)

    def offer_turn(self, rank: SimulatedRank) -> None:
        """To any rank that can go on; this one, which has asked in vain, is one of them."""
        insort(self.ready, rank.index)
        self._give_way(rank, asks=rank.index)

    def _let_time_pass(self, rank: SimulatedRank) -> None:
        """To the next who wakes up; by less where the rank may have a time of its own in mind."""
        if rank.looked_at == self.progress:
            self.now_ns += TURN_NS + min(round(TURN_NS * PATIENCE**rank.polls), LONGEST_NS, self._until_next())
            self._wake_due()
        elif rank.polls > 1 and self.sleepers:
            self._wake_first()

    def _until_next(self) -> int:
        return max(self.sleepers[0][0] - self.now_ns, 0) if self.sleepers else LONGEST_NS

    def die(self, death: Death, why: str) -> None:
        """RankContext.die, for the rank whose turn it is. It does not return; `finally` blocks run after the run."""
        rank = self.here()
        if death == "exhaust":
            torch.empty(_TOO_MUCH, dtype=torch.uint8)  # raises, with this process's own memory left alone
        if death in ("stop", "stall"):
            self._freeze(rank, "stopped" if death == "stop" else "stalled", why)
        number = _SIGNALS.get(death)
        if number is not None:
            self.leave(End(how="killed", signal=number, message=why, at_ns=self.clock()))
        self.leave(End(how="exited", exit_code=1, message=why, at_ns=self.clock()))

    def leave(self, end: End) -> None:
        """The rank whose turn it is dies, as `end` says: its process has exited or was killed."""
        rank = self.here()
        rank.context.recorder.end(end)
        self._freeze(rank, "dead", f"signal {end.signal}" if end.how == "killed" else f"exit status {end.exit_code}")

    def _freeze(self, rank: SimulatedRank, state: RankState, detail: str) -> None:
        rank.state, rank.detail = state, detail
        self.progress += 1
        self._give_way(rank)

    def _give_way(self, rank: SimulatedRank, asks: int = -1) -> None:
        """Others have turns until this rank has one again. asks: its number, if it has asked in vain."""
        try:
            chosen = self._next(asks)
        except Exception as error:  # noqa: BLE001 - of the schedule: the caller of the world gets it, not the rank
            self.failure, chosen = error, None
        if chosen is not rank:
            rank.isolation.leave()
            if chosen is None or not (chosen.greenlet or self.idle):  # new ones are all made at one depth
                self.starts = chosen
                self.hub.switch()
            else:
                self._go_on_with(chosen)
        if rank.owed:
            _fulfil(rank)

    def _next(self, asks: int = -1) -> SimulatedRank | None:
        self.now_ns += TURN_NS
        if self.sleepers:
            self._wake_some()
        ready = self.ready
        if len(ready) < 2:
            return self.ranks[ready.pop()] if ready else None
        choice = self.schedule.choose(ready, asks)
        place = bisect_left(ready, choice)
        if place == len(ready) or ready[place] != choice:
            raise ScheduleError(f"the schedule chose rank {choice}: it must choose one of {ready}.")
        self.choices.append(choice)
        return self.ranks[ready.pop(place)]

    def call_back(self, rank: SimulatedRank, seconds: float) -> None:
        """Wake the rank when `seconds` are over, if it still waits as it does now."""
        order = self.progress = self.progress + 1
        heapq.heappush(self.sleepers, (self.now_ns + round(seconds * 1e9), order, rank.index, rank.waits))

    def _wake_some(self) -> None:
        """Those who slept until now can run; where nobody else can, so can the first of the others."""
        self._wake_due()
        while self.sleepers and not self.ready:
            self._wake_first()

    def _wake_due(self) -> None:
        while self.sleepers and self.sleepers[0][0] <= self.now_ns:
            self._wake_first()

    def _wake_first(self) -> None:
        """The first of the sleepers, whose time comes now."""
        when, _, index, waits = heapq.heappop(self.sleepers)
        if self.ranks[index].waits == waits:  # else something else has woken it
            self.now_ns = max(self.now_ns, when)
            self.wake(self.ranks[index])


def _serve() -> None:
    """The body of a greenlet: one rank after another, of one run after another, since a greenlet is dear to make."""
    hub = getcurrent().parent
    while True:
        run, rank = hub.switch()
        while rank is not None:
            run.live(rank)
            rank = run.starts_next()
        del run, rank  # an idle greenlet holds on to nothing


def _new_greenlet() -> greenlet:
    """It has begun, without arguments: those it would hold until it ends."""
    one = greenlet(_serve)
    one.switch()
    return one


def _foreign(owner: SimulatedRank | None, how: str) -> str:
    whose = "of a simulated rank" if owner is None else f"of rank {owner.index}"
    return (
        f"a process group or context {whose} was used {how}: simulated ranks share modules and closures, so keep them "
        "in the rank program's own variables and not in globals."
    )


def _fulfil(rank: SimulatedRank) -> None:
    owed, rank.owed = rank.owed, []
    for work in owed:
        work.fulfil()


def _forget_place(error: BaseException) -> None:
    """Where and amid what it was raised: another rank may raise the same object, and would seem to have been there."""
    error.__traceback__ = error.__context__ = None


def _variables(world_size: int) -> dict[bytes, bytes]:
    """The caller's environment, and what a launcher adds to it but for the rank itself; nobody listens at the port."""
    size = str(world_size).encode()
    launched = {b"WORLD_SIZE": size, b"LOCAL_WORLD_SIZE": size, b"MASTER_ADDR": b"127.0.0.1", b"MASTER_PORT": b"29500"}
    return environment() | launched
