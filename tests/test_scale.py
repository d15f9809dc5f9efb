"""Scale: what is timed is what is said, memory is the peak of each case, and growth is told from a straight line."""

import pytest
import torch
import torch.distributed as dist

from tpbed.harness import scale
from tpbed.harness.scale import ScaleError, ScalePoint, bench_scale, growths, sizes_up_to
from tpbed.tp.simulated import SimulatedWorld


def point(world_size, least_us, case="start"):
    return ScalePoint(
        case=case,
        world_size=world_size,
        least_us=least_us,
        median_us=0.0,
        ratio=1.0,
        peak_mib=0.0,
        peak_kib_per_rank=0.0,
    )


class Watched(SimulatedWorld):
    """Keeps what it ran."""

    def run(self, program, **how):
        self.last = super().run(program, **how)
        return self.last


def test_every_case_is_measured_at_every_size_smallest_first():
    told = []
    found = [(p.world_size, p.case) for p in bench_scale((4, 2), at_least_s=0, on_progress=told.append)]
    assert found == [(size, case) for size in (2, 4) for case in ("start", "all_reduce", "all_gather", "hang")]
    assert told == ["measuring 2 ranks", "measuring 4 ranks"]


@pytest.mark.parametrize(
    ("case", "ops"), [("start", []), ("all_reduce", ["all_reduce"]), ("all_gather", ["all_gather"])]
)
def test_a_case_runs_what_its_name_says(case, ops):
    world = Watched(3)
    assert scale._CASES[case](world) > 0
    for ledger in world.last.ledgers:
        found = {record.op.replace("_into_tensor", "").replace("_single", "") for record in ledger.collectives}
        assert (sorted(found), len(ledger.collectives)) == (ops, (scale.CALLS + 1) * len(ops))
    assert world.last.stuck == ()


def test_the_hang_is_one_that_the_world_proved():
    world = Watched(3)
    scale._CASES["hang"](world)
    assert (world.last.stuck, world.last.proof_ms is not None) == ((0, 1), True)


def test_a_collective_is_timed_without_the_start_and_the_end_of_its_run(monkeypatch):
    """The clock, which here counts calls, is read from the end of the first collective to the end of the last."""
    called, read = [], []
    monkeypatch.setattr(scale, "CALLS", 4)
    monkeypatch.setattr(scale, "perf_counter", lambda: read.append(len(called)) or len(called))

    def call():
        called.append(dist.get_rank())
        dist.all_reduce(torch.ones(1))

    assert scale._call_s(call, SimulatedWorld(2)) == 2.0  # of two ranks
    assert (len(called), len(read), read[0], read[-1]) == (10, 4, 2, 10)


def test_times_are_for_each_rank_and_ratios_to_the_smallest_world(monkeypatch):
    seconds = iter([1.0, 3.0, 2.0, 6.0, 6.0, 12.0])
    monkeypatch.setattr(scale, "_CASES", {"start": lambda world: next(seconds)})
    small, large = bench_scale((2, 4), at_least_s=0)
    assert (small.least_us, small.median_us, small.ratio) == (0.5e6, 1e6, 1.0)
    assert (large.least_us, large.median_us, large.ratio) == (1.5e6, 1.5e6, 3.0)


def test_memory_is_the_peak_of_the_case_alone_and_is_shared_out_among_ranks(monkeypatch):
    sizes = iter([0, 64, 0] + [0, 0, 0])  # MiB that a run holds for a moment
    monkeypatch.setattr(scale, "_CASES", {"start": lambda world: len(bytearray(next(sizes) << 20)) or 1.0})
    large, small = bench_scale((2, 2), at_least_s=0)
    assert 60 < large.peak_mib < 80
    assert large.peak_kib_per_rank == large.peak_mib * 1024 / 2
    assert small.peak_mib < 16


def test_sizes_are_powers_of_two_and_the_largest_itself():
    assert sizes_up_to(1024) == (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    assert sizes_up_to(48) == (2, 4, 8, 16, 32, 48)
    with pytest.raises(ScaleError, match="up to 3 ranks there is nothing to compare: give 4 or more"):
        sizes_up_to(3)


def test_growth_leaves_small_worlds_out_and_is_the_slope_of_a_straight_line():
    costs = [(2, 900.0), (4, 900.0), (8, 10.0), (16, 20.0), (32, 40.0)]
    (growth,) = growths([point(*cost) for cost in costs])
    assert (growth.from_ranks, growth.to_ranks, growth.factor) == (8, 32, 4.0)
    assert growth.slope == pytest.approx(1.0)
    assert str(growth) == "start: cost per rank grows by x4.00 from 8 to 32 ranks (log-log slope +1.00)"


def test_growth_is_told_of_each_case_and_of_small_worlds_where_there_are_no_others():
    found = growths([point(2, 5.0), point(2, 1.0, "hang"), point(4, 5.0), point(4, 2.0, "hang")])
    assert [(g.case, g.from_ranks, g.to_ranks, g.factor) for g in found] == [("start", 2, 4, 1.0), ("hang", 2, 4, 2.0)]
