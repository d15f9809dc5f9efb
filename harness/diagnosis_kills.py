"""DiagnosisProber: diagnoses tried on runs with planned faults, on healthy ones, and with the culprit swapped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from tpbed.harness.diagnose import Diagnosis, diagnose
from tpbed.harness.fault_oracle import foresee
from tpbed.harness.plan import Plan
from tpbed.harness.properties import Runner, faults_diagnosed
from tpbed.harness.record import RunRecord
from tpbed.harness.swapped import gist, swap_ranks
from tpbed.harness.verdict import judge


class DiagnosisProber:
    """Judges the same runs again and again. What the right diagnosis finds is the control of all others."""

    def __init__(self, examples: Sequence[Plan], run: Runner) -> None:
        self._examples = [(plan, run(plan)) for plan in examples]
        self._right = [_killers(plan, record, diagnose) for plan, record in self._examples]

    def kills(self, diagnosis: Diagnosis) -> Iterator[frozenset[str]]:
        """By example: the checks that it does not pass, and that `diagnose` does."""
        for (plan, record), right in zip(self._examples, self._right, strict=True):
            yield _killers(plan, record, diagnosis) - right

    def false_alarms(self) -> Iterator[frozenset[str]]:
        """The checks that `diagnose` does not pass, by example."""
        return iter(self._right)


def _killers(plan: Plan, record: RunRecord, diagnosis: Diagnosis) -> frozenset[str]:
    checks = {
        "faults_diagnosed": bool(plan.scenario.faults)
        and bool(faults_diagnosed(plan, lambda _: record, partial(judge, diagnosis=diagnosis))),
        "no_false_alarm": not plan.scenario.faults and bool(diagnosis(record.ledgers, record.liveness)),
        "culprit_swapped": not tells_swapped_apart(plan, record, diagnosis),
    }
    return frozenset(name for name, killed in checks.items() if killed)


def tells_swapped_apart(plan: Plan, record: RunRecord, diagnosis: Diagnosis) -> bool:
    """Whether the other rank is named, and all else is told alike, once an innocent has changed places with a culprit.

    True where the plan has no culprit, or not each is sure to be told apart, or nobody is innocent.
    """
    outlook = foresee(plan, empty_waits=record.world == "sim")
    culprits = sorted({root.rank for root in outlook.roots}) if all(root.certain for root in outlook.roots) else []
    innocent = sorted(set(range(plan.scenario.world_size)) - outlook.culprits)
    if not culprits or not innocent:
        return True
    one, other = culprits[0], innocent[-1]
    found = diagnosis(record.ledgers, record.liveness)
    swapped = gist(diagnosis(*swap_ranks(record.ledgers, record.liveness, one, other)))
    return swapped == gist(found, {one: other, other: one}) and swapped != gist(found)
