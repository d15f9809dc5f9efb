"""Diagnoses that are wrong by one change: whom they name, what they leave out, which evidence they overlook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tpbed.harness.diagnose import Diagnosis, diagnose
from tpbed.harness.findings import Finding
from tpbed.tp.ledger import CollectiveRecord, Ledger
from tpbed.tp.world import Liveness

Ledgers = Sequence[Ledger]
Seen = Sequence[Liveness]
Findings = tuple[Finding, ...]


def names_who_waits(ledgers: Ledgers, seen: Seen) -> Findings:
    """Names the ranks that wait, as a watchdog does that sees time-outs alone."""
    return _each(ledgers, seen, lambda one: replace(one, ranks=one.waiting_ranks or one.ranks))


def names_the_first_rank(ledgers: Ledgers, seen: Seen) -> Findings:
    """Names rank 0, whose log is read first."""
    return _each(ledgers, seen, lambda one: replace(one, ranks=(0,)))


def names_the_last_rank(ledgers: Ledgers, seen: Seen) -> Findings:
    """Names the last rank, which is so often the one with the padding."""
    return _each(ledgers, seen, lambda one: replace(one, ranks=(len(ledgers) - 1,)))


def names_the_next_rank(ledgers: Ledgers, seen: Seen) -> Findings:
    """Counts ranks from 1."""
    return _each(ledgers, seen, lambda one: replace(one, ranks=tuple((r + 1) % len(ledgers) for r in one.ranks)))


def names_everybody(ledgers: Ledgers, seen: Seen) -> Findings:
    """Names all ranks, one of which it will be."""
    return _each(ledgers, seen, lambda one: replace(one, ranks=tuple(range(len(ledgers)))))


def names_one_of_them(ledgers: Ledgers, seen: Seen) -> Findings:
    """Names the first culprit, and no other of the same finding."""
    return _each(ledgers, seen, lambda one: replace(one, ranks=one.ranks[:1]))


def names_the_majority(ledgers: Ledgers, seen: Seen) -> Findings:
    """Names the larger camp of a mismatch."""
    return _each(ledgers, seen, lambda one: _inverted(one, len(ledgers)) if one.kind == "mismatch" else one)


def names_the_slowest(ledgers: Ledgers, seen: Seen) -> Findings:
    """Names the rank whose last sign of life is the oldest."""
    slowest = min(ledgers, key=_last_sign).rank
    return _each(ledgers, seen, lambda one: replace(one, ranks=(slowest,)))


def tells_the_first_finding(ledgers: Ledgers, seen: Seen) -> Findings:
    """Tells one finding of several."""
    return diagnose(ledgers, seen)[:1]


def tells_the_place_after(ledgers: Ledgers, seen: Seen) -> Findings:
    """Counts collectives from 0 where ledgers count from 1."""
    return _each(ledgers, seen, lambda one: replace(one, seq=None if one.seq is None else one.seq + 1))


def tells_stalls_as_hangs(ledgers: Ledgers, seen: Seen) -> Findings:
    """Takes a rank that is stopped or busy for one that will never come."""
    return _each(ledgers, seen, lambda one: replace(one, kind="hang") if one.kind == "stall" else one)


def tells_no_cause(ledgers: Ledgers, seen: Seen) -> Findings:
    """Says who and where, and not why."""
    return _each(ledgers, seen, lambda one: replace(one, causes=()))


def tells_no_crash(ledgers: Ledgers, seen: Seen) -> Findings:
    """Looks for ranks that wait, and so is silent about one that ends alone."""
    return tuple(one for one in diagnose(ledgers, seen) if one.kind not in ("crash_one", "crash_all"))


def tells_who_waits_as_well(ledgers: Ledgers, seen: Seen) -> Findings:
    """Makes a finding of each rank that is left waiting, too."""
    found = diagnose(ledgers, seen)
    waiting = {rank for one in found for rank in one.waiting_ranks}
    return (*found, *(Finding(kind="stall", ranks=(r,), text=f"rank {r} is left waiting") for r in sorted(waiting)))


def takes_late_for_stalled(ledgers: Ledgers, seen: Seen) -> Findings:
    """Takes a rank that ends later than the first, by more than a few turns, for one that stalled."""
    ends = {one.rank: one.end.at_ns for one in ledgers if one.end is not None}
    late = tuple(rank for rank, at_ns in ends.items() if at_ns > min(ends.values()) + LATE_NS)
    found = diagnose(ledgers, seen)
    return found or ((Finding(kind="stall", ranks=late, text="late"),) if late else ())


def asks_no_liveness(ledgers: Ledgers, seen: Seen) -> Findings:
    """Takes every rank that has not ended for one that runs."""
    return diagnose(ledgers, [replace(one, state="running") for one in seen])


def reads_no_ends(ledgers: Ledgers, seen: Seen) -> Findings:
    """Overlooks how ranks ended, as who reads traces of collectives alone."""
    return diagnose([replace(one, end=None) for one in ledgers], seen)


def reads_no_dtypes(ledgers: Ledgers, seen: Seen) -> Findings:
    """Compares shapes alone."""
    return diagnose(_changed(ledgers, lambda call: replace(call, dtype="")), seen)


def reads_no_shapes(ledgers: Ledgers, seen: Seen) -> Findings:
    """Compares ops and dtypes alone."""
    return diagnose(_changed(ledgers, lambda call: replace(call, shape=(), stride=(), payload_bytes=0)), seen)


def reads_no_strides(ledgers: Ledgers, seen: Seen) -> Findings:
    """Takes every view for contiguous."""
    return diagnose(_changed(ledgers, lambda call: replace(call, stride=_contiguous(call.shape))), seen)


def loses_the_last_call(ledgers: Ledgers, seen: Seen) -> Findings:
    """Reads ledgers that were written after each collective, and not before it."""
    kept = [replace(one, collectives=tuple(c for c in one.collectives if c.ended_ns is not None)) for one in ledgers]
    return diagnose(kept, seen)


def mixes_up_liveness(ledgers: Ledgers, seen: Seen) -> Findings:
    """Has what was seen of ranks in the order in which they answered, last rank first."""
    return diagnose(ledgers, seen[::-1])


LATE_NS = 2_000  # simulated


def _each(ledgers: Ledgers, seen: Seen, change: Callable[[Finding], Finding]) -> Findings:
    return tuple(change(one) for one in diagnose(ledgers, seen))


def _inverted(finding: Finding, world_size: int) -> Finding:
    return replace(finding, ranks=tuple(rank for rank in range(world_size) if rank not in finding.ranks))


def _last_sign(ledger: Ledger) -> int:
    times = [max(call.started_ns, call.ended_ns or 0) for call in ledger.collectives]
    return max([*times, 0 if ledger.end is None else ledger.end.at_ns], default=0)


def _changed(ledgers: Ledgers, change: Callable[[CollectiveRecord], CollectiveRecord]) -> list[Ledger]:
    return [replace(one, collectives=tuple(map(change, one.collectives))) for one in ledgers]


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides[: len(shape)]))


DIAGNOSES: dict[str, Diagnosis] = {
    "names-who-waits": names_who_waits,
    "names-the-first-rank": names_the_first_rank,
    "names-the-last-rank": names_the_last_rank,
    "names-the-next-rank": names_the_next_rank,
    "names-everybody": names_everybody,
    "names-one-of-them": names_one_of_them,
    "names-the-majority": names_the_majority,
    "names-the-slowest": names_the_slowest,
    "tells-the-first-finding": tells_the_first_finding,
    "tells-the-place-after": tells_the_place_after,
    "tells-stalls-as-hangs": tells_stalls_as_hangs,
    "tells-no-cause": tells_no_cause,
    "tells-no-crash": tells_no_crash,
    "tells-who-waits-as-well": tells_who_waits_as_well,
    "takes-late-for-stalled": takes_late_for_stalled,
    "asks-no-liveness": asks_no_liveness,
    "reads-no-ends": reads_no_ends,
    "reads-no-dtypes": reads_no_dtypes,
    "reads-no-shapes": reads_no_shapes,
    "reads-no-strides": reads_no_strides,
    "loses-the-last-call": loses_the_last_call,
    "mixes-up-liveness": mixes_up_liveness,
}
