"""The simulated world: what it proves of a hang, how ranks end, whose turn it is, and that it can always go on."""

import contextlib
import contextvars
import gc
import inspect
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from greenlet import getcurrent
from hypothesis import example, given
from hypothesis import strategies as st

from tpbed.tp.errors import TestbedError
from tpbed.tp.ledger import WORLD
from tpbed.tp.rank import current, decision, step
from tpbed.tp.refusal import UnsupportedCollectiveError
from tpbed.tp.schedule import Replayed, RoundRobin, ScheduleError, Seeded
from tpbed.tp.simulated import (
    ClosedWorldError,
    NestedWorldError,
    SimulatedWorld,
    UnwindError,
    WorldSizeError,
)
from tpbed.tp.simulated_run import ForeignGroupError
from tpbed.tp.stuck import find_stuck


def total(rank):
    value = torch.tensor([rank + 1])
    dist.all_reduce(value)
    return value.item()


def states(run):
    return [seen.state for seen in run.liveness]


def hows(run):
    return [None if ledger.end is None else ledger.end.how for ledger in run.ledgers]


# Hangs: who is stuck, and what the ledgers and find_stuck say of it.


def return_early(rank):
    dist.barrier()
    if rank != 2:
        dist.barrier()


def raise_before(rank):
    dist.barrier()
    if rank == 2:
        raise ValueError("on purpose")
    dist.barrier()


def skip_in_a_sub_group(rank):
    group = dist.new_group([1, 2, 3])
    if rank == 3:
        return
    if rank:
        dist.barrier(group)
    dist.barrier()


def cross(rank):
    groups = [dist.new_group([0, 1, 2]), dist.new_group([0, 1, 3])]
    for group in groups if rank != 1 else groups[::-1]:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.barrier(group)


def die(death):
    def program(rank):
        dist.barrier()
        if rank == 2:
            current().die(death, "on purpose")
        dist.barrier()

    return program


@pytest.mark.parametrize(
    ("program", "stuck"), [(return_early, (0, 1, 3)), (raise_before, (0, 1, 3)), (skip_in_a_sub_group, (0, 1, 2)),
                           (cross, (0, 1, 2, 3)), (die("kill"), (0, 1, 3)), (die("exit"), (0, 1, 3))]
)  # fmt: skip
@given(seed=st.integers(0, 99))
def test_a_hang_is_proved_under_every_schedule_and_find_stuck_agrees(program, stuck, seed):
    run = SimulatedWorld(4, Seeded(seed)).run(program)
    assert run.stuck == stuck == tuple(sorted(find_stuck(run.ledgers, run.liveness)))
    assert run.proof_ms is not None
    assert run.recovery_ms is not None


@pytest.mark.parametrize(("death", "state"), [("stop", "stopped"), ("stall", "stalled")])
def test_who_waits_for_a_frozen_rank_is_stuck_as_nobody_will_thaw_it(death, state):
    run = SimulatedWorld(4).run(die(death))
    assert (run.stuck, find_stuck(run.ledgers, run.liveness)) == ((0, 1, 3), frozenset())
    assert states(run) == ["running", "running", state, "running"]
    assert run.liveness[2].detail == "on purpose"
    assert hows(run) == [None] * 4


def differ(first, second):
    return lambda rank: first() if rank == 0 else second()


def all_reduce(count=4):
    return lambda: dist.all_reduce(torch.ones(count))


def broadcast(root):
    return lambda: dist.broadcast(torch.ones(4), root)


@pytest.mark.parametrize(
    "program",
    [
        differ(all_reduce(), dist.barrier),  # op
        differ(broadcast(0), broadcast(1)),  # root
        differ(all_reduce(4), all_reduce(5)),  # bytes
        differ(broadcast(0), lambda: dist.reduce(torch.ones(4), 0)),
    ],
)
def test_members_that_disagree_wait_for_ever_though_all_have_come(program):
    run = SimulatedWorld(3).run(program)
    assert run.stuck == (0, 1, 2)
    assert [ledger.waiting_in().seq for ledger in run.ledgers] == [1, 1, 1]


def test_liveness_and_frames_tell_where_a_rank_waits():
    run = SimulatedWorld(3).run(raise_before)
    assert states(SimulatedWorld(4).run(raise_before)) == ["running", "running", "ended", "running"]
    assert run.liveness[0].frames[0].endswith("raise_before")
    assert run.liveness[0].frames[0].startswith("tests/test_simulated.py:")
    assert run.liveness[2].frames == ()


def test_an_asynchronous_collective_that_nobody_waits_for_holds_nobody():
    def program(rank):
        if rank:
            dist.barrier(async_op=True)
        return rank

    run = SimulatedWorld(3).run(program)
    assert (run.results, run.stuck, run.proof_ms) == ((0, 1, 2), (), None)


# How ranks end.


def test_a_killed_rank_runs_nothing_more_while_the_run_lasts():
    seen = []

    def program(rank):
        try:
            if rank == 0:
                current().die("kill", "on purpose")
            seen.append(f"{rank} goes on")
        except Exception:  # noqa: BLE001 - what the test is about
            seen.append("caught")
        finally:
            seen.append(f"{rank} finally")

    run = SimulatedWorld(2).run(program)
    assert seen == ["1 goes on", "1 finally", "0 finally"]
    assert hows(run) == ["killed", "returned"]
    assert (run.ledgers[0].end.signal, run.liveness[0].detail) == (9, "signal 9")


def test_nothing_of_the_unwinding_is_recorded():
    def program(rank):
        if rank == 0:
            try:
                dist.barrier()
            finally:
                decision("in finally", True, "the run is over")
                step("late")
        else:
            try:
                current().die("exit", "on purpose")
            finally:
                raise ValueError("in finally")

    run = SimulatedWorld(2).run(program)
    assert (run.ledgers[0].decisions, run.ledgers[0].steps) == ((), ())
    assert hows(run) == [None, "exited"]
    assert run.ledgers[1].end.exit_code == 1


def test_a_rank_whose_waiting_is_ended_has_no_result_even_if_it_returns_one():
    def program(rank):
        try:
            if rank == 0:
                dist.barrier()
        except BaseException:  # noqa: BLE001 - what the test is about
            return "caught"

    run = SimulatedWorld(2).run(program)
    assert (run.results, run.stuck, hows(run)) == ((None, None), (0,), [None, "returned"])


def test_errors_end_one_rank_with_its_site_and_the_others_go_on():
    def program(rank):
        if rank == 1:
            raise SystemExit(3)
        return rank

    run = SimulatedWorld(3).run(program)
    assert (run.results, run.stuck) == ((0, None, 2), ())
    end = run.ledgers[1].end
    assert (end.how, end.error_type, end.message) == ("raised", "SystemExit", "3")
    assert end.site.endswith(" program")


def test_a_rank_that_catches_everything_for_ever_is_given_up():
    def program(rank):
        while rank:
            with contextlib.suppress(BaseException):
                dist.barrier()

    world = SimulatedWorld(3)
    with pytest.raises(UnwindError, match=r"ranks \[1, 2\] caught"):
        world.run(program)
    assert world.run(total).results == (6, 6, 6)


def test_an_interrupt_of_the_driver_ends_all_ranks_and_goes_on_to_it():
    ended = []

    def program(rank):
        try:
            if rank == 2:
                raise KeyboardInterrupt
            dist.barrier()
        finally:
            ended.append(rank)

    world = SimulatedWorld(3)
    with pytest.raises(KeyboardInterrupt):
        world.run(program)
    assert sorted(ended) == [0, 1, 2]
    assert world.run(total).results == (6, 6, 6)


def never_asked_again(rank):
    work = dist.barrier(async_op=True) if rank else None
    while work and not work.is_completed():
        pass


@pytest.mark.parametrize(
    "program",
    [return_early, raise_before, cross, die("kill"), die("exit"), die("stop"), die("stall"), never_asked_again],
)
def test_a_world_runs_the_next_program_whatever_the_last_one_did(program):
    world = SimulatedWorld(4)
    world.run(program)
    assert world.run(total).results == (10, 10, 10, 10)


def test_two_worlds_take_turns():
    small, large = SimulatedWorld(2), SimulatedWorld(3)
    assert [world.run(total).results[0] for world in (small, large, small)] == [3, 6, 3]


def test_a_world_in_a_rank_program_is_refused():
    run = SimulatedWorld(2).run(lambda rank: SimulatedWorld(2).run(total))
    assert [ledger.end.error_type for ledger in run.ledgers] == [NestedWorldError.__name__] * 2


def test_a_closed_world_and_an_empty_one_are_refused():
    with SimulatedWorld(2) as world:
        world.run(total)
    world.close()
    with pytest.raises(ClosedWorldError):
        world.run(total)
    with pytest.raises(WorldSizeError):
        SimulatedWorld(0)


def test_a_world_leaves_nothing_behind():
    kept = []

    def program(rank):
        value = torch.ones(3)
        kept.append(weakref.ref(value))
        kept.append(weakref.ref(dist.group.WORLD))
        if rank:
            dist.all_reduce(value)

    gc.disable()
    try:
        SimulatedWorld(2).run(program)
        assert [ref() for ref in kept] == [None] * 4
    finally:
        gc.enable()


# Turns and time.


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
        def choose(self, runnable):
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


# What ranks may not do.


def test_groups_of_other_ranks_and_of_other_runs_are_refused():
    shared = []

    def program(rank):
        shared.append(dist.group.WORLD)
        dist.barrier(group=shared[0])

    run = SimulatedWorld(2).run(program)
    assert run.ledgers[1].end.error_type == ForeignGroupError.__name__
    with pytest.raises(ForeignGroupError):
        shared[0].barrier().wait()


def test_another_thread_of_a_rank_is_refused():
    def program(rank):
        said = []

        def call():
            with pytest.raises(UnsupportedCollectiveError, match="thread") as refused:
                dist.barrier()
            said.append(refused)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return len(said)

    assert SimulatedWorld(2).run(program).results == (1, 1)


@torch.library.custom_op("tpbed_test::wait", mutates_args=())
def wait_in_an_operator(value: torch.Tensor) -> torch.Tensor:
    called_outside.pop().wait()
    return value.clone()


called_outside = []


def in_backward(rank):
    value = torch.ones(2, requires_grad=True)
    value.register_hook(lambda grad: dist.all_reduce(grad.clone()))
    (value * 2).sum().backward()


@torch.library.custom_op("tpbed_test::meet", mutates_args=())
def meet_in_an_operator(value: torch.Tensor) -> torch.Tensor:
    dist.barrier()
    return value.clone()


def in_an_operator(rank):
    torch.ops.tpbed_test.meet(torch.ones(1))


def in_a_callback(rank):
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    future.wait()
    future.then(lambda _: dist.barrier()).value()


@pytest.mark.parametrize(
    ("program", "inside"),
    [
        (in_backward, r"backward\(\)"),
        (in_an_operator, "operator of torch.ops"),
        (in_a_callback, "callback of a future"),
    ],
)
def test_waiting_where_torch_would_mix_up_ranks_is_refused_by_name(program, inside):
    def refused(rank):
        with pytest.raises((UnsupportedCollectiveError, RuntimeError), match=inside):
            program(rank)
        return total(rank)

    assert SimulatedWorld(2).run(refused).results == (3, 3)
    assert SimulatedWorld(1).run(program).ledgers[0].end.how == "returned"  # alone, it need not wait


def test_a_handle_is_not_waited_on_in_an_operator_either():
    def program(rank):
        called_outside.append(dist.barrier(async_op=True))
        if rank == 0:
            with pytest.raises(UnsupportedCollectiveError, match="operator"):
                torch.ops.tpbed_test.wait(torch.ones(1))
        else:
            torch.ops.tpbed_test.wait(torch.ones(1))  # it is complete
        return total(rank)

    assert SimulatedWorld(2).run(program).results == (3, 3)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: dist.all_reduce(torch.ones(2).to_sparse()), "sparse"),
        (lambda: dist.distributed_c10d._get_default_store().get("key"), "Store.get"),
    ],
)
def test_what_is_not_simulated_is_refused_by_name(call, name):
    def program(rank):
        with pytest.raises((UnsupportedCollectiveError, ValueError), match=name):  # torch 2.14 refuses one itself
            call()
        return total(rank)

    assert SimulatedWorld(2).run(program).results == (3, 3)


# Size.


def test_a_thousand_ranks():
    run = SimulatedWorld(1024).run(total)
    assert run.results == (1024 * 1025 // 2,) * 1024


@given(world_size=st.integers(1, 9), seed=st.integers(0, 99))
@example(world_size=1, seed=0)
def test_ledgers_tell_of_every_rank_alike(world_size, seed):
    run = SimulatedWorld(world_size, Seeded(seed)).run(total)
    assert run.world == "sim"
    assert [ledger.rank for ledger in run.ledgers] == list(range(world_size))
    for ledger in run.ledgers:
        (record,) = ledger.collectives
        assert (record.group, record.seq, record.op, record.state) == (WORLD, 1, "all_reduce", "completed")
        assert ledger.groups == {WORLD: tuple(range(world_size))}


def test_errors_of_the_world_are_errors_of_the_test_bed():
    for error in (ClosedWorldError, ForeignGroupError, NestedWorldError, UnsupportedCollectiveError, UnwindError):
        assert issubclass(error, TestbedError)


# Greenlets, which serve one rank after another.


def greenlets_of(world):
    def program(rank):
        dist.barrier()
        return getcurrent()

    return set(world.run(program).results)


def test_a_world_runs_its_next_program_in_the_greenlets_of_the_last():
    world = SimulatedWorld(3)
    assert len(greenlets_of(world) | greenlets_of(world)) == 3


def test_a_thread_does_not_run_ranks_in_the_greenlets_of_another():
    world = SimulatedWorld(2)
    with ThreadPoolExecutor(1) as pool:
        assert greenlets_of(world).isdisjoint(pool.submit(greenlets_of, world).result())


def test_a_rank_finds_no_context_variable_of_the_one_that_its_greenlet_served_before():
    seen = contextvars.ContextVar("seen", default=None)

    def program(rank):
        before = seen.get()
        seen.set(rank)
        return before

    world = SimulatedWorld(2)
    assert world.run(program).results == world.run(program).results == (None, None)


def test_between_runs_a_world_holds_on_to_nothing_of_the_last():
    world = SimulatedWorld(2)
    world.run(lambda rank: rank)  # in one greenlet; the next run makes another
    for _ in range(2):
        kept = torch.ones(1)
        gone = weakref.ref(kept)
        world.run(lambda rank, kept=kept: dist.all_reduce(kept.clone()))
        del kept
        assert gone() is None


def test_ranks_can_recurse_as_deep_whatever_the_world_ran_before():
    def depth(rank, count=0):
        try:
            return depth(rank, count + 1)
        except RecursionError:
            return count

    def run_deep(world, frames):
        return run_deep(world, frames - 1) if frames else world.run(depth)

    world, fresh = SimulatedWorld(2), SimulatedWorld(2)
    run_deep(world, 300)
    assert world.run(depth).results == fresh.run(depth).results


def test_a_profiler_sees_what_ranks_call_in_a_world_that_has_run_before():
    world, called = SimulatedWorld(2), []
    world.run(total)
    sys.setprofile(lambda frame, event, _: called.append((event, frame.f_code.co_name)))
    try:
        world.run(total)
    finally:
        sys.setprofile(None)
    assert called.count(("call", "total")) == 2
