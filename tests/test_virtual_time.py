"""Time in a rank program: it passes on the world's clock, lets others run, and is the caller's own again afterwards."""

import _thread
import contextlib
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tpbed.tp import simulated_run
from tpbed.tp.rank import current
from tpbed.tp.schedule import RoundRobin, Seeded
from tpbed.tp.simulated import SimulatedWorld
from tpbed.tp.virtual_time import START_S

NAMES = ("sleep", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns")
CLOCKS = NAMES[1:]


def functions():
    return [getattr(time, name) for name in NAMES]


def test_a_watchdog_of_ten_minutes_takes_no_time():
    def program(rank):
        began = time.monotonic()
        if rank == 0:
            time.sleep(600)
        else:
            with pytest.raises(RuntimeError, match="timed out"):
                dist.barrier(timeout=timedelta(seconds=500))
        return time.monotonic() - began

    late, watchdog = SimulatedWorld(2).run(program).results
    assert (round(late, 3), round(watchdog, 3)) == (600, 500)


@pytest.mark.parametrize("name", CLOCKS)
def test_every_clock_tells_the_worlds_time(name):
    unit = 10**9 if name.endswith("_ns") else 1

    def program(rank):
        clock = getattr(time, name)
        first = clock()
        time.sleep(2.5)
        return first / unit, (clock() - first) / unit

    ((first, passed), _) = SimulatedWorld(2).run(program).results
    assert first == pytest.approx(START_S if name.startswith("time") else 0, abs=1e-3)
    assert passed == pytest.approx(2.5, abs=1e-3)


def test_clocks_keep_their_types():
    types = SimulatedWorld(1).run(lambda rank: [type(getattr(time, name)()) for name in CLOCKS]).results[0]
    assert types == [float, int, float, int, float, int]


def test_sleep_lets_the_others_run():
    order = []

    def program(rank):
        time.sleep([3, 2, 1, 0][rank])
        order.append(rank)

    SimulatedWorld(4).run(program)
    assert order == [3, 2, 1, 0]


def test_the_same_schedule_gives_the_same_times():
    def program(rank):
        seen = []
        for _ in range(3):
            time.sleep(rank * 1e-6)
            seen.append((time.time(), time.perf_counter_ns()))
            dist.barrier()
        return seen

    world = SimulatedWorld(3, Seeded(4))
    assert world.run(program).results == world.run(program).results


@pytest.mark.parametrize("deadline_s", [0.001, 5, 600, 86_400])
@pytest.mark.parametrize("asks", [True, False])
def test_a_rank_that_looks_at_the_clock_until_a_deadline_reaches_it(deadline_s, asks):
    def program(rank):
        work = dist.barrier(async_op=True) if rank == 0 else None
        end = time.monotonic() + deadline_s
        while rank == 0 and time.monotonic() < end and not (asks and work.is_completed()):
            pass
        return time.monotonic() - end

    run = SimulatedWorld(2).run(program)
    assert run.stuck == ()
    assert 0 <= run.results[0] <= deadline_s * 0.25


def test_a_rank_that_looks_at_the_clock_does_not_sleep_past_what_wakes_another():
    def program(rank):
        if rank == 0:
            time.sleep(600)
        end = [0, 5, 1000][rank]
        while time.monotonic() < end:
            pass
        return time.monotonic()

    sleeper, hasty, patient = SimulatedWorld(3).run(program).results
    assert sleeper == pytest.approx(600, abs=0.01)
    assert 5 < hasty < 10
    assert 1000 < patient < 1250


def test_a_rank_that_spins_on_the_clock_lets_the_others_come():
    def program(rank):
        if rank == 1:
            time.sleep(3)
        work = dist.barrier(async_op=True)
        end = time.monotonic() + 60
        while not work.is_completed() and time.monotonic() < end:
            pass
        return work.is_completed()

    assert SimulatedWorld(2).run(program).results == (True, True)


@pytest.mark.parametrize("nap", [lambda work: time.sleep(0.1), lambda work: try_to_wait(work)])
def test_a_rank_that_only_sleeps_and_wakes_for_ever_is_stuck(nap, monkeypatch):
    def program(rank):
        work = dist.barrier(async_op=True) if rank else None
        while rank:
            nap(work)

    monkeypatch.setattr(simulated_run, "IDLE_NAPS", 50)
    run = SimulatedWorld(3).run(program)
    assert run.liveness[1].state == run.liveness[2].state == "stalled"
    assert "sleeps for ever" in run.liveness[1].detail


def try_to_wait(work):
    with pytest.raises(RuntimeError):
        work.wait(timedelta(seconds=1))


def test_many_naps_between_collectives_are_no_endless_sleep(monkeypatch):
    def program(rank):
        for _ in range(10):
            for _ in range(6):
                time.sleep(0.1)
            dist.barrier()
        return True

    monkeypatch.setattr(simulated_run, "IDLE_NAPS", 20)
    assert SimulatedWorld(3).run(program).results == (True,) * 3


@pytest.mark.parametrize(("given", "error"), [(-1, ValueError), (float("nan"), ValueError), ("1", TypeError)])
def test_sleep_refuses_what_it_always_does(given, error):
    run = SimulatedWorld(1).run(lambda rank: time.sleep(given))
    assert run.ledgers[0].end.error_type == error.__name__


def test_where_a_rank_cannot_wait_time_passes_for_it_alone():
    def program(rank):
        value = torch.ones(1, requires_grad=True)
        value.register_hook(lambda grad: time.sleep(7))
        (value * 2).sum().backward()
        return time.monotonic()

    assert SimulatedWorld(2).run(program).results[0] == pytest.approx(7, abs=1e-3)


def hangs(rank):
    if rank:
        dist.barrier()


def raises(rank):
    raise ValueError("here")


def interrupted(rank):
    _thread.interrupt_main()


def killed(rank):
    current().die("kill", "on purpose")


def sets_its_own(rank):
    time.sleep = time.time = None


class Broken(RoundRobin):
    """A schedule that fails."""

    def choose(self, runnable, asks=-1):
        raise ZeroDivisionError


@pytest.mark.parametrize("program", [hangs, raises, interrupted, killed, sets_its_own])
@pytest.mark.parametrize("schedule", [RoundRobin(), Broken()])
def test_the_caller_gets_its_own_time_back_however_the_run_ends(program, schedule):
    before = functions()
    with contextlib.suppress(KeyboardInterrupt, ZeroDivisionError):
        SimulatedWorld(2, schedule).run(program)
    assert functions() == before


def test_other_threads_and_finally_blocks_after_the_run_keep_real_time():
    seen = []

    def program(rank):
        thread = threading.Thread(target=lambda: seen.append(time.time()))
        thread.start()
        thread.join()
        return time.time()

    before = time.time()
    (simulated,) = SimulatedWorld(1).run(program).results
    assert simulated == pytest.approx(START_S, abs=1)
    assert before <= seen[0] <= time.time()


def test_a_rank_that_is_unwound_can_read_the_clock():
    seen = []

    def program(rank):
        try:
            if rank == 0:
                dist.barrier()
        finally:
            seen.extend(time.monotonic() for _ in range(300))

    assert SimulatedWorld(2).run(program).stuck == (0,)
    assert len(seen) == 600


def test_names_that_were_imported_directly_are_out_of_reach():
    real = time.monotonic
    before = real()
    assert before <= SimulatedWorld(1).run(lambda rank: real()).results[0] <= real()
