"""ranks_of: the ranks of a pytest session, made when a test first asks for them; loads pytest alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tpbed.harness.ranks import Ranks

_RANKS = pytest.StashKey["Ranks"]()


def ranks_of(config: pytest.Config) -> Ranks:
    """The warm worlds that all tests of this session share."""
    if _RANKS not in config.stash:
        from tpbed.harness.ranks import Ranks

        config.stash[_RANKS] = Ranks(default_world=config.getoption("--tp-world"))
    return config.stash[_RANKS]


def close_ranks(config: pytest.Config) -> None:
    """End them, if there are any."""
    ranks = config.stash.get(_RANKS, None)
    if ranks is not None:
        ranks.close()
