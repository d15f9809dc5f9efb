"""diagnose: ledgers and liveness in, findings out - what went wrong, and the one event that made it inevitable."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tpbed.harness.circle import Place, Record, explain_circle, tell, without_bystanders
from tpbed.harness.decisions import Divergence, find_divergences
from tpbed.harness.findings import Cause, Finding, name_ranks
from tpbed.harness.messages import find_lone_messages, find_unfit_messages
from tpbed.harness.mismatch import find_mismatches, find_strided
from tpbed.harness.surplus import find_surplus
from tpbed.tp.ledger import PENDING, WORLD, CollectiveRecord, Ledger, MessageRecord
from tpbed.tp.messages import Mail
from tpbed.tp.stuck import find_missing
from tpbed.tp.world import Liveness

TRANSPORT = (
    "Connection ",
    "gloo/transport",
    "NCCL",
    "Socket",
    "Broken pipe",
    "Timed out",
    "Operation timed out",
    "aborted",
    "monitoredBarrier",
)  # in its errors


Diagnosis = Callable[[Sequence[Ledger], Sequence[Liveness]], tuple[Finding, ...]]


def diagnose(ledgers: Sequence[Ledger], liveness: Sequence[Liveness]) -> tuple[Finding, ...]:
    """Find the root causes in what the ranks did; a pure function, the same for live runs and stored records.

    ledgers, liveness: one each per rank, in rank order.
    Returns findings of the kinds init_fail, mismatch, hang, stall, crash_one, crash_all and diverge, roots only: what
    follows from a finding - peers left waiting, errors of the transport, data mixed up - is no finding of its own.
    """
    scene = _Scene(ledgers, liveness)
    if unformed := _unformed(scene):
        return (unformed,)  # no rank has run anything
    findings = [*find_mismatches(ledgers), *find_strided(ledgers), *find_unfit_messages(ledgers)]
    findings += _hangs(scene, findings)
    findings += _frozen(scene, findings)
    findings += _crashes(scene, findings)
    divergences = find_divergences(ledgers)
    if not findings and not scene.unknown:  # nobody knows of a snapshot whether a rank would have gone on
        findings = (
            _incomplete(scene)
            or _shortfalls(scene)
            or find_lone_messages(ledgers)
            or [divergence.finding() for divergence in divergences[:1]]
        )
    return tuple(_with_pending(_with_decision(finding, divergences), ledgers) for finding in findings)


def _unformed(scene: _Scene) -> Finding | None:
    """The default group was never formed; named is who did not come to its rendezvous, or ended on the way to it."""
    ledgers = scene.ledgers
    outside = [ledger for ledger in ledgers if WORLD not in ledger.groups]
    began = len(outside) == len(ledgers) or any(ledger.rendezvous == "arrived" for ledger in outside)
    formed = any(ledger.collectives or ledger.messages for ledger in ledgers)  # who died may not have told of it
    if not outside or not began or formed or _ended_alike(outside, len(ledgers)):
        return None
    missing = find_missing(ledgers)
    ranks = tuple(rank for rank in missing if not _thrown_out(ledgers[rank])) or missing
    return Finding(
        kind="init_fail",
        ranks=ranks,
        text=f"the group of {len(ledgers)} ranks was not formed for want of {name_ranks(ranks)}",
        waiting_ranks=tuple(ledger.rank for ledger in outside if ledger.end is None and ledger.rank not in ranks),
        causes=tuple(_cause_of_want(ledgers[rank], scene.liveness[rank]) for rank in ranks),
    )


def _thrown_out(ledger: Ledger) -> bool:
    """Whether its peers' trouble ended it, through the transport."""
    return ledger.end is not None and ledger.end.how == "raised" and any(w in ledger.end.message for w in TRANSPORT)


def _cause_of_want(ledger: Ledger, seen: Liveness) -> Cause:
    if ledger.end is not None:
        return _cause_of_end(ledger, "before the group was formed")
    at = {
        "": "loads its program",
        "outside": "does not come to the rendezvous",
        "arrived": "has come, and is not in it",
    }
    how = "is stopped and" if seen.state == "stopped" else "is alive and"
    frame = next((frame for frame in seen.frames if not frame.startswith("tp/")), "")
    where = f", in {frame}" if frame else ""
    return Cause(rank=ledger.rank, text=f"rank {ledger.rank} {how} {at[ledger.rendezvous]}{where}", site=frame)


class _Scene:
    """The ledgers with what is asked of them often."""

    def __init__(self, ledgers: Sequence[Ledger], liveness: Sequence[Liveness]) -> None:
        self.ledgers, self.liveness = ledgers, liveness
        self.ended = [ledger.rank for ledger in ledgers if ledger.end is not None]
        self.frozen = [rank for rank, seen in enumerate(liveness) if seen.state in ("stopped", "stalled")]
        self.unknown = [rank for rank, seen in enumerate(liveness) if seen.state == "unknown"]
        self._mail = Mail(ledgers)
        blocked = {ledger.rank: record for ledger in ledgers if (record := _blocked_in(ledger)) is not None}
        self.blocked = {rank: record for rank, record in blocked.items() if not self._gave_up(record)}
        self.blocked |= self._asking()

    def absent_from(self, record: Record, waiting: int) -> tuple[int, ...]:
        """The ranks that never joined this collective or message of rank `waiting`, or died or raised in it."""
        if isinstance(record, MessageRecord):
            return self._mail.missing_ranks(waiting, record)
        members = self.ledgers[waiting].groups[record.group]
        return tuple(rank for rank in members if self._is_absent(rank, record))

    def _asking(self) -> dict[int, Record]:
        """What ranks ask about for ever instead of waiting for it, where it can never be complete."""
        stalled = [ledger for ledger in self.ledgers if self.liveness[ledger.rank].state == "stalled"]
        asked = {ledger.rank: record for ledger in stalled if (record := _asked(ledger)) is not None}
        return {rank: record for rank, record in asked.items() if self.absent_from(record, rank)}

    def _gave_up(self, record: Record) -> bool:
        """Whether a wait timed out for which a peer came later, and waits now in vain: the blame is not the peer's."""
        if "timed out" not in record.error.lower() or isinstance(record, MessageRecord):
            return False
        waiting = (ledger.waiting_in() for ledger in self.ledgers)
        return any(r is not None and (r.group, r.seq) == (record.group, record.seq) for r in waiting)

    def _is_absent(self, rank: int, record: CollectiveRecord) -> bool:
        ledger = self.ledgers[rank]
        own = next((r for r in ledger.in_group(record.group) if r.seq == record.seq), None)
        if own is None or self._is_held(rank, own):
            return True
        return ledger.end is not None and ledger.end.how != "returned" and own.state != "completed"

    def _is_held(self, rank: int, own: CollectiveRecord) -> bool:
        """Whether the rank's call is queued behind an open one of another group, as on CUDA streams."""
        first = self.blocked.get(rank)
        is_open = own.state in ("scheduled", "started")
        return is_open and first is not None and first.group != own.group and first.started_ns < own.started_ns


def _blocked_in(ledger: Ledger) -> Record | None:
    """The collective or message that a rank waits in, or that the transport threw it out of."""
    waiting = ledger.waiting_in()
    if waiting is not None:
        return waiting
    last = _last(ledger)
    thrown_out = last is not None and last.state == "failed" and any(word in last.error for word in TRANSPORT)
    return last if thrown_out and ledger.end is not None and ledger.end.how == "raised" else None


def _asked(ledger: Ledger) -> Record | None:
    """The last collective that the rank asked about, if it has not seen it complete."""
    last = next((record for record in reversed(ledger.collectives) if record.asked), None)
    return last if last is not None and last.state in ("scheduled", "started") else None


def _last(ledger: Ledger) -> Record | None:
    """What the rank called last."""
    last: tuple[Record, ...] = (*ledger.collectives[-1:], *ledger.messages[-1:])
    return max(last, key=lambda record: record.started_ns, default=None)


def _hangs(scene: _Scene, mismatches: Sequence[Finding]) -> list[Finding]:
    places = [kept for place in _places(scene) if (kept := _unprovoked(place, mismatches, scene)) is not None]
    rooted = _one_per_root([place for place in places if place.roots])
    if rooted:
        return [_explain_hang(place, scene) for place in rooted]
    circle = without_bystanders(places)
    return [explain_circle(circle, scene.blocked, scene.ledgers)] if circle and not mismatches else []


def _unprovoked(place: Place, mismatches: Sequence[Finding], scene: _Scene) -> Place | None:
    """The place, unless a mismatch led there; where one is, with those ranks alone that ended and never came there."""
    record = place.record
    if not _follows(record, mismatches):
        return place
    if isinstance(record, MessageRecord) or _follows(replace(record, seq=record.seq - 1), mismatches):
        return None
    never = [rank for rank in place.roots if len(scene.ledgers[rank].in_group(record.group)) < record.seq]
    roots = tuple(rank for rank in never if rank not in scene.frozen)
    return replace(place, roots=roots) if roots else None


def _one_per_root(places: Sequence[Place]) -> list[Place]:
    """Of the places that wait for the same ranks, the one that was entered first."""
    kept: list[Place] = []
    for place in sorted(places, key=lambda place: place.record.started_ns):
        if not any(set(place.roots) <= set(other.roots) for other in kept):
            kept.append(place)
    return kept


def _places(scene: _Scene) -> list[Place]:
    by_place: dict[tuple[str, int, int | None], list[int]] = {}
    for rank, record in scene.blocked.items():
        alone = rank if isinstance(record, MessageRecord) else None
        by_place.setdefault((record.group, record.seq, alone), []).append(rank)
    return [place for ranks in by_place.values() if (place := _place(ranks, scene)).absent]


def _place(ranks: list[int], scene: _Scene) -> Place:
    record = scene.blocked[ranks[0]]
    absent = tuple(rank for rank in scene.absent_from(record, ranks[0]) if rank not in ranks)
    roots = tuple(rank for rank in absent if rank not in scene.blocked)
    known = tuple(rank for rank in roots if scene.ledgers[rank].groups or rank not in scene.unknown)
    roots = known or roots  # of whom nothing is known, nobody can say that they did not come
    return Place(record, tuple(sorted(ranks)), absent, roots)


def _follows(record: Record, mismatches: Sequence[Finding]) -> bool:
    """Collectives and messages are numbered apart, so neither follows the other."""
    return any(
        m.group == record.group
        and m.seq is not None
        and record.seq >= m.seq
        and (m.op in ("send", "recv")) == isinstance(record, MessageRecord)
        for m in mismatches
    )


def _explain_hang(place: Place, scene: _Scene) -> Finding:
    record, ranks = place.record, place.roots
    if surplus := find_surplus(place, scene.ledgers, scene.frozen):
        return _explain_surplus(place, surplus, scene)
    frozen = set(ranks) <= set(scene.frozen)
    return Finding(
        kind="stall" if frozen else "hang",
        ranks=ranks,
        op=record.op,
        seq=record.seq,
        group=record.group,
        step=record.step,
        waiting_ranks=tuple(sorted(scene.blocked)),
        text=f"{tell(record, scene.ledgers)} waits for {name_ranks(ranks)}, {_fate(ranks, scene)}",
        causes=tuple(_cause_of_absence(scene.ledgers[rank], scene.liveness[rank]) for rank in ranks),
    )


def _fate(ranks: Sequence[int], scene: _Scene) -> str:
    if set(ranks) <= set(scene.unknown):
        return "which had not come by then"
    return "which does not get there" if set(ranks) <= set(scene.frozen) else "which can never join"


def _explain_surplus(place: Place, causes: tuple[Cause, ...], scene: _Scene) -> Finding:
    record = place.record
    return Finding(
        kind="hang",
        ranks=place.waiting,
        op=record.op,
        seq=record.seq,
        group=record.group,
        step=record.step,
        waiting_ranks=tuple(sorted(scene.blocked)),
        text=f"{tell(record, scene.ledgers)} is one too many: {name_ranks(place.absent)} returned without it",
        causes=causes,
    )


def _frozen(scene: _Scene, found: Sequence[Finding]) -> list[Finding]:
    """Ranks that do not get anywhere although nobody waits for them."""
    explained = {rank for finding in found for rank in finding.ranks}
    asking = {rank for rank in scene.blocked if scene.ledgers[rank].waiting_in() is None}
    ranks = tuple(rank for rank in scene.frozen if rank not in explained | asking)
    causes = tuple(_cause_of_absence(scene.ledgers[rank], scene.liveness[rank]) for rank in ranks)
    text = f"{name_ranks(ranks)} made no progress outside any collective, and nobody waits there"
    return [Finding(kind="stall", ranks=ranks, text=text, causes=causes)] if ranks else []


def _cause_of_absence(ledger: Ledger, seen: Liveness) -> Cause:
    last = _last(ledger)
    after = f"after {last.op} seq {last.seq}" if last else "before any collective"
    if ledger.end is None and seen.state == "unknown":
        known = f"called nothing else {after}" if ledger.groups else f"{seen.detail}: whether it came is not known"
        return Cause(rank=ledger.rank, text=f"rank {ledger.rank} {known}", site=last.site if last else "")
    if ledger.end is None:
        how = "is stopped" if seen.state == "stopped" else "is busy outside any collective"
        told = f"rank {ledger.rank} {how} {after}" + (f": {seen.detail}" if seen.detail else "")
        frame = next((frame for frame in seen.frames if not frame.startswith("tp/")), "")
        return Cause(rank=ledger.rank, text=f"{told}, in {frame}" if frame else told, site=frame)
    return _cause_of_end(ledger, after)


def _cause_of_end(ledger: Ledger, after: str) -> Cause:
    end = ledger.end
    assert end is not None
    told = {
        "returned": "returned",
        "raised": f"raised {end.error_type}",
        "exited": f"left with exit status {end.exit_code}",
        "killed": f"was killed by {_signal_name(end.signal)}",
    }[end.how]
    said_already = (f"exited with status {end.exit_code}", told.removeprefix("was "))
    more = f": {end.message}" if end.message and end.message not in said_already else ""
    text = f"rank {ledger.rank} {told} {after}{more}"
    return Cause(rank=ledger.rank, text=text, error_type=end.error_type, site=end.site)


def _signal_name(number: int | None) -> str:
    known = number is not None and number in set(signal.Signals)
    return signal.Signals(number).name if known and number is not None else f"signal {number}"


def _crashes(scene: _Scene, found: Sequence[Finding]) -> list[Finding]:
    explained = {rank for finding in found for rank in finding.ranks}
    crashed = [rank for rank in scene.ended if _crashed(scene, rank, found) and rank not in explained]
    if not crashed:
        return []
    alike = _ended_alike([scene.ledgers[rank] for rank in crashed], len(scene.ledgers))
    causes = tuple(_cause_of_absence(scene.ledgers[rank], scene.liveness[rank]) for rank in crashed)
    text = "every rank ended with the same error" if alike else f"{name_ranks(crashed)} did not return"
    return [Finding(kind="crash_all" if alike else "crash_one", ranks=tuple(crashed), text=text, causes=causes)]


def _ended_alike(ledgers: Sequence[Ledger], world_size: int) -> bool:
    """Whether these are all the ranks, and all have ended with the same error at the same place."""
    ends = {ledger.end and (ledger.end.how, ledger.end.error_type, ledger.end.site) for ledger in ledgers}
    return len(ledgers) == world_size and len(ends) == 1 and None not in ends


def _crashed(scene: _Scene, rank: int, found: Sequence[Finding]) -> bool:
    ledger = scene.ledgers[rank]
    if ledger.end is None or ledger.end.how == "returned" or rank in scene.blocked:
        return False
    last = ledger.collectives[-1] if ledger.collectives else None
    return last is None or not _follows(last, found)


def _incomplete(scene: _Scene) -> list[Finding]:
    """A collective that all have joined and that yet holds them, where nothing that is recorded tells them apart."""
    if not scene.blocked or any(ledger.end is None and ledger.rank not in scene.blocked for ledger in scene.ledgers):
        return []
    first = min(scene.blocked.values(), key=lambda record: record.started_ns)
    ranks = tuple(r for r, other in scene.blocked.items() if (other.group, other.seq) == (first.group, first.seq))
    if any(_timed_out(scene.ledgers[rank]) for rank in ranks):
        return [_too_late(scene, first, ranks)]
    return [
        Finding(
            kind="mismatch",
            ranks=ranks,
            op=first.op,
            seq=first.seq,
            group=first.group,
            step=first.step,
            waiting_ranks=ranks,
            text=f"{tell(first, scene.ledgers)} does not complete, though all have come: what they bring to it does "
            "not fit",
            causes=tuple(_brings(rank, scene.blocked[rank]) for rank in ranks),
        )
    ]


def _timed_out(ledger: Ledger) -> bool:
    return ledger.end is not None and any(word in ledger.end.message for word in ("Timed out", "timed out"))


def _too_late(scene: _Scene, first: Record, ranks: Sequence[int]) -> Finding:
    """All have come, and the last of them when others had given up."""
    late = max(ranks, key=lambda rank: scene.blocked[rank].started_ns)
    after_s = (scene.blocked[late].started_ns - first.started_ns) / 1e9
    text = f"rank {late} came to {tell(first, scene.ledgers)} {after_s:,.1f} s after the first, which had timed out"
    return Finding(
        kind="stall",
        ranks=(late,),
        op=first.op,
        seq=first.seq,
        group=first.group,
        step=first.step,
        waiting_ranks=tuple(rank for rank in ranks if rank != late),
        text=f"{tell(first, scene.ledgers)} timed out before all had come",
        causes=(Cause(rank=late, text=text, site=scene.blocked[late].site),),
    )


def _brings(rank: int, record: Record) -> Cause:
    return Cause(rank=rank, text=f"rank {rank} brings {record.dtype} {record.shape}", site=record.site)


def _shortfalls(scene: _Scene) -> list[Finding]:
    """Ranks that returned like their peers and yet did less: no pass in silence."""
    counts = [{name: len(ledger.in_group(name)) for name in ledger.groups} for ledger in scene.ledgers]
    for group, members in {n: m for ledger in scene.ledgers for n, m in ledger.groups.items()}.items():
        most = max(counts[rank].get(group, 0) for rank in members)
        short = tuple(rank for rank in members if counts[rank].get(group, 0) < most)
        if short:
            return [_explain_shortfall(scene, group, short, most)]
    return _fewer_checks(scene)


def _explain_shortfall(scene: _Scene, group: str, short: tuple[int, ...], most: int) -> Finding:
    fullest = next(ledger for ledger in scene.ledgers if len(ledger.in_group(group)) == most)
    first = min(len(scene.ledgers[rank].in_group(group)) for rank in short) + 1
    missed = fullest.in_group(group)[first - 1]
    return Finding(
        kind="mismatch",
        ranks=short,
        op=missed.op,
        seq=first,
        group=group,
        step=missed.step,
        text=f"{tell(missed, scene.ledgers)} went without {name_ranks(short)}, and nothing waited",
        causes=tuple(_cause_of_absence(scene.ledgers[rank], scene.liveness[rank]) for rank in short),
    )


def _fewer_checks(scene: _Scene) -> list[Finding]:
    most = max(ledger.checks for ledger in scene.ledgers)
    short = tuple(ledger.rank for ledger in scene.ledgers if ledger.checks < most)
    text = f"{name_ranks(short)} checked less than the {most} results that their peers checked"
    causes = tuple(
        Cause(rank=r, text=f"rank {r} returned after {scene.ledgers[r].checks} checks of {most}") for r in short
    )
    return [Finding(kind="mismatch", ranks=short, text=text, causes=causes)] if short else []


def _with_decision(finding: Finding, divergences: Sequence[Divergence]) -> Finding:
    """Add what the ranks at fault had decided otherwise than their peers, up to the place where it broke."""
    told = [c for d in divergences for c in d.causes() if c.rank in finding.ranks and _is_before(d, finding)]
    return (
        finding
        if finding.kind == "diverge"
        else replace(finding, causes=(*finding.causes, *told[: len(finding.ranks)]))
    )


def _is_before(divergence: Divergence, finding: Finding) -> bool:
    return finding.seq is None or divergence.issued < finding.seq + 1


def _with_pending(finding: Finding, ledgers: Sequence[Ledger]) -> Finding:
    """Add the errors that were on their way out of the ranks at fault when they called what does not fit."""
    causes = [cause for rank in finding.ranks for cause in _pending(finding, ledgers[rank])]
    return replace(finding, causes=(*finding.causes, *causes)) if causes else finding


def _pending(finding: Finding, ledger: Ledger) -> Iterator[Cause]:
    for mark in ledger.marks:
        called = ledger.collectives[mark.issued : mark.issued + 1]
        if mark.name == PENDING and called and (called[0].group, called[0].seq) == (finding.group, finding.seq):
            error_type, message, site = mark.value
            text = f"rank {ledger.rank} calls {called[0].op} while {error_type} is on its way out: {message}"
            yield Cause(rank=ledger.rank, text=text, error_type=error_type, site=site)
