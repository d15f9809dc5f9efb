"""The catalogue in the simulated world: every scenario shows exactly what it claims, every check earns its place."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from tpbed.harness.checks import CHECKS
from tpbed.harness.faults import describe
from tpbed.harness.mutants import RIGHT, SELECTORS
from tpbed.harness.plan import make_plan
from tpbed.harness.program import rank_program
from tpbed.harness.record import RunRecord
from tpbed.harness.scenario import KINDS
from tpbed.harness.schedules import following
from tpbed.harness.verdict import judge
from tpbed.harness.worlds import open_world
from tpbed.scenarios import CATALOGUE

SIMULATED = [scenario for scenario in CATALOGUE.values() if "sim" in scenario.worlds]


@cache
def simulate(name: str, seed: int = 7) -> RunRecord:
    scenario = CATALOGUE[name]
    plan = make_plan(scenario, seed=seed)
    with open_world("sim", scenario.world_size) as world, following(world, plan.schedule):
        return RunRecord.of(plan, world.run(rank_program(plan)), elapsed_s=0.0)


@pytest.mark.parametrize("name", [scenario.name for scenario in SIMULATED])
def test_every_scenario_shows_what_it_claims(name):
    verdict = judge(simulate(name))
    assert verdict.status == "PASS", (verdict.unexpected, verdict.not_found, verdict.doubts)


@pytest.mark.parametrize("seed", range(3))
def test_findings_do_not_depend_on_the_seed(seed):
    """Other weights, states and permutations: the same findings."""
    names = [s.name for s in SIMULATED if not s.name.startswith("real/")]
    assert [n for n in names if judge(simulate(n, seed)).status != "PASS"] == []


@pytest.mark.parametrize("left_out", CHECKS, ids=lambda check: check.__name__)
def test_a_check_that_is_left_out_is_missed_by_some_scenario(left_out):
    """A check that no selector breaks is not a check."""
    rest = [check for check in CHECKS if check is not left_out]
    names = [s.name for s in SIMULATED if s.expect and not s.name.startswith("real/")]
    assert any(judge(simulate(name), checks=rest).status == "FAIL" for name in names)


def test_every_selector_that_is_wrong_on_purpose_is_caught_where_the_catalogue_uses_it():
    """That all others are, too, is what `tpbed mutants` shows."""
    everywhere, caught = {s.selector for s in CATALOGUE.values()}, {s.selector for s in CATALOGUE.values() if s.expect}
    assert everywhere & set(SELECTORS) - caught <= set(RIGHT)
    assert {"packed", "full-gather"} <= {s.selector for s in CATALOGUE.values() if not s.expect}


UNSERVABLE = {  # no selector can answer these, since vocabulary, format and k do not go together
    "geometry/k-beyond-vocabulary",
    "geometry/k-beyond-vocabulary-unchecked",
    "geometry/vocabulary-that-cannot-be-shared",
    "quantized/block-cut-by-a-rank",
    "loading/blocks-from-own-row",
    "loading/groups-that-do-not-divide",
    "adapters/sglang-k-above-vocabulary",
    "adapters/vllm-k-above-vocabulary",
}


@pytest.mark.parametrize("name", [scenario.name for scenario in CATALOGUE.values() if scenario.expect])
def test_what_goes_wrong_goes_right_without_its_faults_with_a_right_selector_and_top_k(name):
    """The negative control of every scenario: what it finds is of its fault, its selector or its top-k alone."""
    right = {"faults": (), "selector": "tpbed", "topk": "canonical", "schedule": ""}
    plan = make_plan(replace(CATALOGUE[name], **right), seed=7)
    with open_world("sim", plan.scenario.world_size) as world:
        verdict = judge(RunRecord.of(plan, world.run(rank_program(plan)), elapsed_s=0.0))
    assert [finding.kind for finding in verdict.findings] == (["crash_all"] if name in UNSERVABLE else [])
    assert not verdict.doubts


def test_a_scenario_whose_fault_never_fires_is_undecided():
    scenario = CATALOGUE["hang/one-rank-raises"]
    record = simulate("healthy/tp4-padded-tail")
    moved = replace(record, plan=replace(record.plan, scenario=scenario))
    verdict = judge(moved)
    assert verdict.status == "UNDECIDED" and describe(scenario.faults[0]) in verdict.doubts[0]


def test_the_catalogue_has_every_kind_of_trouble_and_controls_without_any():
    assert {s.kind for s in CATALOGUE.values()} == set(KINDS)


def test_every_scenario_claims_something_and_trouble_names_its_source():
    assert [s.name for s in CATALOGUE.values() if not s.claim.endswith(".")] == []
    assert [s.name for s in CATALOGUE.values() if s.kind and not s.source] == []
    assert [s.name for s in CATALOGUE.values() if bool(s.kind) != bool(s.expect)] == []
