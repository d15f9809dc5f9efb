"""Benchmarks: what they time is what they say, however long it takes."""

from tpbed.harness import bench


def test_the_bare_side_computes_what_the_ranks_compute(monkeypatch):
    """The ratio compares like with like: the gathered columns and the merge are the selector's own."""
    sides = {}
    monkeypatch.setattr(bench, "_in_turn", lambda name, above, below, pairs: sides.update(above=above, below=below))
    merged = []
    monkeypatch.setattr(bench, "merge_gathered", lambda values, ids, k: merged.append((values, ids, k)))
    bench.bench_speed(world_size=2, pairs=1)
    sides["above"]()
    assert [(values.shape, ids.shape, k) for values, ids, k in merged] == [((4, 32), (4, 32), 16)] * 2
    run = sides["below"]()
    assert [ledger.end.how for ledger in run.ledgers] == ["returned", "returned"]
    assert [record.shape for record in run.ledgers[0].collectives] == [(4, 16), (4, 16)]


def test_a_hang_is_a_hang_and_the_healthy_side_is_healthy(monkeypatch):
    sides = {}
    monkeypatch.setattr(bench, "_in_turn", lambda name, above, below, pairs: sides.update(above=above, below=below))
    bench.bench_hang(world_size=2)
    assert sides["above"]().stuck == (0,)
    assert sides["below"]().stuck == ()


def test_ratios_are_taken_pair_by_pair(monkeypatch):
    times = iter([1.0, 2.0, 3.0, 4.0, 8.0, 2.0])
    monkeypatch.setattr(bench, "_timed_ms", lambda call: next(times))
    ratio = bench._in_turn("a / b", lambda: None, lambda: None, 3)
    assert (ratio.least, ratio.median, ratio.greatest) == (0.5, 0.75, 4.0)
    assert (ratio.numerator_ms, ratio.denominator_ms) == (3.0, 2.0)
