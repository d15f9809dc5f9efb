"""Turns and time of the simulated world: whose turn it is, and what passes on its clock."""

import inspect
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from rank_programs import cross, hows, never_asked_again, states, total

from tpbed.harness.diagnose import diagnose
from tpbed.tp.rank import current, step
from tpbed.tp.schedule import Replayed, RoundRobin, ScheduleError, Seeded
from tpbed.tp.simulated import SimulatedWorld


def noisy(rank):
    """Everything that can depend on the order of turns."""
    half = dist.new_group([0, 1, 2])
    for number in range(3):
        work = dist.all_reduce(torch.ones(2), async_op=True)
        current().sleep(rank * 1e-6)
        if rank < 3:
            dist.barrier(half)
        step(f"{number} {work.is_completed()}")
        work.wait()


@given(seed=st.integers(0, 999))
def test_a_run_repeats_itself_exactly_and_its_choices_replay_it(seed):
    world = SimulatedWorld(4, Seeded(seed))
    first, again = world.run(noisy), world.run(noisy)
    replay = SimulatedWorld(4, Replayed(world.choices))
    assert first.ledgers == again.ledgers == replay.run(noisy).ledgers
    assert replay.choices == world.choices


def test_schedules_make_a_difference_where_a_program_lets_them():
    def program(rank):
        work = dist.barrier(async_op=True)
        return work.is_completed()

    assert len({SimulatedWorld(4, Seeded(seed)).run(program).results for seed in range(20)}) > 1


def test_who_came_last_need_not_come_first_the_next_time():
    def orders(seed):
        came = [], []

        def program(rank):
            for order in came:
                order.append(rank)
                dist.barrier()

        SimulatedWorld(3, Seeded(seed)).run(program)
        return came

    assert any(first[-1] == second[-1] for first, second in map(orders, range(20)))


def test_a_hang_can_be_replayed_too():
    world = SimulatedWorld(4, Seeded(3))
    run = world.run(cross)
    assert SimulatedWorld(4, Replayed(world.choices)).run(cross).ledgers == run.ledgers


def test_a_replay_of_another_program_is_refused_to_the_caller_and_not_to_a_rank():
    seen = []

    def program(rank):
        try:
            return total(rank)
        except Exception as error:  # noqa: BLE001 - what the test is about
            seen.append(error)

    world = SimulatedWorld(4, Replayed([0, 0]))
    with pytest.raises(ScheduleError):
        world.run(program)
    assert seen == []


def test_a_schedule_that_chooses_a_rank_that_cannot_run_is_refused():
    class Wrong(RoundRobin):
        def choose(self, runnable, asks=-1):
            return 17

    with pytest.raises(ScheduleError, match="chose rank 17"):
        SimulatedWorld(2, Wrong()).run(total)


def test_sleep_passes_on_the_worlds_clock_after_all_who_can_run():
    order = []

    def program(rank):
        current().sleep([3600, 60, 0][rank])
        order.append(rank)
        return current().recorder

    run = SimulatedWorld(3).run(lambda rank: program(rank) and dist.barrier())
    assert order == [2, 1, 0]
    assert run.ledgers[0].end.at_ns > 3600 * 1e9
    assert run.proof_ms is None


def test_a_sleeper_is_waited_for_and_no_hang():
    def program(rank):
        if rank == 0:
            current().sleep(1e6)
        return total(rank)

    assert SimulatedWorld(3).run(program).results == (6, 6, 6)


def test_asking_whether_a_collective_is_done_lets_the_others_run():
    def program(rank):
        if rank == 0:
            current().sleep(5)
        value = torch.ones(1)
        work = dist.all_reduce(value, async_op=True)
        while not work.is_completed():
            pass
        return value.item()

    for seed in range(5):
        assert SimulatedWorld(3, Seeded(seed)).run(program).results == (3.0, 3.0, 3.0)


def test_who_asks_for_ever_is_stuck():
    run = SimulatedWorld(3).run(never_asked_again)
    assert (states(run), run.stuck) == (["ended", "stalled", "stalled"], (1, 2))


def waits_until_a_time(rank):
    if rank:
        dist.barrier(async_op=True).wait(timedelta(seconds=2))


@pytest.mark.parametrize("program", [never_asked_again, waits_until_a_time])
def test_the_rank_that_left_is_to_blame_and_not_those_that_ask_or_give_up(program):
    run = SimulatedWorld(3).run(program)
    (finding,) = diagnose(run.ledgers, run.liveness)
    assert (finding.kind, finding.ranks, finding.op, finding.waiting_ranks) == ("hang", (0,), "barrier", (1, 2))


BARRIER_TAKES_TIMEOUT = "timeout" in inspect.signature(dist.barrier).parameters  # not in torch 2.11


def test_a_timeout_of_wait_or_barrier_passes_on_the_worlds_clock():
    def program(rank):
        if rank == 0:
            return current().sleep(100)
        work = dist.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(RuntimeError, match="timed out"):
            work.wait(timedelta(seconds=5))
        if BARRIER_TAKES_TIMEOUT:
            with pytest.raises(RuntimeError, match="timed out"):
                dist.barrier(timeout=timedelta(seconds=5))

    run = SimulatedWorld(2).run(program)
    waited_ns = 10e9 if BARRIER_TAKES_TIMEOUT else 5e9
    assert hows(run) == ["returned", "returned"]
    assert waited_ns < run.ledgers[1].end.at_ns < waited_ns + 1e9


def test_a_collective_that_completes_in_time_is_not_timed_out_later():
    def program(rank):
        current().sleep(rank)
        dist.barrier(async_op=True).wait(timedelta(seconds=5))
        current().sleep(100)
        dist.barrier()
        return True

    assert SimulatedWorld(2).run(program).results == (True, True)


def test_no_two_events_have_the_same_time():
    run = SimulatedWorld(3, Seeded(1)).run(total)
    times = [t for ledger in run.ledgers for record in ledger.collectives for t in (record.started_ns, record.ended_ns)]
    times += [ledger.end.at_ns for ledger in run.ledgers]
    assert len(set(times)) == len(times) == 9
