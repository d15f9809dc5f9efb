"""SELECTORS: the selectors that are right, and those that are wrong on purpose; MUTANTS: all that is wrong, by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from tpbed.harness import mutant_heads, mutant_programs, mutant_selectors, mutant_topks
from tpbed.harness.scenario import EVERYWHERE, Scenario, WorldName
from tpbed.harness.staged import Broadcast, Selector, Staged, TrustsTopK
from tpbed.harness.timed import TIMED
from tpbed.selector.select import compute_candidates

Family = Literal["selector", "topk", "head", "program"]
Fields = Mapping[str, Any]  # of a Scenario

RIGHT: dict[str, Selector | type[Staged]] = {
    "tpbed": compute_candidates,
    "packed": partial(compute_candidates, merge="packed"),
    "agreed": partial(compute_candidates, admission="agreed"),
    "full-gather": partial(compute_candidates, merge="full_gather"),
    "staged": Staged,
    "trusts-top-k": TrustsTopK,
    "broadcast": Broadcast,
}
SELECTORS: dict[str, Selector | type[Staged]] = {**RIGHT, **mutant_selectors.SELECTORS, **mutant_programs.PROGRAMS}
EVEN = {"widths": None, "added_vocab_size": 0}  # take-by-sender counts ids by equal shares
TIMED_CONTROLS = {
    "drop-late-peers": "await-late-peers",
    "capture-when-warm": "capture-when-all-warm",
    "take-as-they-come": "take-by-sender",
}
WRONG_IN_TIME = {name: TIMED[name] for name in TIMED_CONTROLS}
TIMED_NEEDS = {name: {"selector": control, **EVEN} for name, control in TIMED_CONTROLS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One thing that is wrong on purpose, as what it changes in a scenario in which nothing is.

    needs: what else a scenario must say for the change to count, with the right thing in its place, which stays right.
    """

    name: str  # family/name
    about: str
    change: Fields
    needs: Fields
    worlds: tuple[WorldName, ...] = EVERYWHERE  # where it is sure to show; simulated ranks alone can follow an order

    @property
    def family(self) -> str:
        """What is wrong: a selector, a top-k, a head or a rank program."""
        return self.name.partition("/")[0]

    def control(self, scenario: Scenario) -> Scenario:
        """The scenario with all that the mutant needs, and nothing wrong in it."""
        return replace(scenario, **self.needs)

    def planted(self, scenario: Scenario) -> Scenario:
        """The control with the one change."""
        return replace(self.control(scenario), **self.change)


def first_line(thing: Any) -> str:
    """Of its docstring."""
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def _mutants(
    family: Family, things: Mapping[str, Any], what: str, all_need: Fields, needs: Mapping[str, Fields]
) -> dict[str, Mutant]:
    return {
        f"{family}/{name}": Mutant(
            name=f"{family}/{name}",
            about=first_line(thing),
            change={what: name},
            needs={**all_need, **needs.get(name, {})},
            worlds=("sim",) if name in TIMED_CONTROLS else EVERYWHERE,
        )
        for name, thing in things.items()
    }


MUTANTS: dict[str, Mutant] = {
    **_mutants("selector", mutant_selectors.SELECTORS, "selector", {"selector": "staged"}, mutant_selectors.NEEDS),
    **_mutants("topk", mutant_topks.TOPKS, "topk", mutant_topks.ALL_NEED, mutant_topks.NEEDS),
    **_mutants("head", mutant_heads.HEADS, "head_change", {"selector": "tpbed"}, mutant_heads.NEEDS),
    **_mutants("program", mutant_programs.PROGRAMS, "selector", {"selector": "staged"}, mutant_programs.NEEDS),
    **_mutants("program", WRONG_IN_TIME, "selector", {}, TIMED_NEEDS),
}
