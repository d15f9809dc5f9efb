"""Every kind of hang on real processes, in turn on the same ranks: found, its culprit alone blamed, and got over."""

import pytest

from tpbed.harness.soak import KINDS, rate, soak

pytestmark = pytest.mark.xdist_group("ray")


def test_every_kind_of_hang_is_found_and_the_same_world_goes_on(world):
    cycles = list(soak(world, len(KINDS), seed=3))
    assert [cycle.kind for cycle in cycles] == list(KINDS)
    died = {"exits with os._exit", "is killed", "crashes in C", "is stopped", "holds the GIL"}
    assert {cycle.kind for cycle in cycles if cycle.replaced} == died


def test_rates_are_of_the_same_step(world):
    by_run, by_loop = rate(world, 20)
    assert by_run > 0 and by_loop > 0
