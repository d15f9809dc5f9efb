"""Soak's own arithmetic, and that it does not let a wrong finding pass; on simulated ranks, and without processes."""

import pytest

from tpbed.harness import soak as soaking
from tpbed.harness.soak import Footprint, SoakError, Spread, footprint, soak
from tpbed.tp.simulated import SimulatedWorld

HARMLESS = {kind: soaking.KINDS[kind] for kind in ("raises", "returns", "calls another op", "brings another size")}


@pytest.fixture
def harmless(monkeypatch):
    monkeypatch.setattr(soaking, "KINDS", HARMLESS)


def test_each_kind_has_its_turn_and_its_culprit_is_found(harmless):
    assert [cycle.kind for cycle in soak(SimulatedWorld(4), 8)] == [*HARMLESS, *HARMLESS]


def test_a_hang_that_is_not_found_ends_the_soak(harmless, monkeypatch):
    monkeypatch.setattr(soaking, "diagnose", lambda ledgers, liveness: ())
    with pytest.raises(SoakError, match="rank [0-3] raises, and found was: nothing"):
        next(soak(SimulatedWorld(4), 1))


def test_a_peer_that_is_blamed_beside_the_culprit_ends_the_soak(harmless, monkeypatch):
    def blame_all(ledgers, liveness):
        return tuple(finding for rank in range(4) for finding in [Blamed(rank)])

    class Blamed:
        kind = "hang"

        def __init__(self, rank):
            self.ranks = (rank,)

    monkeypatch.setattr(soaking, "diagnose", blame_all)
    with pytest.raises(SoakError, match=r"hang of ranks \(0,\); hang of ranks \(1,\)"):
        next(soak(SimulatedWorld(4), 1))


def test_a_finding_in_the_healthy_run_ends_the_soak(harmless, monkeypatch):
    monkeypatch.setattr(soaking, "healthy", lambda rank: soaking._raise())
    with pytest.raises(SoakError, match="a healthy run after a hang has findings"):
        next(soak(SimulatedWorld(4), 1))


def test_a_spread_counts_from_the_slow_end():
    assert Spread.of(list(range(1, 101))) == Spread(count=100, median=50.5, p99=100, worst=100)
    assert Spread.of([3.0]) == Spread(count=1, median=3.0, p99=3.0, worst=3.0)


def test_a_footprint_sees_an_open_file(tmp_path):
    before = footprint()
    with (tmp_path / "file").open("w"):
        assert (footprint() - before).descriptors == 1
    assert (footprint() - before) == Footprint(
        processes=0, descriptors=0, shared_files=0, resident_mib=pytest.approx(0, abs=50)
    )
