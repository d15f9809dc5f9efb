"""Greenlets of a simulated world, which serve one rank after another and keep nothing of any."""

import contextvars
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from greenlet import getcurrent
from rank_programs import total

from tpbed.tp.simulated import SimulatedWorld


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
