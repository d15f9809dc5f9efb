"""One world of four ranks for all tests here: starting it is the slow part."""

from collections.abc import Iterator

import pytest

from tpbed.tp.ray_world import RayWorld


@pytest.fixture(scope="session")
def world() -> Iterator[RayWorld]:
    with RayWorld(4) as world:
        yield world
