"""choose_plans: the words and options of `tpbed run` in, the plans that they name out."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING

from tpbed.harness.faults import Fault, describe
from tpbed.harness.plan import Plan, make_plan
from tpbed.harness.scenario import Scenario
from tpbed.tp.errors import TestbedError

if TYPE_CHECKING:
    from tpbed.harness.case import Case

BASE_WORLD_SIZE = 4


class UsageError(TestbedError):
    """The command line asks for what there is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What a command line changes in the scenarios that it names. What must be found is then open: nothing is expected.

    faults: added to those of the scenario. selector: instead of the scenario's own.
    """

    faults: tuple[Fault, ...] = ()
    selector: str = ""

    def words(self) -> tuple[str, ...]:
        """The options that say so."""
        selector = ("--selector", self.selector) if self.selector else ()
        return (*selector, *(word for fault in self.faults for word in ("--fault", describe(fault))))

    def __bool__(self) -> bool:
        return bool(self.faults or self.selector)

    def of(self, plan: Plan) -> Plan:
        """The plan with the changes; ScenarioError for a fault on a rank that is not there."""
        if not self:
            return plan
        scenario = plan.scenario
        changed = replace(
            scenario,
            faults=(*scenario.faults, *self.faults),
            selector=self.selector or scenario.selector,
            expect=(),
        )
        asked = plan.asked or (scenario.name, "--seed", str(plan.seed))
        return replace(plan, scenario=changed, asked=(*asked, *self.words()))


def choose_plans(
    words: Sequence[str],
    catalogue: dict[str, Scenario],
    *,
    seed: int,
    schedule: str = "",
    tp: int | None = None,
    changes: Changes = Changes(),
) -> list[Plan]:
    """The plans of the scenarios and case files that `words` name.

    tp: only those of this world size. seed: of scenarios; a case has its own. schedule: instead of their own.
    Without a word: the whole catalogue; with a selector, the scenarios that a right one passes; with faults, a plain
    healthy run of `tp` ranks (4), which they befall.
    Raises UsageError or CaseError for a word that names nothing, ScenarioError for a fault that no rank can have.
    """
    if changes.faults and not words:
        return [changes.of(_base(seed, schedule, BASE_WORLD_SIZE if tp is None else tp))]
    files, names = [word for word in words if is_case_file(word)], [word for word in words if not is_case_file(word)]
    cases = [read_case(word).plan for word in files]
    chosen = _with_the_ranks(changes.faults, select(catalogue, names) if names or not files else [])
    if changes.selector and not words:
        chosen = [scenario for scenario in chosen if _is_open_to_any_selector(scenario)]
    found = [replace(plan, schedule=schedule or plan.schedule) for plan in cases]
    found += [make_plan(scenario, seed=seed, schedule=schedule) for scenario in chosen]
    kept = of_world_size([plan.scenario for plan in found], tp)
    return [changes.of(plan) for plan in found if plan.scenario in kept]


def _base(seed: int, schedule: str, world_size: int) -> Plan:
    scenario = Scenario(
        name="given/faults",
        claim="A plain healthy run, which the faults of the command line befall.",
        kind=0,
        world_size=world_size,
        pad_to=lcm(64, max(world_size, 1)),
    )
    asked = ("--tp", str(world_size), "--seed", str(seed))
    return replace(make_plan(scenario, seed=seed, schedule=schedule), asked=asked)


def _with_the_ranks(faults: Sequence[Fault], chosen: list[Scenario]) -> list[Scenario]:
    """Those that have the ranks which faults strike, if any has."""
    ranks = 1 + max((fault.rank for fault in faults), default=0)
    return [scenario for scenario in chosen if scenario.world_size >= ranks] or chosen


def _is_open_to_any_selector(scenario: Scenario) -> bool:
    """Whether only the selector can go wrong in it: no fault, no kernel that is off, no request that none can serve."""
    unshared = any(one.error in ("ShardError", "HeadError") for one in scenario.expect)
    refused = scenario.k > scenario.org_vocab_size or unshared
    return not scenario.faults and not scenario.schedule and scenario.topk in _USUAL_TOPKS and not refused


_USUAL_TOPKS = ("contract", "torch", "canonical", "default")  # and none of harness.kernels, each of which has a defect


def is_case_file(word: str) -> bool:
    """Whether a word of a command line means a file, and not scenarios, whose names have no dot."""
    return word.endswith(".json")


def read_case(word: str) -> Case:
    """The case in a file. Raises CaseError."""
    from tpbed.harness.case import load_case  # loads pydantic, which listing scenarios does not need

    return load_case(Path(word))


def read_faults(texts: Sequence[str]) -> tuple[Fault, ...]:
    """The faults that texts say. Raises FaultTextError."""
    if not texts:
        return ()
    from tpbed.harness.fault_text import read_fault

    return tuple(read_fault(text) for text in texts)


def select(catalogue: dict[str, Scenario], patterns: Sequence[str]) -> list[Scenario]:
    """The scenarios that match any pattern, in the order of the catalogue; all of them where there is no pattern.

    patterns: names, globs over whole names, or what stands before a slash.
    Raises UsageError for a pattern that matches nothing, and for an empty catalogue.
    """
    for pattern in patterns:
        if not any(matches(name, pattern) for name in catalogue):
            raise UsageError(
                f"no scenario matches {pattern!r}{_near(pattern, catalogue)}: `tpbed list` names all {len(catalogue)}."
            )
    if not catalogue:
        raise UsageError("the catalogue is empty: tpbed.scenarios names no scenario.")
    return [scenario for name, scenario in catalogue.items() if not patterns or any(matches(name, p) for p in patterns)]


def matches(name: str, pattern: str) -> bool:
    """Whether a name is meant: it matches the glob, or begins with the pattern and a slash."""
    return fnmatchcase(name, pattern) or name.startswith(pattern.rstrip("/") + "/")


def _near(given: str, catalogue: dict[str, Scenario]) -> str:
    """Names like a name, or folders like a glob, in brackets; empty where there are none."""
    leaves = {name.rpartition("/")[2]: name for name in catalogue}
    folders = {name.partition("/")[0]: f"{name.partition('/')[0]}/*" for name in catalogue}
    meant = {**leaves, **folders, **{name: name for name in catalogue}}
    near = difflib.get_close_matches(given, meant, n=3, cutoff=0.6)
    names = dict.fromkeys(meant[name] for name in near)
    return f" (near: {', '.join(names)})" if names else ""


def of_world_size(scenarios: list[Scenario], tp: int | None) -> list[Scenario]:
    """Those with this world size; all for None. Raises UsageError where there is none."""
    found = [scenario for scenario in scenarios if tp in (None, scenario.world_size)]
    if not found:
        sizes = sorted({scenario.world_size for scenario in scenarios})
        raise UsageError(f"no selected scenario has --tp {tp}: give one of {', '.join(map(str, sizes))}.")
    return found
