"""Hangs of the simulated world: who is stuck, and what the ledgers and find_stuck say of it."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from rank_programs import cross, die, hows, raise_before, return_early, states

from tpbed.tp.schedule import Seeded
from tpbed.tp.simulated import SimulatedWorld
from tpbed.tp.stuck import find_stuck


def skip_in_a_sub_group(rank):
    group = dist.new_group([1, 2, 3])
    if rank == 3:
        return
    if rank:
        dist.barrier(group)
    dist.barrier()


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
    assert run.liveness[0].frames[0].startswith("tests/rank_programs.py:")
    assert run.liveness[2].frames == ()


def test_an_asynchronous_collective_that_nobody_waits_for_holds_nobody():
    def program(rank):
        if rank:
            dist.barrier(async_op=True)
        return rank

    run = SimulatedWorld(3).run(program)
    assert (run.results, run.stuck, run.proof_ms) == ((0, 1, 2), (), None)
