"""make_plan: a scenario and a seed in, a Plan out; every random choice of a run is made here."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from tpbed.harness.scenario import Scenario, ScenarioError

PropertyName = Literal[
    "no_finding",
    "ranks_agree",
    "right_tokens",
    "right_order",
    "masked_columns_never_win",
    "tp_invariant",
    "row_invariant",
    "shard_order_invariant",
    "faults_diagnosed",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that a run depends on: the same plan gives every rank the same inputs and faults, wherever it runs."""

    scenario: Scenario
    seed: int
    weight_seed: int
    step_seeds: tuple[int, ...]  # one per step, for its hidden states
    schedule: str = ""  # as in Scenario; empty: what the world makes of the seed
    asked: tuple[str, ...] = ()  # the words after `tpbed run` that give this plan; none: the scenario's name and seed
    row_order: tuple[int, ...] = ()  # the rows that each step shows, of those it has; empty: all, as they come
    shard_order: tuple[int, ...] = ()  # whose shard each rank holds; empty: its own
    must_hold: PropertyName | Literal[""] = ""  # of tpbed.harness.properties; a run is judged by this one, too

    def __post_init__(self) -> None:
        scenario = self.scenario
        wrong = sorted({row for row in self.row_order if not 0 <= row < scenario.rows})
        if wrong:
            raise ScenarioError(f"{scenario.name}: row_order has {wrong}, and there are rows 0 to {scenario.rows - 1}.")
        if self.shard_order and sorted(self.shard_order) != list(range(scenario.world_size)):
            raise ScenarioError(
                f"{scenario.name}: shard_order={self.shard_order} of {scenario.world_size} ranks: name each rank once."
            )


def make_plan(scenario: Scenario, *, seed: int, schedule: str = "") -> Plan:
    """Draw the seeds of the weights and of every step.

    seed: any int; the same scenario and seed give the same plan. schedule: instead of the scenario's own.
    """
    draw = random.Random(f"{scenario.name}/{seed}")
    weight_seed = draw.getrandbits(31)
    return Plan(
        scenario=scenario,
        seed=seed,
        weight_seed=weight_seed,
        step_seeds=tuple(draw.getrandbits(31) for _ in range(scenario.steps)),
        schedule=schedule or scenario.schedule,
    )
