"""Properties: what must hold of every run of a plan, each a named function; some compare it with further runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, nan
from typing import Any, Protocol

import numpy as np

from tpbed.harness.checks import Answer, answers_by_step, check_candidates, check_ranks_agree
from tpbed.harness.fault_oracle import Outlook, Root, foresee
from tpbed.harness.faults import FIRED, describe
from tpbed.harness.findings import Finding, name_ranks
from tpbed.harness.inputs import build_shard
from tpbed.harness.plan import Plan, PropertyName
from tpbed.harness.program import rank_program
from tpbed.harness.record import RunRecord
from tpbed.harness.scenario import Scenario
from tpbed.harness.schedules import following
from tpbed.harness.verdict import Status, Verdict, judge
from tpbed.selector.quantized import FORMATS
from tpbed.tp.simulated import SimulatedWorld

KEPT = 8  # records, so that properties of one plan share its run


class Runner(Protocol):
    """How a plan is run."""

    def __call__(self, plan: Plan) -> RunRecord: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """A property that a plan breaks. plan: of the run that shows it. findings: what the judgement said of it."""

    name: PropertyName
    text: str  # what was expected, and what came out
    plan: Plan
    findings: tuple[Finding, ...] = ()


class Simulator:
    """Runs plans on simulated ranks; a world for each size, kept warm, and the records of the last few plans."""

    def __init__(self) -> None:
        self._worlds: dict[int, SimulatedWorld] = {}
        self._records: dict[Plan, RunRecord] = {}
        self.runs = 0

    def __call__(self, plan: Plan) -> RunRecord:
        """The record of the plan's run; the same one for a plan that was among the last."""
        if plan not in self._records:
            if len(self._records) == KEPT:
                del self._records[next(iter(self._records))]
            self._records[plan] = self._run(plan)
        return self._records[plan]

    def _run(self, plan: Plan) -> RunRecord:
        self.runs += 1
        world = self._worlds.setdefault(plan.scenario.world_size, SimulatedWorld(plan.scenario.world_size))
        with following(world, plan.schedule or f"seed:{plan.seed}"):
            return RunRecord.of(plan, world.run(rank_program(plan)), elapsed_s=0.0)


Property = Callable[[Plan, Runner], list[Breach]]
Judge = Callable[[RunRecord], Verdict]


def no_finding(plan: Plan, run: Runner) -> list[Breach]:
    """A run without faults hangs nowhere, ends on every rank, and leaves no doubt."""
    record = run(plan)
    verdict = judge(record, checks=())
    told = [*verdict.doubts, *(_told(finding) for finding in verdict.findings)]
    return [Breach(name="no_finding", text=text, plan=plan, findings=verdict.findings) for text in told[:1]]


def ranks_agree(plan: Plan, run: Runner) -> list[Breach]:
    """All ranks hold the same ids and the same bits of the values."""
    record = run(plan)
    found = check_ranks_agree(record, answers_by_step(record))
    return [Breach(name="ranks_agree", text=_told(finding), plan=plan, findings=(finding,)) for finding in found]


def right_tokens(plan: Plan, run: Runner) -> list[Breach]:
    """Ids are tokens of the org vocabulary, none twice; they are the best, with the values that the reference has."""
    return _against_reference(plan, run, "right_tokens", "wrong_ids")


def right_order(plan: Plan, run: Runner) -> list[Breach]:
    """Candidates come in the order of the stated rule: value descending, ties as Scenario.ties says."""
    return _against_reference(plan, run, "right_order", "order")


def _against_reference(plan: Plan, run: Runner, name: PropertyName, kind: str) -> list[Breach]:
    record = run(plan)
    found = [one for one in check_candidates(record, answers_by_step(record)) if one.kind == kind]
    return [Breach(name=name, text=_told(finding), plan=plan, findings=(finding,)) for finding in found]


def masked_columns_never_win(plan: Plan, run: Runner) -> list[Breach]:
    """The answer is the same whatever padding rows of a dense head hold: zeros, infinities, NaN, or large numbers."""
    if plan.scenario.head in FORMATS or not _has_padding(plan.scenario):
        return []
    fills = [fill for fill in (0.0, 2.0**14, inf, nan) if repr(fill) != repr(plan.scenario.pad_fill)]
    others = (_with(plan, pad_fill=fill) for fill in fills)
    told = "with {0.scenario.pad_fill} in the padding of the head, not {1.scenario.pad_fill}"
    return _first_difference("masked_columns_never_win", plan, others, run, told, range(plan.scenario.rows))


def _has_padding(scenario: Scenario) -> bool:
    shards = (build_shard(scenario, rank) for rank in range(scenario.world_size))
    return any(shard.num_org + shard.num_added < shard.width for shard in shards)


def tp_invariant(plan: Plan, run: Runner) -> list[Breach]:
    """The same answer at TP=1, where logits do not depend on how the product is shared out."""
    if plan.scenario.world_size == 1 or not has_exact_logits(plan):
        return []
    whole = _with(plan, world_size=1, widths=None, pad_to=1)
    told = "at TP=1, not {1.scenario.world_size}"
    return _first_difference("tp_invariant", plan, [whole], run, told, range(plan.scenario.rows))


def row_invariant(plan: Plan, run: Runner) -> list[Breach]:
    """Each row has the same answer when it stands alone, and all of them when they stand the other way round."""
    rows = plan.scenario.rows
    if rows < 2 or not has_exact_logits(plan):
        return []
    orders = [tuple(reversed(range(rows))), *((row,) for row in range(rows))]
    breaches = (
        _first_difference("row_invariant", plan, [show_rows(plan, order)], run, f"with rows {list(order)} alone", order)
        for order in orders
    )
    return next((found for found in breaches if found), [])


def show_rows(plan: Plan, order: tuple[int, ...]) -> Plan:
    """The plan with these of its rows, in this order, with what was planted in them."""
    planted = tuple(
        replace(one, row=place) for place, row in enumerate(order) for one in plan.scenario.overwrites if one.row == row
    )
    return replace(_with(plan, overwrites=planted), row_order=order)


def shard_order_invariant(plan: Plan, run: Runner) -> list[Breach]:
    """The same answer when the ranks hold each other's shards.

    Not of a full gather, which takes the ids of tokens from the order of ranks.
    """
    ranks = tuple(range(plan.scenario.world_size))
    if len(ranks) == 1 or plan.scenario.selector == "full-gather" or not has_exact_logits(plan):
        return []
    others = [replace(plan, shard_order=order) for order in dict.fromkeys((ranks[::-1], (*ranks[1:], ranks[0])))]
    told = "with the shards {0.shard_order} on the ranks, not their own"
    return _first_difference("shard_order_invariant", plan, others, run, told, range(plan.scenario.rows))


def faults_diagnosed(plan: Plan, run: Runner, judged: Judge | None = None) -> list[Breach]:
    """Every planned fault that strikes is named with the right root cause, and nobody is that has done nothing.

    judged: another one than judge, for its mutants.
    """
    record = run(plan)
    outlook = foresee(plan, empty_waits=record.world == "sim")
    found = (judged or judge)(record).findings
    told = [*_fired_otherwise(record, outlook), *_not_named(outlook, found), *_named_wrongly(outlook, found)]
    return [Breach(name="faults_diagnosed", text=text, plan=plan, findings=found) for text in told]


def _fired_otherwise(record: RunRecord, outlook: Outlook) -> Iterator[str]:
    fired = {mark.value for ledger in record.ledgers for mark in ledger.marks if mark.name == FIRED}
    for index, fault in enumerate(record.plan.scenario.faults):
        if (index in outlook.fired) > (index in fired):
            yield f"the fault `{describe(fault)}` was to strike, and did not"
        if (index in outlook.fired) < (index in fired) and not outlook.open_end:
            yield f"the fault `{describe(fault)}` was not to strike, and did"


def _not_named(outlook: Outlook, found: Sequence[Finding]) -> Iterator[str]:
    for root in outlook.roots:
        if not any(_names(finding, root) for finding in found):
            at = "" if root.seq is None else f" at seq {root.seq}"
            says = f" saying {root.says!r}" if root.says else ""
            yield f"{' or '.join(root.kinds)} of rank {root.rank}{at}{says} was expected; found: {_all_told(found)}"


def _names(finding: Finding, root: Root) -> bool:
    said = any(root.says in cause.text and (cause.rank == root.rank) for cause in finding.causes)
    named = root.rank in finding.ranks and (said or not root.says)
    return (
        finding.kind in root.kinds
        and (root.seq is None or finding.seq in (None, root.seq))
        and (named or not root.certain)
    )


def _named_wrongly(outlook: Outlook, found: Sequence[Finding]) -> Iterator[str]:
    for finding in found:
        innocent = sorted(set(finding.ranks) - outlook.culprits)
        if finding.kind in ("wrong_ids", "order"):
            if not outlook.spoilt:
                yield f"no data was spoilt; found: {_told(finding)}"
        elif innocent and not _is_excused(outlook, finding):
            yield f"{name_ranks(innocent)} did nothing; found: {_told(finding)}"


def _is_excused(outlook: Outlook, finding: Finding) -> bool:
    """Whether the innocent may be named: beside a culprit on mixed-up data, or where nothing tells them apart."""
    doubtful = {root.seq for root in outlook.roots if not root.certain}
    beside = outlook.open_end and bool(set(finding.ranks) & outlook.culprits)
    return beside or finding.seq in doubtful or None in doubtful


def _all_told(found: Sequence[Finding]) -> str:
    return "; ".join(map(_told, found)) or "nothing"


OF_FAULTLESS_RUNS: dict[PropertyName, Property] = {
    "no_finding": no_finding,
    "ranks_agree": ranks_agree,
    "right_tokens": right_tokens,
    "right_order": right_order,
    "masked_columns_never_win": masked_columns_never_win,
    "tp_invariant": tp_invariant,
    "row_invariant": row_invariant,
    "shard_order_invariant": shard_order_invariant,
}
OF_FAULTED_RUNS: dict[PropertyName, Property] = {"faults_diagnosed": faults_diagnosed}
PROPERTIES = OF_FAULTLESS_RUNS | OF_FAULTED_RUNS


def judge_property(verdict: Verdict) -> Verdict:
    """The verdict on a run whose plan must hold a property; runs that it is compared with are simulated here.

    What faults come to is for the property alone: the scenario need not expect it.
    """
    record = verdict.record
    plan = record.plan
    if not plan.must_hold or record.error:
        return verdict
    simulator = Simulator()
    breaches = PROPERTIES[plan.must_hold](plan, lambda other: record if other == plan else simulator(other))
    broken = tuple(breach.text for breach in breaches)
    if plan.must_hold in OF_FAULTED_RUNS:
        verdict = replace(verdict, status="PASS", unexpected=(), not_found=(), doubts=())
    status: Status = "FAIL" if broken else verdict.status
    return replace(verdict, status=status, broken=broken)


def has_exact_logits(plan: Plan) -> bool:
    """Whether every logit is one product, rounded: the same bits however the head is shared and rows are batched."""
    return plan.scenario.logits not in ("gaussian", "smollm2")


def _with(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, scenario=replace(plan.scenario, **changes))


def _first_difference(
    name: PropertyName,
    plan: Plan,
    others: Iterator[Plan] | list[Plan],
    run: Runner,
    told: str,
    order: range | tuple[int, ...],
) -> list[Breach]:
    """The first of the other runs that answers differently. order: the rows of the plan's that the others show."""
    usual = _answers(run(plan))
    for other in others:
        text = _difference(usual, _answers(run(other)), plan, list(order))
        if text:
            return [Breach(name=name, text=f"{told.format(other, plan)}: {text}", plan=other)]
    return []


def _answers(record: RunRecord) -> dict[int, Answer]:
    """What the first rank with an answer holds, by step; that the others agree is another property."""
    return {step: answers[min(answers)] for step, answers in answers_by_step(record).items()}


def _difference(usual: dict[int, Answer], other: dict[int, Answer], plan: Plan, order: list[int]) -> str:
    """How the answers to the same rows differ; where the choice among ties is open, ties may."""
    if usual.keys() != other.keys():
        return f"steps {sorted(other)} were answered, not {sorted(usual)}"
    for step, theirs in other.items():
        ours = usual[step]
        if len(ours.ids) != plan.scenario.rows:
            return f"step {step} has {len(ours.ids)} rows, not {plan.scenario.rows}"
        if ours.ids[order].shape != theirs.ids.shape:
            return f"step {step} has {theirs.ids.shape} candidates, not {ours.ids[order].shape}"
        rows = zip(order, ours.ids[order], ours.values[order], theirs.ids, theirs.values, strict=True)
        for row, ids, values, other_ids, other_values in rows:
            if values.tobytes() != other_values.tobytes() or not _same_ids(ids, other_ids, values, plan):
                return (
                    f"step {step}, row {row}: ids {other_ids.tolist()} with values {other_values.tolist()}, "
                    f"not {ids.tolist()} with {values.tolist()}"
                )
    return ""


def _same_ids(ids: np.ndarray, other: np.ndarray, values: np.ndarray, plan: Plan) -> bool:
    if plan.scenario.ties == "canonical":
        return bool((ids == other).all())
    certain = values > values[-1]  # among those that tie with the last, any may have been left out
    return sorted(ids[certain]) == sorted(other[certain])


def _told(finding: Finding) -> str:
    causes = "; ".join(cause.text for cause in finding.causes)
    return f"{finding.kind}: {finding.text}" + (f" ({causes})" if causes else "")
