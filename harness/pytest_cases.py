"""Case files as tests: pytest collects `*.tpbed.json`, given on its command line or found in its folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tpbed.harness.session_ranks import ranks_of
from tpbed.tp.errors import TestbedError

SUFFIX = ".tpbed.json"


class CaseFailed(Exception):
    """The run of a case did not pass; the message is its report."""


class CaseFile(pytest.File):
    """A file that holds one case."""

    def collect(self) -> Iterator[pytest.Item]:
        """The one test."""
        yield CaseItem.from_parent(self, name=self.path.name.removesuffix(SUFFIX))


class CaseItem(pytest.Item):
    """A case: it passes where exactly the findings show that its scenario expects."""

    def runtest(self) -> None:
        """Run the plan in the world that --tp-world names, and judge it."""
        from tpbed.harness.case import load_case
        from tpbed.harness.report import render
        from tpbed.harness.runner import run_plan, worlds_of

        plan, world = load_case(self.path).plan, str(self.config.getoption("--tp-world"))
        if world not in worlds_of(plan):
            pytest.skip(f"{world} cannot express it: give --tp-world {' or '.join(worlds_of(plan))}")
        verdict = run_plan(ranks_of(self.config).world(world, plan.scenario.world_size), plan)
        if verdict.status != "PASS":
            raise CaseFailed(render(verdict))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *args: Any, **options: Any) -> Any:
        """The report or the one line on a file that cannot be read; a bug of tpbed with its traceback."""
        if isinstance(excinfo.value, CaseFailed | TestbedError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, *args, **options)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """What the test is called in headings."""
        return self.path, None, f"case {self.name}"
