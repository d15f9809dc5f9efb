"""SearchedRun: a simulated run that a search steers, and that notes what each of its steps touches.

A step is what one rank does in one turn. Two steps of different ranks are independent, so that their order makes no
difference, unless they `meet`. What a step touches is read off the rank's own ledger; whatever is not known from there
to be harmless - sleeping, a time-out, the clock, a message, a store - touches everything. To ask whether a collective
is done is to watch it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpbed.tp.ledger import Event
from tpbed.tp.refusal import cannot_wait
from tpbed.tp.simulated_rank import Awaited, SimulatedRank
from tpbed.tp.simulated_run import TURN_NS, SimulatedRun

Place = tuple[str, int]  # a group and a seq in it: where members meet
Steer = Callable[["SearchedRun", Sequence[int]], int]  # whose turn it is, of the ranks that may have it

_HARMLESS = {"group", "state", "wait", "ask", "decision", "mark", "step", "check", "end", "start"}  # events
_MAIL = {"message", "message_state", "message_wait", "message_from"}
_REMARKS = {
    "decision",
    "mark",
    "step",
    "check",
    "ask",
}  # a rank that writes these between two questions still only asks
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
    """A run whose turns `steer` gives, fairly: a rank that has asked `patience` times in vain waits.

    It waits until a collective that it has asked for is complete - or, if it asked for something else, until anything
    has happened - or nobody else can go on. What counts is its own asking since it last did anything else, so that
    schedules that differ in the order of independent steps are fair alike.

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
        self._latest: dict[int, int] = {}  # the last step of each rank
        self._noted = 0  # steps
        self.held_back = False  # a rank could have gone on, but for fairness
        self._everything, self._expected = False, 0  # the step that is being taken: touches all; has so much progress

    def wake(self, rank: SimulatedRank) -> None:
        """As in any run."""
        self._expected += 1
        super().wake(rank)

    def poll(self, owner: SimulatedRank, about: Awaited | None = None) -> None:
        """As in any run. What comes after it depends on all that was before, or on the one collective."""
        notes = self._notes[self.here(owner).index]
        if about is None:
            notes.ask(self.progress)
            self._everything = True
        else:
            notes.ask_for(about)
        alone = not self.ready and not self.sleepers
        super().poll(owner, about)
        if alone:
            self.offer_turn(self.here(owner))  # a step ends here, whoever else can take one

    def wait_for(self, work: Awaited, timeout_s: float) -> None:
        """As in any run. A time-out counts even where the wait is over at once: later it might have expired."""
        if timeout_s:
            self._everything = self._notes[self.here(work.rank, waits=False).index].everything = True
        alone = work.done and not self.ready and (work.vetted or not cannot_wait())
        super().wait_for(work, timeout_s)
        if alone:
            self.offer_turn(work.rank)

    def call_back(self, rank: SimulatedRank, seconds: float) -> None:
        """As in any run."""
        self._everything = True
        super().call_back(rank, seconds)

    def look_at_clock(self, rank: SimulatedRank) -> int:
        """As in any run."""
        self._everything = True
        return super().look_at_clock(rank)

    def _next(self, asks: int = -1) -> SimulatedRank | None:
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
        self.held_back = self.held_back or len(patient) < len(asked)
        return patient or [min(asked, key=lambda index: (asked[index], index))]

    def _asked(self, index: int) -> int:
        notes = self._notes[index]
        return max(notes.asked if notes.asked_at == self.progress else 0, notes.vain())

    def _begin(self, choice: int) -> None:
        notes = self._notes[choice]
        notes.look(self.patience)
        self.steps.append(Step(choice, tuple(self._needed(notes))))
        self._latest[choice] = len(self.steps) - 1
        self._everything = notes.everything or self._timed() or bool(self.ranks[choice].owed)
        self._expected = self.progress
        notes.everything, notes.waited, notes.state = False, None, self.ranks[choice].state

    def _needed(self, notes: _Notes) -> Iterable[int]:
        """The steps without which the rank could not go on."""
        if notes.waited is not None:
            return self._joined.get(notes.waited, ())
        if notes.vain() >= self.patience:  # and nobody else can go on
            return self._latest.values()
        if len(notes.asked_for) >= self.patience and len(notes.seen) == 1:
            (place,) = notes.seen
            return self._joined.get(place, ())
        return ()

    def _timed(self) -> bool:
        """Whether anybody waits for a time: then every turn counts, since it takes time."""
        return any(self.ranks[index].waits == waits for _, _, index, waits in self.sleepers)

    def note_step(self) -> None:
        """The step is over: say what it touched, which shows in what its rank has written since."""
        if self._noted == len(self.steps):  # none was taken since
            return
        self._noted = len(self.steps)
        step = self.steps[-1]
        rank, notes = self.ranks[step.rank], self._notes[step.rank]
        events = rank.events[notes.read :]
        notes.read = len(rank.events)
        notes.forget_questions(rank.events)
        joins, watches = notes.take_places(events)
        for place in joins:
            self._joined.setdefault(place, []).append(len(self.steps) - 1)
        notes.note_wait(rank, events)
        everything = not self._accounts_for(rank, events) or self._everything  # in this order: the former takes notes
        step.touch = Touch(everything, joins, watches)

    def _accounts_for(self, rank: SimulatedRank, events: Sequence[Event]) -> bool:
        """Whether the ledger tells of all that has happened: each collective, wake and end is one step of progress."""
        starts = sum(event[0] == "start" for event in events)
        notes = self._notes[rank.index]
        ended = rank.state != notes.state
        opaque = notes.is_opaque(events)
        return self._expected + starts + ended == self.progress and not opaque and not self._timed()


class _Notes:
    """What is known of one rank between its steps."""

    def __init__(self, trusting: bool) -> None:
        self.trusting = trusting
        self.read = 0  # events
        self.open: set[Place] = set()  # begun, and not waited for to the end
        self.waited: Place | None = None  # what the last step ended with
        self.everything = False  # whether the next step touches everything, whatever it does
        self.opaque = False  # it has done something that is not known here, of which it may see more at any time
        self.asked, self.asked_at = 0, -1  # in vain for something else than a collective, at what progress
        self.asked_for: list[Awaited] = []  # in vain, since it last did anything else
        self.told = 0  # events before the last of these questions
        self.seen: set[Place] = set()  # collectives whose state the step depends on, since it follows a question
        self.state = "running"  # when the step began
        self._unasked: set[Place] = set()  # asynchronous, and not waited for
        self._mail: set[Place] = set()  # messages that it has called and not seen the end of

    def ask(self, progress: int) -> None:
        """For anything else than a collective: the next step depends on all."""
        self.asked = self.asked + 1 if self.asked_at == progress else 1
        self.asked_at, self.everything = progress, True

    def ask_for(self, work: Awaited) -> None:
        """Whether a collective is complete, which it is not yet."""
        self.forget_questions(work.rank.events)
        self.asked_for.append(work)
        self.told = len(work.rank.events)

    def forget_questions(self, events: Sequence[Event]) -> None:
        """If the rank has done something else since the last one."""
        if not all(event[0] in _REMARKS for event in events[self.told :]):
            self.asked_for.clear()
            self.told = len(events)

    def vain(self) -> int:
        """How often the rank has asked for collectives of which none is complete."""
        return 0 if any(work.done for work in self.asked_for) else len(self.asked_for)

    def look(self, patience: int) -> None:
        """A step begins: it depends on the last answer, and after many questions on whatever ends the wait."""
        works = self.asked_for[-1:] if len(self.asked_for) < patience else self.asked_for
        self.seen = {_place(work.rank.events[work.called - 1]) for work in works}

    def take_places(self, events: Sequence[Event]) -> tuple[frozenset[Place], frozenset[Place]]:
        """Where the rank takes its place, and what it watches meanwhile."""
        joins: set[Place] = set()
        watches = self.open | self.seen
        for number, event in enumerate(events):
            if event[0] == "start":
                joins.add(_place(event))
            waits = event[0] == "wait" or _waits_at_once(events, number)
            watches |= self._note(event, waits=waits)
            if waits and number + 1 < len(events):
                watches.add(_place(event))  # for it goes on in the same step
        return frozenset(joins), frozenset(watches)

    def _note(self, event: Event, *, waits: bool) -> set[Place]:
        """What is watched from this event on, or at it: that a collective is found complete without a wait."""
        kind, found = event[0], set[Place]()
        if kind not in ("start", "wait", "state"):
            return self.open
        place = _place(event)
        if kind == "start" and not waits:
            self._unasked.add(place)
            if not self.trusting:
                self.open.add(place)
        elif kind == "wait":
            self._unasked.discard(place)
        elif kind == "state" and event[3] == "completed":
            found = {place} & self._unasked
            self.open.discard(place)
            self._unasked.discard(place)
        return self.open | found

    def is_opaque(self, events: Sequence[Event]) -> bool:
        """Whether what the rank does in this step is not known: among others while a message is under way.

        The step that begins one shows by its progress, for which the ledger does not account.
        """
        mail = bool(self._mail)
        for event in events:
            if event[0] == "message":
                self._mail.add(_place(event))
            elif event[0] == "message_state":
                self._mail.discard(_place(event))
            self.opaque = self.opaque or not _is_harmless(event)
        return self.opaque or mail

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
    return event[0] in _HARMLESS | _MAIL and (event[0] != "start" or event[3] in _COLLECTIVES)


_WAITED = 11  # the place of that field in a "start"
