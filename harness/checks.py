"""Checks: one function per property of the results - a RunRecord in, findings out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tpbed.harness.findings import Cause, Finding, name_ranks
from tpbed.harness.inputs import true_logits
from tpbed.harness.program import ANSWER
from tpbed.harness.record import RunRecord
from tpbed.harness.turn import BATCH
from tpbed.selector.reference import Discrepancy, explain_candidates


@dataclass(frozen=True, slots=True)
class Answer:
    """The candidates that one rank reported for one step: ids (rows, k) int64, values (rows, k) float32.

    has_values: a selector may give none; they are 0 then, and not judged.
    batch: how many of the step's rows it had, where its program decides that; None for all.
    """

    ids: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]
    has_values: bool = True
    batch: int | None = None

    def fingerprint(self) -> bytes:
        """The same for the same ids and the same bits of the values."""
        return repr((self.ids.shape, self.ids.tobytes(), self.values.tobytes())).encode()


Answers = dict[int, Answer]  # by rank


def answers_by_step(record: RunRecord) -> dict[int, Answers]:
    """What the ranks reported, by step and rank; a rank that did not get to a step is not in it."""
    steps: dict[int, Answers] = {}
    for ledger in record.ledgers:
        batches = {mark.step: mark.value for mark in ledger.marks if mark.name == BATCH}
        for mark in ledger.marks:
            if mark.name == ANSWER:
                answer = _answer(mark.value, batches.get(mark.step))
                steps.setdefault(int(mark.step), {})[ledger.rank] = answer
    return dict(sorted(steps.items()))


def _answer(value: dict[str, Any], batch: int | None) -> Answer:
    ids = np.array(value["ids"], dtype=np.int64).reshape(value["shape"])
    if value["values"] is None:
        return Answer(ids, np.zeros(ids.shape, dtype=np.float32), has_values=False, batch=batch)
    return Answer(ids, np.array(value["values"], dtype=np.float32).reshape(value["shape"]), batch=batch)


def check_ranks_agree(record: RunRecord, steps: dict[int, Answers]) -> list[Finding]:
    """diverge: ranks hold other ids, or other bits of a value, for the same step. Only the first such step counts."""
    for step, answers in steps.items():
        votes = Counter(answer.fingerprint() for answer in answers.values()).most_common()
        if len(votes) > 1:
            return [_explain_divergence(record, step, answers, votes)]
    return []


def _explain_divergence(record: RunRecord, step: int, answers: Answers, votes: Sequence[tuple[bytes, int]]) -> Finding:
    usual = _usual(record, step, answers, votes)
    odd = tuple(r for r, a in sorted(answers.items()) if usual is None or a.fingerprint() != usual.fingerprint())
    against = usual or answers[odd[0]]
    causes = tuple(Cause(rank=r, text=f"rank {r} holds {_first_difference(answers[r], against)}") for r in odd)
    text = f"{name_ranks(odd)} hold{'s' if len(odd) == 1 else ''} other candidates than the rest"
    if usual is None:
        text = "the ranks hold different candidates, and none of them has a majority or the reference on its side"
    return Finding(kind="diverge", ranks=odd, step=str(step), text=text, causes=causes)


def _usual(record: RunRecord, step: int, answers: Answers, votes: Sequence[tuple[bytes, int]]) -> Answer | None:
    """What the majority holds; where there is none, what the reference says is right."""
    by_print = {answer.fingerprint(): answer for answer in answers.values()}
    if votes[0][1] > votes[1][1]:
        return by_print[votes[0][0]]
    right = [answer for answer in by_print.values() if not _judge(record, step, answer)]
    return right[0] if len(right) == 1 else None


def _first_difference(answer: Answer, usual: Answer) -> str:
    if answer.ids.shape != usual.ids.shape:
        return f"{answer.ids.shape} candidates where the rest hold {usual.ids.shape}"
    differs = (answer.ids != usual.ids) | (answer.values.view(np.int32) != usual.values.view(np.int32))
    if not differs.any():
        return "the candidates shown for the others to differ from"
    row, slot = np.argwhere(differs)[0]
    here, there = (
        f"id {a.ids[row, slot]}" + (f" with value {a.values[row, slot]}" if a.has_values else "")
        for a in (answer, usual)
    )
    return f"{here} in row {row}, slot {slot}, where the rest hold {there}"


def check_candidates(record: RunRecord, steps: dict[int, Answers]) -> list[Finding]:
    """wrong_ids and order: the candidates that most ranks hold contradict the unsharded reference."""
    worst: dict[str, Finding] = {}
    for step, answers in steps.items():
        votes = Counter(answer.fingerprint() for answer in answers.values()).most_common()
        usual = next(answer for answer in answers.values() if answer.fingerprint() == votes[0][0])
        for discrepancy in _judge(record, step, usual):
            worst.setdefault(discrepancy.kind, _explain_discrepancy(record, step, discrepancy))
    return [worst["wrong_ids"]] if "wrong_ids" in worst else list(worst.values())


def _judge(record: RunRecord, step: int, answer: Answer) -> list[Discrepancy]:
    logits, bound = true_logits(record.plan, step)
    scenario = record.plan.scenario
    ids, values = torch.from_numpy(answer.ids), torch.from_numpy(answer.values) if answer.has_values else None
    rows = slice(answer.batch)
    return explain_candidates(ids, values, logits[rows], bound[rows], k=scenario.k, ties=scenario.ties)


def _explain_discrepancy(record: RunRecord, step: int, discrepancy: Discrepancy) -> Finding:
    rounding = (
        f"reference: float64, one product, rounding point {record.plan.scenario.head}; ties {record.plan.scenario.ties}"
    )
    text = f"step {step}, {discrepancy.message} ({rounding})"
    return Finding(kind=discrepancy.kind, ranks=(), step=str(step), text=text)


Check = Callable[[RunRecord, dict[int, Answers]], list[Finding]]
CHECKS: tuple[Check, ...] = (check_ranks_agree, check_candidates)
