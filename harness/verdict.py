"""judge: a RunRecord in, a Verdict out - PASS, FAIL or UNDECIDED, with the findings behind it."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tpbed.harness.checks import CHECKS, Answers, Check, answers_by_step
from tpbed.harness.diagnose import Diagnosis, diagnose
from tpbed.harness.faults import FIRED, describe
from tpbed.harness.findings import Cause, Finding, name_ranks
from tpbed.harness.record import RunRecord
from tpbed.harness.scenario import Expected, Kind

Status = Literal["PASS", "FAIL", "UNDECIDED"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one run showed. PASS: exactly the findings that its scenario expects, and the property that must hold does.

    broken: what was expected of that property, and what came.
    """

    record: RunRecord
    status: Status
    findings: tuple[Finding, ...]
    unexpected: tuple[Finding, ...] = ()
    not_found: tuple[Expected, ...] = ()
    doubts: tuple[str, ...] = ()  # why the run proves nothing
    broken: tuple[str, ...] = ()


def judge(record: RunRecord, *, checks: Sequence[Check] = CHECKS, diagnosis: Diagnosis = diagnose) -> Verdict:
    """Find what went wrong in a run and compare it with what its scenario expects.

    UNDECIDED where a planned fault did not fire, a check crashed or evidence is missing: never a pass in silence.
    diagnosis: another one than diagnose, for its mutants.
    Answers from the first broken step on are not checked: they are consequences of a finding that stands already.
    """
    if record.error:
        return Verdict(record=record, status="UNDECIDED", findings=(), doubts=(record.error,))
    diagnosed = diagnosis(record.ledgers, record.liveness)
    steps = _sound_steps(record, diagnosed)
    checked, crashes = _run_checks(record, steps, checks)
    consequent = any(finding.waiting_ranks or finding.kind == "mismatch" for finding in diagnosed)
    silent, silences = ([], []) if consequent else _silent_ends(record, diagnosed)
    findings = (*diagnosed, *silent, *checked)
    unexpected, not_found = _compare(findings, record.plan.scenario.expect)
    doubts = (*_doubts(record), *silences, *crashes)
    status: Status = "UNDECIDED" if doubts else "FAIL" if unexpected or not_found else "PASS"
    return Verdict(
        record=record,
        status=status,
        findings=findings,
        unexpected=unexpected,
        not_found=not_found,
        doubts=doubts,
    )


def _sound_steps(record: RunRecord, diagnosed: Sequence[Finding]) -> dict[int, Answers]:
    """The answers that no finding has spoilt: none from a mismatch on, none of a rank that left its peers waiting."""
    last = record.plan.scenario.steps
    broken = min((_step_of(f) for f in diagnosed if f.kind == "mismatch"), default=last)
    left = {rank: _step_of(f) for f in diagnosed if f.kind != "mismatch" for rank in f.ranks}
    return {
        step: kept
        for step, answers in answers_by_step(record).items()
        if step < broken and (kept := {rank: a for rank, a in answers.items() if step < left.get(rank, last)})
    }


def _step_of(finding: Finding) -> int:
    return int(finding.step) if finding.step else 0


def _run_checks(
    record: RunRecord, steps: dict[int, Answers], checks: Sequence[Check]
) -> tuple[list[Finding], list[str]]:
    findings: list[Finding] = []
    crashes: list[str] = []
    for check in checks:
        try:
            findings += check(record, steps)
        except Exception as error:  # noqa: BLE001 - whatever it is, the run proves nothing
            crashes.append(f"{check.__name__} crashed: {''.join(traceback.format_exception(error)).strip()}")
    return findings, crashes


def _compare(
    findings: Sequence[Finding], expected: Sequence[Expected]
) -> tuple[tuple[Finding, ...], tuple[Expected, ...]]:
    open_ones = list(expected)
    unexpected = []
    for finding in findings:
        match = next((one for one in open_ones if finding.matches(one)), None)
        if match is None:
            unexpected.append(finding)
        else:
            open_ones.remove(match)
    return tuple(unexpected), tuple(open_ones)


def _doubts(record: RunRecord) -> list[str]:
    fired = {mark.value for ledger in record.ledgers for mark in ledger.marks if mark.name == FIRED}
    missed = [f for index, f in enumerate(record.plan.scenario.faults) if index not in fired]
    doubts = [f"the planned fault `{describe(fault)}` never fired" for fault in missed]
    doubts += [f"the ledger of rank {one.rank} is cut short" for one in record.ledgers if one.truncated]
    return doubts


def _silent_ends(record: RunRecord, found: Sequence[Finding]) -> tuple[list[Finding], list[str]]:
    """Ranks that did not give every answer though nothing says why: a finding if they returned, else a doubt."""
    explained = {rank for finding in found for rank in finding.ranks}
    steps, answers = record.plan.scenario.steps, answers_by_step(record)
    counts = {ledger.rank: sum(ledger.rank in by_rank for by_rank in answers.values()) for ledger in record.ledgers}
    short = [one for one in record.ledgers if counts[one.rank] != steps and one.rank not in explained]
    left = tuple(ledger.rank for ledger in short if ledger.end is not None and ledger.end.how == "returned")
    doubts = [f"rank {one.rank} has no end that explains its silence" for one in short if one.rank not in left]
    causes = tuple(Cause(rank=r, text=f"rank {r} returned and answered {counts[r]} of {steps} steps") for r in left)
    kind: Kind = "crash_all" if len(left) == len(record.ledgers) else "crash_one"
    text = f"{name_ranks(left)} returned before the end, and nobody waits"
    return [Finding(kind=kind, ranks=left, text=text, causes=causes)] if left else [], doubts
