"""describe_plan: a plan in, sentences out that say what is run, what is planted in it and what goes wrong."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from tpbed.harness.faults import Fault, describe
from tpbed.harness.inputs import held_shard
from tpbed.harness.plan import Plan
from tpbed.harness.scenario import Logits, Scenario

LOGITS: dict[Logits, str] = {
    "distinct": "all logits of a row differ",
    "negative": "all logits of a row differ, and are below zero",
    "tied": "logits are tied in groups of four",
    "equal": "all logits are equal",
    "gaussian": "weights and hidden states are Gaussian",
    "smollm2": "weights and hidden states are those of SmolLM2",
}


def describe_plan(plan: Plan) -> list[str]:
    """A sentence or two for each: the geometry, the request, the logits, what is planted, the faults, the order."""
    scenario = plan.scenario
    return [
        _geometry(plan),
        _request(scenario),
        _logits(scenario),
        *_planted(scenario),
        *_faults(scenario),
        *_order(plan),
    ]


def count(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _geometry(plan: Plan) -> str:
    scenario = plan.scenario
    shards = [held_shard(plan, rank) for rank in range(scenario.world_size)]
    added = f" and {count(scenario.added_vocab_size, 'added token')}" if scenario.added_vocab_size else ""
    tokens = f"{count(scenario.org_vocab_size, 'token')}{added}"
    if len(shards) == 1:
        return f"One rank holds {tokens} in {count(shards[0].width, 'column')}."
    held = ", ".join(f"rank {rank} {shard.num_org} in {shard.width}" for rank, shard in enumerate(shards))
    return f"{scenario.world_size} ranks share {tokens}. Real tokens in columns: {held}."


def _request(scenario: Scenario) -> str:
    asked = f"{count(scenario.rows, 'row')}, k={scenario.k}, {count(scenario.steps, 'step')}"
    return f"The selector {scenario.selector} with the top-k {scenario.topk} is asked for {asked}."


def _logits(scenario: Scenario) -> str:
    padding = "" if scenario.pad_fill == 0 else f"; its padding holds {scenario.pad_fill}"
    return f"The head is {scenario.head}{padding}; {LOGITS[scenario.logits]}."


def _planted(scenario: Scenario) -> Iterator[str]:
    places = [f"token {one.token_id} of row {one.row} has the logit {one.value}" for one in scenario.overwrites]
    if places:
        yield f"Planted: {', '.join(places)}."


def _faults(scenario: Scenario) -> Iterator[str]:
    for fault in scenario.faults:
        yield f"Fault {describe(fault)}: {_what(fault)}"


def _what(fault: Fault) -> str:
    """What the fault does, as its class says in its first sentence."""
    return " ".join((inspect.getdoc(type(fault)) or "").split("\n\n")[0].split())


def _order(plan: Plan) -> Iterator[str]:
    fields: dict[str, Any] = {"rows": plan.row_order, "shards": plan.shard_order}
    for name, order in fields.items():
        if order:
            yield f"The {name} come in the order {', '.join(map(str, order))}."
    if plan.schedule:
        yield f"Ranks take turns as {plan.schedule} says."
