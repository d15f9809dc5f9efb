"""How simulated ranks end, and what that leaves to the others."""

import _thread
import contextlib

import pytest
import torch.distributed as dist
from rank_programs import hows, total

from tpbed.tp.rank import current, decision, step
from tpbed.tp.simulated import SimulatedWorld, UnwindError


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
                _thread.interrupt_main()
            dist.barrier()
        finally:
            ended.append(rank)

    world = SimulatedWorld(3)
    with pytest.raises(KeyboardInterrupt):
        world.run(program)
    assert sorted(ended) == [0, 1, 2]
    assert world.run(total).results == (6, 6, 6)
