"""render: a Verdict in, a report out - as text for people, as JSON and JUnit for machines."""

from __future__ import annotations

import re
import shlex
import signal
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from xml.etree import ElementTree

from tpbed.harness.faults import FIRED, describe
from tpbed.harness.findings import Cause, Finding, name_group, name_ranks
from tpbed.harness.scenario import Expected
from tpbed.tp.ledger import CollectiveRecord, End, Ledger, MessageRecord
from tpbed.tp.world import Liveness

if TYPE_CHECKING:  # they need torch, and `tpbed show` needs only describe_expected
    from tpbed.harness.record import RunRecord
    from tpbed.harness.verdict import Verdict

WIDTH = 120  # columns
MAX_POSITIONS = 12  # rows of the table of ranks
MAX_RANKS = 24  # characters of a folded list of ranks
MAX_CAUSES = 8
FORMAT = 1  # of the JSON; goes up when a field is renamed, removed or changes its meaning
WORLD_OPTIONS = {"sim": "sim", "ray+gloo": "gloo", "ray+nccl": "nccl"}
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(verdict: Verdict, *, evidence: Path | None = None, full: bool | None = None) -> str:
    """The report of one run: verdict, then who, where, why, and how to see it again; 120 columns of plain text.

    evidence: where the record was saved, if it was.
    full: with the table of ranks and the footer; None leaves them out of a PASS, which still explains each finding.
    """
    whole = verdict.status != "PASS" if full is None else full
    lines = [
        row(verdict),
        *_explanations(
            verdict.findings, verdict.record, lines_each=6 if whole else 2, causes_each=MAX_CAUSES if whole else 2
        ),
    ]
    if whole:
        lines += [*_doubts(verdict), *_table(verdict.record), *_footer(verdict, evidence)]
    return "\n".join(lines)


class Observed(Protocol):
    """What a WorldRun and a RunRecord both hold."""

    @property
    def ledgers(self) -> tuple[Ledger, ...]: ...

    @property
    def liveness(self) -> tuple[Liveness, ...]: ...

    @property
    def proof_ms(self) -> float | None: ...


def explain(findings: Sequence[Finding], seen: Observed) -> str:
    """What went wrong in a run of any program: the findings with their causes, where the ranks were, and tracebacks.

    Of ranks at fault that raised alike only the first shows its traceback; tracebacks keep their layout.
    """
    told = [*_explanations(findings, seen, lines_each=6, causes_each=MAX_CAUSES), *_table(seen)]
    return "\n".join([*told, *_tracebacks(findings, seen.ledgers)])


def headline(findings: Sequence[Finding]) -> str:
    """The first finding in one line that begins with what and who: `hang: rank 2 raised RuntimeError ...`."""
    first = findings[0]
    ranks = f" of {name_ranks(first.ranks)}" if len(first.ranks) > 1 else ""
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    told = first.causes[0].text if first.causes else first.text
    return f"{first.kind}{ranks}{more}: {' '.join(told.split())}"


def _tracebacks(findings: Sequence[Finding], ledgers: Sequence[Ledger]) -> Iterator[str]:
    at_fault = dict.fromkeys(rank for finding in findings for rank in finding.ranks)
    ends = {rank: end for rank in at_fault if (end := ledgers[rank].end) is not None and end.traceback}
    first = {(end.error_type, end.site): rank for rank, end in reversed(ends.items())}
    for rank in sorted(first.values()):
        yield from (f"rank {rank}", ends[rank].traceback.rstrip())


def row(verdict: Verdict) -> str:
    """The verdict in one line."""
    record = verdict.record
    scenario = record.plan.scenario
    tokens = scenario.org_vocab_size + scenario.added_vocab_size
    ranks = f"{scenario.world_size} rank{'s' if scenario.world_size != 1 else ''}"
    told = f"{ranks}, {tokens} tokens, seed {record.plan.seed}, {_seconds(record.elapsed_s)}"
    return f"{verdict.status}  {scenario.name}  {record.world}  {told}"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 0.1 else f"{value * 1000:.0f} ms"


def again(record: RunRecord) -> str:
    """The command line that runs the plan of a record again."""
    world = WORLD_OPTIONS.get(record.world, record.world)
    plan = record.plan
    asked = plan.asked or (plan.scenario.name, "--seed", str(plan.seed))
    schedule = ["--schedule", plan.schedule] if plan.schedule != plan.scenario.schedule else []
    return shlex.join(["tpbed", "run", *asked, "--world", world, *schedule])


def describe_expected(expected: Expected) -> str:
    """An expected finding as a person would write it: `hang of rank 3 in all_gather seq 7`, without what is open."""
    parts: list[str] = [expected.kind]
    if expected.ranks is not None:
        parts.append(f"of {name_ranks(expected.ranks)}" if expected.ranks else "of no rank")
    parts += _place(expected.op, expected.seq)
    parts += [f"caused by {expected.error}"] if expected.error else []
    parts += [f"saying {expected.says!r}"] if expected.says else []
    return " ".join(parts)


def _place(op: str | None, seq: int | None) -> list[str]:
    told = " ".join([op or "", f"seq {seq}" if seq is not None else ""]).strip()
    return [f"in {told}"] if told else []


def _brief(finding: Finding) -> str:
    by = f"of {name_ranks(finding.ranks)}" if finding.ranks else ""
    return " ".join(filter(None, [finding.kind, by, *_place(finding.op, finding.seq)]))


def _explanations(findings: Sequence[Finding], seen: Observed, *, lines_each: int, causes_each: int) -> Iterator[str]:
    for finding in findings:
        yield from _wrap(finding.kind, _timing(finding, seen.proof_ms) + finding.text, lines_each)
        for cause in _explain_causes(finding.causes, causes_each):
            yield from _wrap("cause", cause, lines_each)


def _timing(finding: Finding, proof_ms: float | None) -> str:
    if proof_ms is None or finding.kind not in ("hang", "stall"):
        return ""
    known = "proved" if finding.kind == "hang" else "noticed"
    return f"{known} {_milliseconds(proof_ms)} after the last event: "


def _milliseconds(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 10 else f"{value:.1f} ms"


def _explain_causes(causes: Sequence[Cause], most: int) -> list[str]:
    """Each cause once, with the ranks that did alike; of those that are too many, the ranks."""
    alike: dict[tuple[str, str], list[Cause]] = {}
    for cause in causes:
        alike.setdefault((cause.text.removeprefix(f"rank {cause.rank} "), cause.site), []).append(cause)
    told = [
        _explain_cause(first) + (f"; {name_ranks([one.rank for one in others])} alike" if others else "")
        for first, *others in alike.values()
    ]
    hidden = {cause.rank for group in list(alike.values())[most:] for cause in group}
    return [*told[:most], *([f"and of {name_ranks(list(hidden))}"] if hidden else [])]


def _explain_cause(cause: Cause) -> str:
    return cause.text if not cause.site or cause.site in cause.text else f"{cause.text}  ({cause.site})"


def _wrap(label: str, text: str, max_lines: int) -> list[str]:
    return textwrap.wrap(
        re.sub(r"\s*\n\s*", " ", text),
        WIDTH,
        initial_indent=f"{label:<5} ",
        subsequent_indent=" " * 6,
        max_lines=max_lines,
        placeholder=" ...",
        break_on_hyphens=False,
    )


def _doubts(verdict: Verdict) -> Iterator[str]:
    for doubt in verdict.doubts:
        yield from _wrap("doubt", _headline(doubt), 6)
        for line in doubt.splitlines()[1:]:  # a traceback keeps its layout
            yield from textwrap.wrap(line, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 8)


def _headline(doubt: str) -> str:
    """A doubt in one line; one that carries a traceback is told by the error at the end of it."""
    first, _, rest = doubt.partition("\n")
    return first.replace("Traceback (most recent call last):", rest.rpartition("\n")[2] if rest else "")


Position = tuple[str, str, str]  # last completed, now, at


def positions(record: Observed) -> dict[Position, tuple[int, ...]]:
    """Where the ranks were when the run was over, and which ranks were there alike."""
    groups = {name for ledger in record.ledgers for name in ledger.groups}
    by_position: dict[Position, list[int]] = {}
    for ledger, seen in zip(record.ledgers, record.liveness, strict=True):
        by_position.setdefault(_position(ledger, seen, tell_group=len(groups) > 1), []).append(ledger.rank)
    return {position: tuple(ranks) for position, ranks in by_position.items()}


def _position(ledger: Ledger, seen: Liveness, *, tell_group: bool) -> Position:
    def name(record: CollectiveRecord | MessageRecord, before_seq: str = "") -> str:
        group = f" of {name_group(record.group, [ledger]).removeprefix('group ')}" if tell_group else ""
        return f"{record.op} {before_seq}{record.seq}{group}"

    completed = [r for r in ledger.collectives if r.state == "completed"]
    last = name(completed[-1], "seq ") if completed else "none"
    if ledger.end is not None:
        return last, _told_end(ledger, ledger.end, name), ledger.end.site
    waiting = ledger.waiting_in()
    frame = next((frame for frame in seen.frames if not frame.startswith("tp/")), "")
    if waiting is None:
        return last, f"{seen.state}: {seen.detail}" if seen.detail else seen.state, frame
    verb = "waiting" if seen.state in ("running", "unknown") else seen.state
    return last, f"{verb} in {name(waiting)}", waiting.site


def _told_end(ledger: Ledger, end: End, name: Callable[[CollectiveRecord], str]) -> str:
    last = ledger.collectives[-1] if ledger.collectives else None
    inside = f" in {name(last)}" if last and end.how != "returned" and last.state != "completed" else ""
    how = {"returned": "returned", "raised": f"raised {end.error_type}", "exited": f"exited, status {end.exit_code}"}
    return how.get(end.how, f"killed by {_signal(end.signal)}") + inside


def _signal(number: int | None) -> str:
    return next((known.name for known in signal.Signals if known == number), f"signal {number}")


def _table(record: Observed) -> Iterator[str]:
    found = list(positions(record).items())
    cells = [
        ("rank", "last completed", "now", "at"),
        *((_fold(ranks), *place) for place, ranks in found[:MAX_POSITIONS]),
    ]
    widths = [max(len(cell[column]) for cell in cells) for column in range(3)]
    for cell in cells:
        padded = "  ".join(text.ljust(width) for text, width in zip(cell, widths, strict=False))
        yield _shorten(f"  {padded}  {cell[3]}".rstrip())
    if len(found) > MAX_POSITIONS:
        others = sorted(rank for _, ranks in found[MAX_POSITIONS:] for rank in ranks)
        yield f"  and {len(others)} more ranks in {len(found) - MAX_POSITIONS} more places"


def _fold(ranks: tuple[int, ...]) -> str:
    text = name_ranks(ranks).partition(" ")[2]
    if len(text) <= MAX_RANKS:
        return text
    kept = text[: MAX_RANKS - 12].rpartition(", ")[0]
    return f"{kept}, ... ({len(ranks)} ranks)"


def _shorten(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 4]} ..."


def _footer(verdict: Verdict, evidence: Path | None) -> Iterator[str]:
    yield from _footer_lines("faults", [_told_fault(fault) for fault in _faults(verdict.record)] or ["none planned"])
    yield from _footer_lines("expected", _told_expected(verdict))
    yield from _footer_lines("evidence", _told_evidence(evidence))
    yield f"{'again':<10}{again(verdict.record)}"


def _told_evidence(evidence: Path | None) -> list[str]:
    if evidence is None:
        return ["not kept: run it again with --keep"]
    stacks = evidence.with_name("stacks")
    return [str(evidence), *([f"{stacks}/"] if stacks.is_dir() else [])]


def _footer_lines(label: str, entries: Iterable[str]) -> Iterator[str]:
    for number, entry in enumerate(entries):
        lead = f"{label if number == 0 else '':<10}"
        yield from textwrap.wrap(
            entry,
            WIDTH,
            initial_indent=lead,
            subsequent_indent=" " * 10,
            break_long_words=False,
            break_on_hyphens=False,
        )


def _faults(record: RunRecord) -> list[dict[str, Any]]:
    marks = [mark.value for ledger in record.ledgers for mark in ledger.marks if mark.name == FIRED]
    faults = record.plan.scenario.faults
    return [{"fault": describe(fault), "fired": marks.count(index)} for index, fault in enumerate(faults)]


def _told_fault(fault: dict[str, Any]) -> str:
    times = {0: "did not fire", 1: "fired"}.get(fault["fired"], f"fired {fault['fired']} times")
    return f"{fault['fault']} - {times}"


def _told_expected(verdict: Verdict) -> Iterator[str]:
    missed = list(verdict.not_found)
    for one in verdict.record.plan.scenario.expect:
        was_missed = one in missed
        if was_missed:
            missed.remove(one)
        yield f"{describe_expected(one)} - {'not found' if was_missed else 'found'}"
    name = verdict.record.plan.must_hold
    if not verdict.record.plan.scenario.expect and name != "faults_diagnosed":
        yield "no finding"
    yield from (f"not this: {_brief(finding)}" for finding in verdict.unexpected)
    if name:
        yield f"{name} - {_told_property(verdict)}"


def _told_property(verdict: Verdict) -> str:
    """Whether it holds, and why not, if no finding has said so above."""
    if not verdict.broken:
        return "holds"
    news = [text for text in verdict.broken if not any(finding.text in text for finding in verdict.unexpected)]
    return "; ".join(["does not hold", *news])


def to_json(verdict: Verdict, *, evidence: Path | None = None) -> dict[str, Any]:
    """The verdict as plain values that JSON can hold; a field keeps its name and meaning within a format."""
    record = verdict.record
    scenario = record.plan.scenario
    return {
        "type": "verdict",
        "format": FORMAT,
        "status": verdict.status,
        "scenario": scenario.name,
        "world": record.world,
        "world_size": scenario.world_size,
        "tokens": scenario.org_vocab_size + scenario.added_vocab_size,
        "seed": record.plan.seed,
        "schedule": record.plan.schedule,
        "elapsed_s": round(record.elapsed_s, 6),
        "proof_ms": record.proof_ms,
        "recovery_ms": record.recovery_ms,
        "replaced": list(record.replaced),
        "culprits": culprits(verdict),
        "findings": [_finding_json(finding, verdict) for finding in verdict.findings],
        "expected": [describe_expected(one) for one in scenario.expect],
        "not_found": [describe_expected(one) for one in verdict.not_found],
        "must_hold": record.plan.must_hold,
        "broken": list(verdict.broken),
        "doubts": list(verdict.doubts),
        "faults": _faults(record),
        "ranks": [position_json(*entry) for entry in positions(record).items()],
        "torch_version": record.torch_version,
        "evidence": str(evidence) if evidence else None,
        "again": again(record),
    }


def culprits(verdict: Verdict) -> list[int]:
    """The ranks at fault in any finding."""
    return sorted({rank for finding in verdict.findings for rank in finding.ranks})


def _finding_json(finding: Finding, verdict: Verdict) -> dict[str, Any]:
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(finding).items()}
    return {**plain, "expected": finding not in verdict.unexpected}


def position_json(place: Position, ranks: tuple[int, ...]) -> dict[str, Any]:
    """A row of the table of ranks."""
    return {"ranks": list(ranks), "last_completed": place[0], "now": place[1], "at": place[2]}


def to_junit(verdicts: Sequence[Verdict], not_run: Sequence[tuple[str, str]] = ()) -> str:
    """The verdicts as JUnit XML of the xunit2 family; UNDECIDED is an error, a scenario that was not run is skipped.

    not_run: name and reason of the scenarios that this world could not run.
    """
    count = {"failures": "FAIL", "errors": "UNDECIDED"}
    suite = ElementTree.Element("testsuite", name="tpbed", tests=str(len(verdicts) + len(not_run)))
    suite.attrib.update({name: str(sum(v.status == status for v in verdicts)) for name, status in count.items()})
    suite.set("skipped", str(len(not_run)))
    suite.set("time", f"{sum(verdict.record.elapsed_s for verdict in verdicts):.3f}")
    for verdict in verdicts:
        _add_verdict(suite, verdict)
    for name, why in not_run:
        ElementTree.SubElement(_add_case(suite, name, 0.0), "skipped", message=_clean(why))
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add_verdict(suite: ElementTree.Element, verdict: Verdict) -> None:
    case = _add_case(suite, verdict.record.plan.scenario.name, verdict.record.elapsed_s)
    properties = ElementTree.SubElement(case, "properties")
    for name, value in _properties(verdict).items():
        ElementTree.SubElement(properties, "property", name=name, value=_clean(value))
    if verdict.status != "PASS":
        tag = "failure" if verdict.status == "FAIL" else "error"
        ElementTree.SubElement(case, tag, message=_clean(_summary(verdict))).text = _clean(render(verdict))


def _add_case(suite: ElementTree.Element, name: str, elapsed_s: float) -> ElementTree.Element:
    folder, _, leaf = name.rpartition("/")
    return ElementTree.SubElement(
        suite, "testcase", classname=f"tpbed.{folder}".rstrip("."), name=leaf, time=f"{elapsed_s:.3f}"
    )


def _properties(verdict: Verdict) -> dict[str, str]:
    record = verdict.record
    proof = "" if record.proof_ms is None else f"{record.proof_ms:.3f}"
    return {
        "verdict": verdict.status,
        "fault": "; ".join(describe(fault) for fault in record.plan.scenario.faults),
        "seed": str(record.plan.seed),
        "culprit": ",".join(map(str, culprits(verdict))),
        "proof_ms": proof,
        "world_size": str(record.plan.scenario.world_size),
        "backend": record.world,
    }


def _summary(verdict: Verdict) -> str:
    told = [_headline(doubt) for doubt in verdict.doubts]
    told += [f"unexpected: {_brief(finding)}" for finding in verdict.unexpected]
    told += [f"not found: {describe_expected(one)}" for one in verdict.not_found]
    told += [f"{verdict.record.plan.must_hold}: {text}" for text in verdict.broken]
    return "; ".join(told)


def _clean(text: str) -> str:
    return _NOT_XML.sub("?", text)
