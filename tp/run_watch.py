"""RunWatch: decides, from what the supervisors of ranks read, when a run is over and which ranks are stuck."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import replace

from tpbed.tp.blackbox import parse_events
from tpbed.tp.ledger import WORLD, CollectiveRecord, Event, Ledger, read_ledger
from tpbed.tp.reading import Reading, Threads
from tpbed.tp.stuck import find_missing, find_stuck
from tpbed.tp.world import Liveness

FORM_S = 60.0  # for ranks to load the program, and for the group to be formed once all have come to the rendezvous
_LOOK_S = (0.003, 0.025)  # from one look to the next: after something happened, and when nothing happens for long
_AGAIN_S = 0.001  # to the look that confirms a proof
_AFTER_DEATH_S = 0.025  # what a death does to its peers by itself, such as errors of gloo, is let happen
IDLE_S = 0.1  # after which ranks that all wait for each other, and do nothing at any look, are taken as stuck
_DISAGREEING_SHARE = 0.25  # of such times is enough where their ledgers contradict each other already
_IDLE_SHARE = 0.02  # of a processor: gloo's own thread wakes up a hundred times a second and looks around
_PATIENCE_S = 2.0  # the least deadline for ranks that all wait in collectives and do not look idle


class _Seen:
    """All that is known of one rank in this run."""

    def __init__(self, rank: int, world_size: int, now: float) -> None:
        self.rank, self.world_size = rank, world_size
        self.events: list[Event] = []
        self.count = 0
        self.truncated = False
        self.delivered = False  # it ended or died, and said all it had to say
        self.last_event_at = now
        self.stopped_since: float | None = None
        self.threads: tuple[float, Threads] | None = None
        self.idle_since: float | None = None
        self._ledger: Ledger | None = None

    @property
    def ledger(self) -> Ledger:
        if self._ledger is None:
            self._ledger = read_ledger(
                self.events, rank=self.rank, world_size=self.world_size, truncated=self.truncated
            )
        return self._ledger

    def waits(self) -> bool:
        """True if it blocks in a collective; a truncated ledger does not tell."""
        return not self.truncated and self.ledger.waiting_in() is not None

    def read(self, reading: Reading, asked_at: float) -> bool:
        """Take in a reading. True if it tells something new."""
        moved, self.count = reading.count != self.count, reading.count
        if reading.events or reading.truncated != self.truncated:
            self.events += parse_events(reading.events)
            self.truncated = reading.truncated
            self._ledger = None
        self.last_event_at = max(self.last_event_at, asked_at - reading.quiet_ns / 1e9)
        self.stopped_since = (self.stopped_since or asked_at) if reading.stopped else None
        self._compare(
            None if reading.stopped else reading.threads, asked_at
        )  # stopped is not idle: it may be continued
        return moved

    def _compare(self, threads: Threads | None, at: float) -> None:
        before, self.threads = self.threads, None if threads is None else (at, threads)
        if before is None or threads is None or not _is_idle(before[1], threads, at - before[0]):
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since = before[0]


def _is_idle(before: Threads, now: Threads, seconds: float) -> bool:
    """True if the main thread never ran or wanted to between two looks, and no other did more than look around."""
    if now.main_slices != before.main_slices or now.main_runnable or (now.runnable and before.runnable):
        return False
    return now.busy_ns - before.busy_ns <= _IDLE_SHARE * seconds * 1e9


def _disagree(waiting: Sequence[_Seen]) -> bool:
    """True if two ranks wait at one place, and for another op, root or size."""
    terms: dict[Hashable, Hashable] = {}
    for seen in waiting:
        record = seen.ledger.waiting_in()
        if isinstance(record, CollectiveRecord):
            sized = record.op not in ("all_to_all", "gather", "scatter")  # where sizes may differ, rightly
            meant = record.op, record.root, sized and record.payload_bytes
            if terms.setdefault((record.group, record.seq), meant) != meant:
                return True
    return False


class RunWatch:
    """One run, watched: takes in readings, and judges.

    A run is over when every rank has ended, or is proved stuck by what the others did (sound at once; ledgers are read
    twice because they are not read at one moment), or is stopped or makes no progress outside any collective for the
    deadline, or waits, with all that is left, in collectives that cannot complete although all have joined: then
    nobody's threads do anything, for a while.
    """

    def __init__(self, world_size: int, stall_after_s: float, now: float, *, idle_s: float = IDLE_S) -> None:
        """now: time.monotonic() at the start of the run, as are all times here; idle_s: longer than data can travel."""
        self._stall_after_s, self._began, self._idle_s = stall_after_s, now, idle_s
        self._seen = [_Seen(rank, world_size, now) for rank in range(world_size)]
        self._judged_at = now
        self._changes = 0  # in what was read
        self._doubt: tuple[Hashable, float, int] = (None, now, 0)  # a judgement that waits to be confirmed
        self.look_s = _LOOK_S[0]  # to the next look
        self.look_deep = False  # at threads, too
        self.stuck: tuple[int, ...] = ()
        self.proof_ms: float | None = None

    def read(self, rank: int, reading: Reading, asked_at: float) -> None:
        """A supervisor answered what it was asked then."""
        self._changes += self._seen[rank].read(reading, asked_at)

    def deliver(self, rank: int, reading: Reading, now: float) -> None:
        """A rank ended or died: there will be no more of it."""
        self.read(rank, reading, now)
        self._seen[rank].delivered = True
        self.look_s = _LOOK_S[0]

    @property
    def open_ranks(self) -> tuple[int, ...]:
        """The ranks that have neither ended nor died."""
        return tuple(seen.rank for seen in self._seen if not seen.delivered)

    @property
    def ledgers(self) -> tuple[Ledger, ...]:
        """The ledgers as they were read last."""
        return tuple(seen.ledger for seen in self._seen)

    def judge(self, now: float) -> bool:
        """True if the run is over; then `stuck` and `proof_ms` tell of the ranks that did not end."""
        began_s, self._judged_at = time.thread_time(), now
        stuck = self._find(now)
        if stuck:
            self.stuck = stuck
            self.proof_ms = (now - max(seen.last_event_at for seen in self._seen)) * 1e3
        elif self._doubt[0] is None:
            self.look_s = min(1.4 * self.look_s, _LOOK_S[1])
        self.look_s = max(self.look_s, 4 * (time.thread_time() - began_s))
        return bool(stuck) or not self.open_ranks

    def liveness(
        self, frames: dict[int, tuple[str, ...]], stacks: dict[int, str] | None = None
    ) -> tuple[Liveness, ...]:
        """How the ranks looked at the last judgement; frames, stacks: of those that did not end."""
        stacks = stacks or {}
        return tuple(
            replace(look, frames=frames.get(rank, ()), stack=stacks.get(rank, ""))
            for rank, look in enumerate(self._look(seen, self._judged_at) for seen in self._seen)
        )

    def _find(self, now: float) -> tuple[int, ...]:
        """The open ranks, if all of them are stuck and that has been confirmed."""
        still = [seen for seen in self._seen if not seen.delivered]
        looks = [self._look(seen, now) for seen in self._seen]
        lost = {seen.rank for seen in still if looks[seen.rank].state in ("stopped", "stalled")}
        waiting = {seen.rank for seen in still if seen.waits()}
        if not still or any(seen.rank not in lost | waiting for seen in still):
            self._believe(None, now)
            self.look_deep = False
            return ()
        proven = lost | self._prove(looks)
        rest = [seen for seen in still if seen.rank not in proven]
        confirmed = self._is_idle(rest, now) if rest else self._is_proved(looks, now)
        return self.open_ranks if confirmed else ()

    def _look(self, seen: _Seen, now: float) -> Liveness:
        end = seen.ledger.end
        if end is not None:
            return Liveness(state="dead" if end.how in ("killed", "exited") else "ended", detail=end.message)
        if WORLD not in seen.ledger.groups:
            return self._look_at_joining(seen, now)
        quiet_s = 0.0 if seen.waits() else now - seen.last_event_at
        if seen.stopped_since is not None and max(quiet_s, now - seen.stopped_since) >= self._stall_after_s:
            return Liveness(state="stopped", detail="suspended, as by SIGSTOP")
        if quiet_s >= self._stall_after_s:
            return Liveness(state="stalled", detail=f"no progress outside any collective for {quiet_s:.1f} s")
        return Liveness(state="running")

    def _look_at_joining(self, seen: _Seen, now: float) -> Liveness:
        """A rank that has come to the rendezvous waits for all; one that has not may still come, for a while."""
        lost = [rank for rank in find_missing(self.ledgers) if self._never_comes(self._seen[rank], now)]
        if not lost or (seen.rank not in lost and seen.ledger.rendezvous != "arrived"):
            return Liveness(state="running")
        told = f"the group was not formed: rank {', '.join(map(str, lost))} missing"
        return Liveness(state="stalled" if seen.stopped_since is None else "stopped", detail=told)

    def _never_comes(self, seen: _Seen, now: float) -> bool:
        if seen.ledger.end is not None or now - self._began > FORM_S:
            return True
        if seen.ledger.rendezvous != "outside" and seen.stopped_since is None:
            return False  # it loads its program, which may import much; or all have come, and the group is being formed
        return now - max(one.last_event_at for one in self._seen) >= self._stall_after_s

    def _prove(self, looks: Sequence[Liveness]) -> frozenset[int]:
        """The ranks that wait for one that will never come; a stopped or stalled one is taken as such."""
        if any(seen.truncated for seen in self._seen):
            return frozenset()  # who has joined what is not known
        taken = [replace(look, state="dead") if look.state in ("stopped", "stalled") else look for look in looks]
        return find_stuck(self.ledgers, taken)

    def _is_proved(self, looks: Sequence[Liveness], now: float) -> bool:
        died = any(look.state == "dead" for look in looks)
        for_s, for_looks = self._believe(("proof", self._changes, self.open_ranks), now)
        self.look_s, self.look_deep = _AGAIN_S, False
        return for_looks > 1 and for_s >= (_AFTER_DEATH_S if died else 0.0)

    def _is_idle(self, rest: Sequence[_Seen], now: float) -> bool:
        for_s, _ = self._believe(("idle", self._changes, self.open_ranks), now)
        self.look_s, self.look_deep = min(1.4 * self.look_s, _LOOK_S[1]), True
        disagree = _disagree(rest)
        idle_s = self._idle_s * (_DISAGREEING_SHARE if disagree else 1)
        patience_s = _DISAGREEING_SHARE * _PATIENCE_S if disagree else max(self._stall_after_s, _PATIENCE_S)
        is_idle = all(seen.idle_since is not None and now - seen.idle_since >= idle_s for seen in rest)
        return is_idle or for_s >= patience_s

    def _believe(self, judgement: Hashable, now: float) -> tuple[float, int]:
        """For how long, and in how many looks, the judgement has been the same."""
        before, since, looks = self._doubt
        self._doubt = (judgement, since, looks + 1) if judgement == before else (judgement, now, 1)
        return now - self._doubt[1], self._doubt[2]
