"""The catalogue on real processes over gloo: the same findings, ranks and places as in the simulated world."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from test_catalogue import simulate

from tpbed.harness.findings import Finding
from tpbed.harness.plan import make_plan
from tpbed.harness.program import rank_program
from tpbed.harness.record import RunRecord
from tpbed.harness.verdict import Verdict, judge
from tpbed.harness.worlds import open_world
from tpbed.scenarios import CATALOGUE
from tpbed.tp.world import World

pytestmark = pytest.mark.xdist_group("ray")
ON_GLOO = sorted((s for s in CATALOGUE.values() if "gloo" in s.worlds), key=lambda s: s.world_size)


@pytest.fixture(scope="module")
def world_of() -> Iterator[Callable[[int], World]]:
    """One world at a time, kept while its size is asked for."""
    opened: list[World] = []

    def of(world_size: int) -> World:
        if not opened or opened[0].world_size != world_size:
            while opened:
                opened.pop().close()
            opened.append(open_world("gloo", world_size))
        return opened[0]

    yield of
    while opened:
        opened.pop().close()


def places(verdict: Verdict) -> list[tuple[object, ...]]:
    def key(finding: Finding) -> tuple[object, ...]:
        return finding.kind, finding.ranks, finding.op, finding.seq, finding.group, finding.step

    return [key(finding) for finding in verdict.findings]


@pytest.mark.parametrize("name", [scenario.name for scenario in ON_GLOO])
def test_real_processes_show_what_simulated_ranks_show(name, world_of):
    scenario = CATALOGUE[name]
    plan = make_plan(scenario, seed=7)
    run = world_of(scenario.world_size).run(rank_program(plan), stall_after_s=scenario.stall_after_s)
    verdict = judge(RunRecord.of(plan, run, elapsed_s=0.0))
    assert verdict.status == "PASS", (verdict.unexpected, verdict.not_found, verdict.doubts)
    if "sim" in scenario.worlds:
        assert places(verdict) == places(judge(simulate(name)))
