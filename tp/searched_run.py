"""SearchedRun: a simulated run that a search steers, and that notes what each of its steps touches.

A step is what one rank does in one turn. Two steps of different ranks are independent, so that their order makes no
difference, unless they `meet`. What a step touches is read off the rank's own ledger; whatever is not known from there
to be harmless - asking whether a collective is done, sleeping, a time-out, the clock, a message, a store - touches
everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpbed.tp.ledger import Event
from tpbed.tp.simulated_rank import Awaited, SimulatedRank
from tpbed.tp.simulated_run import TURN_NS, SimulatedRun

Place = tuple[str, int]  # a group and a seq in it: where members meet
Steer = Callable[["SearchedRun", Sequence[int]], int]  # whose turn it is, of the ranks that may have it

_HARMLESS = {"group", "state", "wait", "ask", "decision", "mark", "step", "check", "end", "start"}  # events
_COLLECTIVES = {
    "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "reduce", "reduce_scatter", "scatter"
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Touch:
    """What a step touches.

    joins: the collectives in which it takes its place.
    watches: those of which it may see whether all have joined: whoever comes last moves the data, and a rank that has
        gone on meanwhile may see it happen. One that waits at once cannot tell who came last.
    """

    everything: bool = False
    joins: frozenset[Place] = frozenset()
    watches: frozenset[Place] = frozenset()

    def meets(self, other: Touch) -> bool:
        """Whether the order of the two steps may make a difference."""
        if self.everything or other.everything:
            return True
        return not (self.watches.isdisjoint(other.joins) and other.watches.isdisjoint(self.joins))


@dataclass(slots=True)
class Step:
    """One turn of one rank. follows: the steps without which it could not be, other than the rank's own."""

    rank: int
    follows: tuple[int, ...] = ()
    touch: Touch = field(default_factory=Touch)


class SearchedRun(SimulatedRun):
    """A run whose turns `steer` gives, fairly: after `patience` vain questions a rank lets others go first.

    trust_overlap: ranks are taken to leave the tensors of an asynchronous collective alone until they have waited.
    The choices that it makes repeat it in any SimulatedWorld.
    """

    def __init__(
        self, program: Any, *, steer: Steer, patience: int, trust_overlap: bool = False, **options: Any
    ) -> None:
        super().__init__(program, **options)
        self.steer, self.patience = steer, patience
        self.steps: list[Step] = []
        self._notes = [_Notes(trust_overlap) for _ in self.members]
        self._joined: dict[Place, list[int]] = {}  # the steps in which a place was taken
        self._everything, self._expected = False, 0  # the step that is being taken: touches all; has so much progress

    def wake(self, rank: SimulatedRank) -> None:
        """As in any run."""
        self._expected += 1
        super().wake(rank)

    def poll(self, owner: SimulatedRank) -> None:
        """As in any run. What comes after it depends on all that was before."""
        notes = self._notes[self.here(owner).index]
        notes.asked = notes.asked + 1 if notes.asked_at == self.progress else 1
        notes.asked_at, notes.everything = self.progress, True
        self._everything = True
        super().poll(owner)

    def wait_for(self, work: Awaited, timeout_s: float) -> None:
        """As in any run. A time-out counts even where the wait is over at once: later it might have expired."""
        if timeout_s:
            self._everything = self._notes[self.here(work.rank, waits=False).index].everything = True
        super().wait_for(work, timeout_s)

    def call_back(self, rank: SimulatedRank, seconds: float) -> None:
        """As in any run."""
        self._everything = True
        super().call_back(rank, seconds)

    def look_at_clock(self, rank: SimulatedRank) -> int:
        """As in any run."""
        self._everything = True
        return super().look_at_clock(rank)

    def _next(self) -> SimulatedRank | None:
        self.note_step()
        self.now_ns += TURN_NS
        self._wake_some()
        if not self.ready:
            return None
        choice = self.steer(self, self._fair())
        if len(self.ready) > 1:
            self.choices.append(choice)
        self.ready.remove(choice)
        self._begin(choice)
        return self.ranks[choice]

    def _fair(self) -> list[int]:
        """Ranks that may have the turn. Those that have all asked in vain often enough go round."""
        asked = {index: self._asked(index) for index in self.ready}
        patient = [index for index, count in asked.items() if count < self.patience]
        return patient or [min(asked, key=lambda index: (asked[index], index))]

    def _asked(self, index: int) -> int:
        notes = self._notes[index]
        return notes.asked if notes.asked_at == self.progress else 0

    def _begin(self, choice: int) -> None:
        notes = self._notes[choice]
        self.steps.append(Step(choice, () if notes.waited is None else tuple(self._joined.get(notes.waited, ()))))
        self._everything = notes.everything or self._timed() or bool(self.ranks[choice].owed)
        self._expected = self.progress
        notes.everything, notes.waited, notes.state = False, None, self.ranks[choice].state

    def _timed(self) -> bool:
        """Whether anybody waits for a time: then every turn counts, since it takes time."""
        return any(self.ranks[index].waits == waits for _, _, index, waits in self.sleepers)

    def note_step(self) -> None:
        """The step is over: say what it touched, which shows in what its rank has written since."""
        if not self.steps:
            return
        step = self.steps[-1]
        rank, notes = self.ranks[step.rank], self._notes[step.rank]
        events = rank.events[notes.read :]
        notes.read = len(rank.events)
        joins, watches = notes.take_places(events)
        for place in joins:
            self._joined.setdefault(place, []).append(len(self.steps) - 1)
        notes.note_wait(rank, events)
        everything = self._everything or notes.looked or not self._accounts_for(rank, events)
        step.touch = Touch(everything, joins, watches)

    def _accounts_for(self, rank: SimulatedRank, events: Sequence[Event]) -> bool:
        """Whether the ledger tells of all that has happened: each collective, wake and end is one step of progress."""
        starts = sum(event[0] == "start" for event in events)
        notes = self._notes[rank.index]
        ended = rank.state != notes.state
        notes.opaque = notes.opaque or not all(map(_is_harmless, events))
        return self._expected + starts + ended == self.progress and not notes.opaque and not self._timed()


class _Notes:
    """What is known of one rank between its steps."""

    def __init__(self, trusting: bool) -> None:
        self.trusting = trusting
        self.read = 0  # events
        self.open: set[Place] = set()  # begun, and not waited for to the end
        self.waited: Place | None = None  # what the last step ended with
        self.everything = False  # whether the next step touches everything, whatever it does
        self.opaque = False  # it has done something that is not known here, of which it may see more at any time
        self.looked = False  # the last step asked whether a collective is done, and it was
        self.asked, self.asked_at = 0, -1  # in vain, at what progress
        self.state = "running"  # when the step began
        self._unasked: set[Place] = set()  # asynchronous, and not waited for

    def take_places(self, events: Sequence[Event]) -> tuple[frozenset[Place], frozenset[Place]]:
        """Where the rank takes its place, and what it watches meanwhile."""
        joins: set[Place] = set()
        watches, self.looked = set(self.open), False
        for number, event in enumerate(events):
            if event[0] == "start":
                joins.add(_place(event))
            waits = event[0] == "wait" or _waits_at_once(events, number)
            self._note(event, waits=waits)
            watches |= self.open
            if waits and number + 1 < len(events):
                watches.add(_place(event))  # for it goes on in the same step
        return frozenset(joins), frozenset(watches)

    def _note(self, event: Event, *, waits: bool) -> None:
        kind = event[0]
        if kind not in ("start", "wait", "state"):
            return
        place = _place(event)
        if kind == "start" and not waits:
            self._unasked.add(place)
            if not self.trusting:
                self.open.add(place)
        elif kind == "wait":
            self._unasked.discard(place)
        elif kind == "state" and event[3] == "completed":
            self.looked = self.looked or place in self._unasked
            self.open.discard(place)
            self._unasked.discard(place)

    def note_wait(self, rank: SimulatedRank, events: Sequence[Event]) -> None:
        """What the step ended with; if that is not known, whatever comes next depends on all that was before."""
        waits = bool(events) and not self.everything and (events[-1][0] == "wait" or _waits_at_once(events, -1))
        self.waited = _place(events[-1]) if waits else None
        if rank.waits_for is not None and self.waited is None:
            self.everything = True


def _place(event: Event) -> Place:
    return event[1], event[2]


def _waits_at_once(events: Sequence[Event], number: int) -> bool:
    """Whether this is a call, and nothing comes between it and the end of its wait."""
    event, then = events[number], events[number:][1:2]
    if event[0] != "start" or not event[_WAITED]:
        return False
    return not then or (then[0][0] == "state" and _place(then[0]) == _place(event))


def _is_harmless(event: Event) -> bool:
    return event[0] in _HARMLESS and (event[0] != "start" or event[3] in _COLLECTIVES)


_WAITED = 11  # the place of that field in a "start"
