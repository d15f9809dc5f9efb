"""What must be found in a run with planned faults, told from the plan alone: ranks as abstract machines, in lockstep."""

from __future__ import annotations

from dataclasses import dataclass

from tpbed.harness.inputs import build_shard
from tpbed.harness.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCall:
    """A collective that a healthy rank issues: all_gather, in the default group."""

    step: int
    dtype: str
    shape: tuple[int, ...]


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
_BALLOT = (512,)
_LOGITS = {"fp32": "float32", "fp16": "float16"}


def _planned(kind: str, step: int, scenario: Scenario) -> PlannedCall:
    if kind == "uint8":
        return PlannedCall(step=step, dtype=kind, shape=_BALLOT)
    if kind == "logits":
        width = build_shard(scenario, 0).num_org_padded
        return PlannedCall(step=step, dtype=_LOGITS.get(scenario.head, "bfloat16"), shape=(scenario.rows, width))
    return PlannedCall(step=step, dtype=kind, shape=(scenario.rows, scenario.k))
