"""foresee: a plan in, what must be found in its run out - its ranks as abstract machines, in lockstep.

Shares no code with diagnose. A machine knows which collectives a healthy rank issues and what each fault makes of that;
it computes no logits. All ranks meet in one collective after the other; where they do not all come, or do not bring
the same, the group is broken, and whoever is not there as planned is to be named. What comes later may be told or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, get_args

import torch

from tpbed.harness.faults import (
    Absent,
    ArrivalFault,
    BlocksFromOwnRow,
    CollectiveFault,
    Corrupt,
    Crash,
    Delay,
    Exhaust,
    Exit,
    Extra,
    Fact,
    Fault,
    HeadFault,
    Inflated,
    JunkScale,
    Kill,
    Late,
    Leave,
    Linger,
    Narrow,
    NoWeight,
    Nudge,
    OtherTile,
    OtherTopK,
    PackedOnly,
    Pause,
    Quit,
    Raise,
    Recast,
    Replayed,
    Rows,
    ScaleDropped,
    Skip,
    Spin,
    StaleMethod,
    Stall,
    Stop,
    Strided,
    Unloaded,
    Unmasked,
    Unpadded,
    WrongScale,
    describe,
)
from tpbed.harness.inputs import build_shard
from tpbed.harness.plan import Plan
from tpbed.harness.scenario import Kind, Scenario
from tpbed.selector.admission import FORMS_OF_METHOD, UNQUANTIZED_METHODS
from tpbed.tp.errors import TestbedError

Outcome = Literal["raised", "died", "frozen", "left", "returned"]
UNFORESEEN: dict[type[Any], str] = {
    Fact: "programs that ask for facts have a course of their own",
    OtherTopK: "another back end is a decision, and what it answers depends on logits",
    **dict.fromkeys(
        (Unloaded, ScaleDropped, BlocksFromOwnRow),
        "a dense head in the place of a packed one is a decision, and what the ranks vote depends on the format",
    ),
    Replayed: "how many rows come out depends on those of the first step",
}
"""Faults that no machine knows, and why."""


class OracleError(TestbedError):
    """A plan of which machines cannot tell what it will show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCall:
    """A collective as a rank issues it: all_gather, in the default group."""

    step: int
    dtype: str
    shape: tuple[int, ...]
    strided: bool = False

    @property
    def payload_bytes(self) -> int:
        """What it moves for each rank; where these differ, it never completes."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        return prod(self.shape) * itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """A rank that must be named, and how.

    kinds: of the finding, any of them. seq: where the finding is, if it has a place. says: a part of its cause.
    certain: False where the ranks are in equal camps, or the wrong ones in the larger, and nothing that was recorded
        before tells them apart: then the finding must be there, whoever it names.
    """

    rank: int
    kinds: tuple[Kind, ...]
    seq: int | None = None
    says: str = ""
    certain: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a run will show. fired: indices of the faults that strike, in the scenario.

    roots: all must be found. culprits: ranks that may be named besides, for faults that strike too.
    spoilt: wrong data has reached the answers, so that checks of them may find it.
    open_end: the group went on after a mismatch, or with all ranks changed alike, on mixed-up data: more faults may
        strike, and more may be found.
    """

    fired: frozenset[int]
    roots: tuple[Root, ...]
    culprits: frozenset[int]
    spoilt: bool
    open_end: bool


def calls_of(scenario: Scenario) -> tuple[PlannedCall, ...]:
    """The collectives that a healthy rank issues in a whole run, in order: none in a group of one.

    Empty for selectors that are not right by contract, whose course is not known here: observe a healthy run of them.
    """
    if scenario.world_size == 1 or scenario.selector not in _PER_STEP:
        return ()
    kinds = _PER_STEP[scenario.selector]
    return tuple(_planned(kind, step, scenario) for step in range(scenario.steps) for kind in kinds)


_PER_STEP: dict[str, tuple[str, ...]] = {
    "tpbed": ("float32", "int64"),  # values, ids
    "packed": ("int64",),  # keys
    "agreed": ("uint8", "float32", "int64"),  # a vote before them
    "full-gather": ("logits",),
}
_VOTE = PlannedCall(step=0, dtype="uint8", shape=(512,))
_LOGITS = {"fp32": "float32", "fp16": "float16"}


def _planned(kind: str, step: int, scenario: Scenario) -> PlannedCall:
    if kind == _VOTE.dtype:
        return replace(_VOTE, step=step)
    if kind == "logits":
        width = build_shard(scenario, 0).num_org_padded
        return PlannedCall(step=step, dtype=_LOGITS.get(scenario.head, "bfloat16"), shape=(scenario.rows, width))
    return PlannedCall(step=step, dtype=kind, shape=(scenario.rows, scenario.k))


def foresee(plan: Plan, calls: Sequence[PlannedCall] | None = None, *, empty_waits: bool = True) -> Outlook:
    """What a run of this plan will show, in a world that expresses all its faults.

    calls: what a healthy rank issues, as observed; None for calls_of.
    empty_waits: whether a collective of no bytes waits for its peers: over gloo it completes alone.
    Raises OracleError for a plan with a fault of UNFORESEEN.
    """
    for fault in plan.scenario.faults:
        if why := UNFORESEEN.get(type(fault)):
            raise OracleError(f"what `{describe(fault)}` will show cannot be foreseen, since {why}: plan it without.")
    planned = tuple(calls_of(plan.scenario) if calls is None else calls)
    return _Group(plan, planned, empty_waits).run()


@dataclass(slots=True)
class _Machine:
    """One rank: what it issues, and how it ends."""

    plan: Plan
    rank: int
    calls: tuple[PlannedCall, ...]
    fired: Counter[int] = field(default_factory=Counter)
    harmful: bool = False  # a fault has struck that a finding may name
    altered: bool = False  # what it issues now is not what is planned
    spoilt: bool = False
    skipped: bool = False
    votes_differ: bool = False
    outcome: Outcome = "returned"
    says: str = ""

    def faults(self, *kinds: type[Any], step: int | None = None) -> Iterator[Any]:
        """Its own of these kinds, each marked as fired."""
        for index, fault in enumerate(self.plan.scenario.faults):
            if fault.rank == self.rank and isinstance(fault, kinds) and getattr(fault, "step", None) == step:
                self.fired[index] += 1
                yield fault

    def life(self) -> Iterator[PlannedCall]:
        """The collectives that it issues; asked for the next when the last is complete."""
        try:
            yield from self._life()
        except _EndsError as end:
            self.outcome, self.says, self.harmful = end.outcome, end.says, True

    def _life(self) -> Iterator[PlannedCall]:
        bad_head = self._load_head()
        seq = [1]
        for step in range(self.plan.scenario.steps):
            if list(self.faults(Leave, step=step)):
                raise _EndsError("left", "returned")
            yield from self._step(step, bad_head, seq)
        if any(linger.seconds is None for linger in list(self.faults(Linger))):
            raise _EndsError("frozen", "teardown")

    def _load_head(self) -> bool:
        """Whether it is a head that admission or its method refuses, once the ranks have voted. Some cannot be made."""
        scenario, faults = self.plan.scenario, _last_of_each_kind(self.faults(*get_args(HeadFault)))
        shard = build_shard(scenario, self.rank)
        share = -(-scenario.org_vocab_size // scenario.world_size)
        if share < shard.width and any(isinstance(fault, Unpadded) for fault in faults):
            raise _EndsError("raised", "HeadError")
        off = any(isinstance(f, JunkScale | OtherTile) or _has_other_scale(f) for f in faults)
        self.spoilt = self.spoilt or off
        inflated = scenario.world_size > 1 and any(isinstance(fault, Inflated) for fault in faults)
        return inflated or any(_is_bad_head(fault) for fault in faults)

    def _step(self, step: int, bad_head: bool, seq: list[int]) -> Iterator[PlannedCall]:
        scenario = self.plan.scenario
        rows = [*(fault.rows for fault in self.faults(Rows, step=step)), scenario.rows][0]
        if rows != scenario.rows:
            self.harmful = self.spoilt = True
        for _ in self.faults(Unmasked):
            self.spoilt = self.spoilt or bool(scenario.overwrites)
        calls = [call for call in self.calls if call.step == step]
        if calls and _is_vote(calls[0]):
            yield from self._issue(calls.pop(0), seq)
            if self.votes_differ or self.skipped:
                raise _EndsError("raised", "")
        if bad_head:
            raise _EndsError("raised", "")
        self._choose(step, rows)
        for call in calls:
            yield from self._issue(_with_rows(call, rows), seq)

    def _choose(self, step: int, rows: int) -> None:
        """The local top-k, where there is anything to rank."""
        scenario = self.plan.scenario
        if scenario.selector == "full-gather" or not rows or not build_shard(scenario, self.rank).width:
            return
        if list(self.faults(Spin, step=step)):
            raise _EndsError("frozen", "topk")
        for fault in self.faults(Nudge, step=step):
            self.spoilt = self.spoilt or fault.row < rows

    def _issue(self, call: PlannedCall, seq: list[int]) -> Iterator[PlannedCall]:
        """One collective on its way to the group, past the faults that strike there."""
        asked, planned = seq[0], call
        for index, fault in enumerate(self.plan.scenario.faults):
            if not isinstance(fault, get_args(CollectiveFault)) or fault.rank != self.rank:
                continue
            if fault.seq == asked and self.fired[index] < fault.times:
                self.fired[index] += 1
                if isinstance(fault, Extra):
                    self.harmful = True
                    yield from self._issue(replace(call, strided=False), seq)
                changed = self._struck(fault, call)
                if changed is None:
                    return
                call = changed
        seq[0] += 1
        self.altered = call != planned
        yield call

    def _struck(self, fault: Any, call: PlannedCall) -> PlannedCall | None:
        if type(fault) in _ENDS:
            raise _EndsError(*_ENDS[type(fault)])
        if isinstance(fault, Skip):
            self.harmful = self.spoilt = self.skipped = True
            return None
        if isinstance(fault, Corrupt):
            self.spoilt = True
            self.votes_differ ^= _is_vote(call)  # twice negated is as it was
            return call
        changed = _CHANGES[type(fault)](fault, call)
        self.harmful = self.harmful or changed != call
        return changed


class _EndsError(Exception):
    """The rank gets no further."""

    def __init__(self, outcome: Outcome, says: str) -> None:
        self.outcome, self.says = outcome, says


def _last_of_each_kind(faults: Iterable[Any]) -> list[Any]:
    """Of those of one rank: a head that is changed twice in the same way is as the last change left it."""
    return list({(fault.rank, type(fault)): fault for fault in faults}.values())


def _is_bad_head(fault: Fault) -> bool:
    """Of a dense head, a method that is not known is believed, and raises in its turn."""
    stale = isinstance(fault, StaleMethod) and fault.method not in {*UNQUANTIZED_METHODS, *FORMS_OF_METHOD}
    return stale or isinstance(fault, PackedOnly | NoWeight)


def _has_other_scale(fault: Fault) -> bool:
    return isinstance(fault, WrongScale) and fault.scale_of != fault.rank


def _is_vote(call: PlannedCall) -> bool:
    return (call.dtype, call.shape) == (_VOTE.dtype, _VOTE.shape)


def _with_rows(call: PlannedCall, rows: int) -> PlannedCall:
    return replace(call, shape=(rows, *call.shape[1:]))


_ENDS: dict[type[Any], tuple[Outcome, str]] = {
    Raise: ("raised", "InjectedError"),
    Quit: ("raised", "SystemExit"),
    Exhaust: ("raised", "allocate"),
    Kill: ("died", "SIGKILL"),
    Crash: ("died", "SIGSEGV"),
    Exit: ("died", "exit status 1"),
    Stop: ("frozen", "is stopped"),
    Stall: ("frozen", "is busy"),
}


def _recast(fault: Recast, call: PlannedCall) -> PlannedCall:
    return call if fault.dtype == call.dtype else replace(call, dtype=fault.dtype, strided=False)


def _narrow(fault: Narrow, call: PlannedCall) -> PlannedCall:
    return replace(call, shape=(*call.shape[:-1], max(call.shape[-1] - 1, 0)), strided=False)


def _strided(fault: Strided, call: PlannedCall) -> PlannedCall:
    """Views of one row, and permuted views of one column, are contiguous; so is what is empty."""
    if len(call.shape) < 2 or not prod(call.shape):
        return call
    rows, columns = call.shape
    return replace(call, strided=rows > 1 and (columns > 1 or not fault.transposed))


def _unchanged(fault: Fault, call: PlannedCall) -> PlannedCall:
    return call


_CHANGES: dict[type[Any], Callable[[Any, PlannedCall], PlannedCall]] = {
    Recast: _recast,
    Narrow: _narrow,
    Strided: _strided,
    Delay: _unchanged,
    Pause: _unchanged,
    Extra: _unchanged,
}


class _Group:
    """All ranks of a run, in lockstep."""

    def __init__(self, plan: Plan, calls: tuple[PlannedCall, ...], empty_waits: bool) -> None:
        self.plan, self.calls, self.empty_waits = plan, calls, empty_waits
        self.machines = [_Machine(plan, rank, calls) for rank in range(plan.scenario.world_size)]
        self.lives = [machine.life() for machine in self.machines]
        self.seq = 0
        self.open_end = False

    def run(self) -> Outlook:
        if unformed := self._unformed():
            return unformed
        roots: list[Root] = []
        while not roots:
            self.seq += 1
            issued = {rank: call for rank, life in enumerate(self.lives) if (call := next(life, None)) is not None}
            if not issued:
                roots = self._ends()
                break
            roots = self._broken(issued)
            self._spread()
        return self._outlook([self._loosely(root) for root in roots])

    def _loosely(self, root: Root) -> Root:
        """Ranks that both add collectives may be told apart by call sites, of which machines know nothing."""
        adding = {f.rank for f in self.plan.scenario.faults if isinstance(f, Extra) and f.seq <= self.seq}
        return replace(root, seq=None, certain=False) if len(adding) > 1 and "mismatch" in root.kinds else root

    def _spread(self) -> None:
        """What one rank contributes, all have."""
        differ = any(machine.votes_differ for machine in self.machines) or (self.seq == 1 and self._heads_differ())
        for machine in self.machines:
            machine.votes_differ = differ

    def _heads_differ(self) -> bool:
        last = _last_of_each_kind(self.plan.scenario.faults)
        bad = {fault.rank for fault in last if _is_bad_head(fault) or isinstance(fault, Inflated)}
        return 0 < len(bad) < len(self.machines)

    def _outlook(self, roots: Sequence[Root]) -> Outlook:
        faulty = {fault.rank for fault in self.plan.scenario.faults}
        harmful = {machine.rank for machine in self.machines if machine.harmful}
        return Outlook(
            fired=frozenset(index for machine in self.machines for index in machine.fired),
            roots=tuple(roots),
            culprits=frozenset(harmful | (faulty if self.open_end else set()) | {root.rank for root in roots}),
            spoilt=self.open_end or any(machine.spoilt for machine in self.machines),
            open_end=self.open_end,
        )

    def _unformed(self) -> Outlook | None:
        faults = list(enumerate(self.plan.scenario.faults))
        arrivals = {index: fault for index, fault in faults if isinstance(fault, get_args(ArrivalFault))}
        absent = sorted({fault.rank for fault in arrivals.values() if isinstance(fault, Absent)})
        for index, fault in arrivals.items():
            self.machines[fault.rank].fired[index] += 1
        if not absent:
            return None
        roots = tuple(Root(rank=rank, kinds=("init_fail",)) for rank in absent)
        return Outlook(fired=frozenset(arrivals), roots=roots, culprits=frozenset(absent), spoilt=False, open_end=True)

    def _ends(self) -> list[Root]:
        """Nobody waits: whoever did not end as planned is to be named for that alone."""
        kinds: dict[Outcome, tuple[Kind, ...]] = {
            "raised": ("crash_one", "crash_all"),
            "died": ("crash_one", "crash_all"),
            "left": ("crash_one", "crash_all", "mismatch"),  # if its peers went on alone, it did less than they
            "frozen": ("stall",),
        }
        return [
            Root(rank=machine.rank, kinds=kinds[machine.outcome], says=machine.says)
            for machine in self.machines
            if machine.outcome != "returned"
        ]

    def _broken(self, issued: dict[int, PlannedCall]) -> list[Root]:
        absent = [machine for machine in self.machines if machine.rank not in issued]
        camps = Counter((call.dtype, call.shape, call.step) for call in issued.values())
        strided = [rank for rank, call in issued.items() if call.strided]
        if not absent and len(camps) == 1 and not strided:
            self.open_end = self.open_end or any(machine.altered for machine in self.machines)
            return []
        if len(camps) == 1 and not strided and not self._waits(issued):
            self.open_end = True
            return []
        self.open_end = self.open_end or not absent and len({call.payload_bytes for call in issued.values()}) == 1
        if self.seq > len(self.calls):
            return self._overdone(issued, absent)
        odd = self._odd(issued, camps) if len(camps) > 1 else []
        views = [Root(rank=rank, kinds=("mismatch",), seq=self.seq, says="strides") for rank in strided]
        return [*odd, *views, *(self._missing(machine, bool(odd or views), absent) for machine in absent)]

    def _waits(self, issued: dict[int, PlannedCall]) -> bool:
        return self.empty_waits or any(call.payload_bytes for call in issued.values())

    def _missing(self, machine: _Machine, mismatch: bool, absent: Sequence[_Machine]) -> Root:
        """A rank that never comes to where others wait; by the only step, the fewer ranks seem to be the odd ones."""
        returned = all(other.outcome == "returned" for other in absent)
        first = self.plan.scenario.steps == 1 and 2 * len(absent) > len(self.machines)
        alone = all(other.outcome == "frozen" for other in absent)
        waited: tuple[Kind, ...] = ("stall",) if alone else ("hang",)
        if mismatch:
            waited = ("stall",) if machine.outcome == "frozen" else ("hang", "crash_one")
        return Root(rank=machine.rank, kinds=waited, seq=self.seq, says=machine.says, certain=not (returned and first))

    def _odd(self, issued: dict[int, PlannedCall], camps: Counter[tuple[str, tuple[int, ...], int]]) -> list[Root]:
        """The ranks that bring something else than planned; certain if they are few, or a step shows what is usual."""
        call = self.calls[self.seq - 1]
        usual = (call.dtype, call.shape, call.step)
        deviant = [rank for rank, own in issued.items() if (own.dtype, own.shape, own.step) != usual]
        largest = max(count for camp, count in camps.items() if camp != usual)
        certain = camps[usual] > largest or (camps[usual] == largest and call.step > 0)
        return [Root(rank=rank, kinds=("mismatch",), seq=self.seq, certain=certain) for rank in deviant]

    def _overdone(self, issued: dict[int, PlannedCall], absent: Sequence[_Machine]) -> list[Root]:
        """Some issue more than planned, and wait for those that have ended as they should."""
        frozen = all(machine.outcome == "frozen" for machine in absent)
        fewer = len(issued) < len(absent) and not frozen
        certain = fewer or (len(issued) <= len(absent) and self.plan.scenario.steps > 1)
        kinds: tuple[Kind, ...] = ("hang", "mismatch") if certain else ("hang", "mismatch", "stall")
        extra = [Root(rank=rank, kinds=kinds, seq=self.seq, certain=certain) for rank in issued]
        stuck = [machine for machine in absent if machine.outcome == "frozen"]
        return extra + [Root(rank=one.rank, kinds=("stall", "hang"), says=one.says) for one in stuck]


assert {*_ENDS, *_CHANGES, Skip, Corrupt} == {*get_args(CollectiveFault)}, "a kind of fault that no machine knows"
_ = Late  # an arrival that only takes time
