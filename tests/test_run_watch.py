"""RunWatch: when a run is over, told from readings alone, with a clock that the test moves."""

import itertools
from collections.abc import Sequence

import pytest

from tpbed.tp.blackbox import end_event, format_event
from tpbed.tp.reading import Reading, Threads
from tpbed.tp.run_watch import FORM_S, RunWatch

OUTSIDE, ARRIVED = ("rendezvous", "outside"), ("rendezvous", "arrived")
GROUP = ("group", "world", [0, 1])


def threads(**did: object) -> Threads:
    """Of a rank that sleeps, but for what it did."""
    return Threads(**({"main_slices": 5, "busy_ns": 1000, "main_runnable": False, "runnable": False} | did))


def joined(seq: int, op: str = "barrier"):
    """The rank issues a collective and waits in it."""
    return ("start", "world", seq, op, "", [], [], 0, "", None, "a.py:1 f", True, "started", seq)


def done(seq: int):
    return ("state", "world", seq, "completed", "", seq)


class Bench:
    """Two ranks, read by hand."""

    def __init__(self, stall_after_s: float = 10.0) -> None:
        self.now = 100.0
        self.watch = RunWatch(2, stall_after_s, self.now)
        self.counts = [0, 0]
        self.event_at = [self.now, self.now]

    def read(self, rank: int, *events: Sequence[object], ended: bool = False, **how: object) -> None:
        """The supervisor of `rank` answers; the events happened just now."""
        self.counts[rank] += len(events)
        if events:
            self.event_at[rank] = self.now
        fields = {"count": self.counts[rank], "truncated": False, "stopped": False, "threads": None} | how
        quiet_ns = int((self.now - self.event_at[rank]) * 1e9)
        reading = Reading(events=b"".join(map(format_event, events)), quiet_ns=quiet_ns, **fields)
        if ended:
            self.watch.deliver(rank, reading, self.now)
        else:
            self.watch.read(rank, reading, self.now)

    def judge(self, after_s: float = 0.001) -> bool:
        self.now += after_s
        return self.watch.judge(self.now)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def end(how: str = "raised"):
    return end_event(how=how, error_type="ValueError", message="m")


def test_a_run_is_over_when_all_ranks_have_ended(bench):
    bench.read(0, GROUP, end("returned"), ended=True)
    assert not bench.judge()
    bench.read(1, GROUP, end("returned"), ended=True)
    assert bench.judge()
    assert bench.watch.stuck == () and bench.watch.proof_ms is None


def test_a_rank_that_waits_for_one_that_raised_is_proved_stuck_at_the_second_look(bench):
    bench.read(0, GROUP, joined(1))
    bench.read(1, GROUP, end(), ended=True)
    assert not bench.judge(0.002)
    bench.read(0)
    assert bench.judge(0.003)
    assert bench.watch.stuck == (0,) and bench.watch.proof_ms == pytest.approx(5.0)
    assert [look.state for look in bench.watch.liveness({0: ("f",)})] == ["running", "ended"]


def test_a_proof_that_changes_is_no_proof(bench):
    bench.read(0, GROUP, joined(1))
    bench.read(1, GROUP, end(), ended=True)
    bench.judge()
    bench.read(0, done(1), joined(2))
    assert not bench.judge()
    bench.read(0)
    assert bench.judge()


def test_a_rank_that_computes_is_waited_for(bench):
    bench.read(0, GROUP, joined(1))
    bench.read(1, GROUP)
    assert not any(bench.judge(1.0) for _ in range(9))


def test_a_rank_that_said_its_end_and_not_its_result_is_waited_for(bench):
    bench.read(0, GROUP, joined(1))
    bench.read(1, GROUP, end("returned"))
    assert not bench.judge() and not bench.judge()


def test_after_a_death_peers_get_time_to_fail_by_themselves(bench):
    bench.read(0, GROUP, joined(1))
    bench.read(1, GROUP, end("killed"), ended=True)
    assert not bench.judge() and not bench.judge(0.01)
    assert bench.judge(0.02)
    assert bench.watch.liveness({})[1].state == "dead"


def test_ranks_that_all_joined_and_do_nothing_are_stuck(bench):
    for rank in (0, 1):
        bench.read(rank, GROUP, joined(1))
    looks = 0
    while not bench.judge(bench.watch.look_s):
        assert bench.watch.look_deep
        looks += 1
        for rank in (0, 1):
            bench.read(rank, threads=threads(runnable=looks % 2 == 0, busy_ns=looks))  # gloo looks around
    assert bench.watch.stuck == (0, 1) and looks >= 5 and 100 < bench.watch.proof_ms < 200


@pytest.mark.parametrize(("op", "least_ms", "most_ms"), [("all_reduce", 25, 90), ("barrier", 100, 200)])
def test_ranks_whose_ledgers_contradict_each_other_need_be_idle_for_a_quarter_of_the_time(bench, op, least_ms, most_ms):
    bench.read(0, GROUP, joined(1, op))
    bench.read(1, GROUP, joined(1))
    while not bench.judge(bench.watch.look_s):
        for rank in (0, 1):
            bench.read(rank, threads=threads())
    assert bench.watch.stuck == (0, 1) and least_ms < bench.watch.proof_ms < most_ms


@pytest.mark.parametrize(
    "busy",
    [
        lambda look: threads(main_slices=look),
        lambda look: threads(busy_ns=look * 5_000_000),
        lambda look: threads(main_runnable=True, runnable=True),
        lambda look: threads(runnable=True),
        lambda look: None,
    ],
)
def test_ranks_that_work_in_a_collective_are_left_until_the_deadline(bench, busy):
    for rank in (0, 1):
        bench.read(rank, GROUP, joined(1))
    began = bench.now
    for look in itertools.count():
        if bench.judge(0.05):
            break
        bench.read(0, threads=threads())
        bench.read(1, threads=busy(look))
    assert bench.now - began >= 10.0


def test_a_rank_without_progress_outside_a_collective_stalls_at_the_deadline(bench):
    bench.read(0, GROUP, joined(1))
    bench.read(1, GROUP)
    assert not bench.judge(9.9) and not bench.judge(0.2)
    assert bench.judge()
    assert bench.watch.stuck == (0, 1)
    assert [look.state for look in bench.watch.liveness({})] == ["running", "stalled"]


def test_a_stopped_rank_counts_from_when_it_was_seen_stopped():
    bench = Bench(stall_after_s=1.0)
    bench.read(0, GROUP, joined(1))
    bench.read(1, GROUP, joined(1))
    assert not bench.judge(5.0 - 4.5)
    bench.read(1, stopped=True)
    assert not bench.judge(0.5)
    bench.read(1, stopped=False)
    assert not bench.judge(0.6)
    bench.read(1, stopped=True)
    bench.judge(1.1)
    for _ in range(200):
        bench.read(0, threads=threads())
        bench.read(1, stopped=True)
        if bench.judge(0.05):
            break
    assert bench.watch.liveness({})[1].state == "stopped" and bench.watch.stuck == (0, 1)


def test_a_rank_that_is_quiet_and_stopped_is_called_stopped(bench):
    bench.read(0, GROUP, joined(1))
    bench.read(1, GROUP)
    bench.now += 10.1
    bench.read(1, stopped=True)
    assert not bench.judge() and bench.judge()
    assert [look.state for look in bench.watch.liveness({})] == ["running", "stopped"]


def test_a_truncated_ledger_proves_nothing():
    bench = Bench(stall_after_s=1.0)
    bench.read(0, GROUP, joined(1), truncated=True)
    bench.read(1, GROUP, end(), ended=True)
    assert not bench.judge() and not bench.judge(0.9)
    bench.judge(0.2)
    assert bench.judge() and bench.watch.liveness({})[0].state == "stalled"


def test_forming_the_group_is_no_stall_but_has_an_end():
    bench = Bench(stall_after_s=0.1)
    bench.read(0)
    bench.read(1)
    assert not bench.judge(FORM_S - 1) and not bench.judge(2)
    assert bench.judge()
    assert "rank 0, 1 missing" in bench.watch.liveness({})[0].detail


def test_ranks_that_cannot_form_the_group_without_one_that_died_are_stuck(bench):
    bench.read(0, ARRIVED)
    bench.read(1, end("killed"), ended=True)
    bench.judge()
    assert bench.judge(0.03)
    assert bench.watch.stuck == (0,) and "rank 1 missing" in bench.watch.liveness({})[0].detail


def test_a_rank_that_could_come_and_does_not_is_missing_at_the_deadline():
    bench = Bench(stall_after_s=1.0)
    bench.read(0, OUTSIDE, ARRIVED)
    bench.read(1, OUTSIDE)
    assert not bench.judge(0.9) and not bench.judge(0.2) and bench.judge()
    assert [look.state for look in bench.watch.liveness({})] == ["stalled", "stalled"]
    assert "rank 1 missing" in bench.watch.liveness({})[0].detail and bench.watch.stuck == (0, 1)


def test_a_stopped_rank_is_missing_at_the_deadline_however_far_it_has_come():
    bench = Bench(stall_after_s=1.0)
    bench.read(0, OUTSIDE, ARRIVED)
    bench.read(1, stopped=True)
    assert not bench.judge(0.9) and not bench.judge(0.2) and bench.judge()
    assert [look.state for look in bench.watch.liveness({})] == ["stalled", "stopped"]


@pytest.mark.parametrize("events", [(), (OUTSIDE, ARRIVED)])
def test_a_rank_that_loads_its_program_or_connects_is_waited_for_much_longer(events):
    bench = Bench(stall_after_s=1.0)
    bench.read(0, OUTSIDE, ARRIVED)
    bench.read(1, *events)
    assert not bench.judge(FORM_S - 1) and not bench.judge(2) and bench.judge()


def test_a_rank_that_still_loads_its_program_may_end_like_the_one_that_did(bench):
    bench.read(0)
    bench.read(1, end(), ended=True)
    assert not any(bench.judge() for _ in range(5))


def test_ranks_of_which_one_is_stopped_inside_a_collective_are_not_stuck_before_the_deadline():
    bench = Bench(stall_after_s=5.0)
    for rank in (0, 1):
        bench.read(rank, GROUP, joined(1))
    began = bench.now
    while not bench.judge(0.02):
        bench.read(0, threads=threads())
        bench.read(1, threads=threads(), stopped=True)
    assert bench.now - began >= 5.0
    assert [look.state for look in bench.watch.liveness({})] == ["running", "stopped"]


def test_looks_get_rarer_and_come_at_once_after_an_end(bench):
    bench.read(0, GROUP)
    bench.read(1, GROUP)
    first = bench.watch.look_s
    for _ in range(20):
        bench.judge()
    assert bench.watch.look_s > 5 * first
    bench.read(1, end(), ended=True)
    assert bench.watch.look_s == first
