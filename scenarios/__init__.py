"""CATALOGUE: every scenario by name. A name that is used twice stops the import."""

from tpbed.harness.scenario import Scenario, ScenarioError
from tpbed.scenarios import (
    adapters,
    checker,
    collectives,
    decisions,
    divergence,
    drafting,
    geometry,
    hang,
    healthy,
    kernels,
    lifecycle,
    lifecycle_start,
    loading,
    mismatch,
    quantized,
    real,
    schedule,
    slow,
    ties,
)

CATALOGUE: dict[str, Scenario] = {}
for _file in (
    hang,
    healthy,
    geometry,
    mismatch,
    decisions,
    drafting,
    collectives,
    divergence,
    ties,
    kernels,
    quantized,
    loading,
    slow,
    schedule,
    lifecycle,
    lifecycle_start,
    checker,
    adapters,
    real,
):
    for _scenario in _file.SCENARIOS:
        if _scenario.name in CATALOGUE:
            raise ScenarioError(f"two scenarios are named {_scenario.name}: give one of them another name.")
        CATALOGUE[_scenario.name] = _scenario
