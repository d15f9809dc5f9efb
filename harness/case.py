"""Case: one run in a file - its whole plan, and a line on what it shows; `tpbed run FILE` and pytest replay it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from tpbed.harness.plan import Plan
from tpbed.harness.stored import load, save
from tpbed.tp.errors import TestbedError


class CaseError(TestbedError):
    """A file that is no case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan that is worth keeping. about: what it shows, in one line."""

    about: str
    plan: Plan


def save_case(case: Case, path: Path) -> None:
    """Write a case as JSON (NaN and infinities as JavaScript writes them); parents are created.

    Give it a name that ends in .tpbed.json, and pytest collects it as a test.
    """
    save(_adapter(), replace(case, plan=replace(case.plan, asked=())), path, indent=1)


def load_case(path: Path) -> Case:
    """Read what save_case wrote; what a report says of its plan will name the file.

    Raises CaseError for a file that is missing, cut short, or no case of this version: no field may be unknown.
    """
    advice = "Give a file that `tpbed fuzz` or save_case has written."
    case: Case = load(_adapter(), path, noun="case", advice=advice, error=CaseError, whole=True)
    steps, seeds = case.plan.scenario.steps, len(case.plan.step_seeds)
    if steps != seeds:
        raise CaseError(f"{path} is no case: it has {seeds} step_seeds, and steps={steps} need one each. {advice}")
    return replace(case, plan=replace(case.plan, asked=(str(path),)))


@cache
def _adapter() -> TypeAdapter[Any]:
    return TypeAdapter(Case)
