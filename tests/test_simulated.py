"""The simulated world itself: its size, its runs, and that it can always go on."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st
from rank_programs import cross, die, never_asked_again, raise_before, return_early, total

from tpbed.harness.worlds import open_world
from tpbed.tp.errors import TestbedError
from tpbed.tp.ledger import WORLD
from tpbed.tp.refusal import UnsupportedCollectiveError
from tpbed.tp.schedule import Seeded
from tpbed.tp.simulated import ClosedWorldError, NestedWorldError, SimulatedWorld, UnwindError
from tpbed.tp.simulated_run import ForeignGroupError
from tpbed.tp.world import WorldSizeError


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


@pytest.mark.parametrize("world_size", [0, -3, True, 2.0, "4"])
@pytest.mark.parametrize("kind", ["sim", "gloo"])
def test_what_is_no_number_of_ranks_is_refused(kind, world_size):
    with pytest.raises(WorldSizeError, match="give a whole number of ranks"):
        open_world(kind, world_size)


def test_a_closed_world_is_refused():
    with SimulatedWorld(2) as world:
        world.run(total)
    world.close()
    with pytest.raises(ClosedWorldError):
        world.run(total)


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
