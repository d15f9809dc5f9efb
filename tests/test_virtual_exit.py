"""What ends a process ends the rank that calls it: recorded as a real world records it, and the session goes on."""

import _thread
import contextlib
import os
import signal
import sys
import threading
import warnings

import pytest
import torch.distributed as dist

from tpbed.harness.diagnose import diagnose
from tpbed.tp.schedule import RoundRobin
from tpbed.tp.simulated import SimulatedWorld

FUNCTIONS = ((os, "_exit"), (os, "abort"), (os, "kill"), (signal, "raise_signal"))

SENDS = (lambda number: os.kill(os.getpid(), number), lambda number: signal.raise_signal(number))


def in_place():
    return [getattr(module, name) for module, name in FUNCTIONS], signal.getsignal(signal.SIGINT)


def end_of(leave):
    """How rank 1 of two ends that calls `leave` before a barrier, and the one finding."""

    def program(rank):
        if rank == 1:
            leave()
        dist.barrier()

    run = SimulatedWorld(2).run(program)
    (finding,) = diagnose(run.ledgers, run.liveness)
    return run.ledgers[1].end, run.liveness[1], finding


@pytest.mark.parametrize(("status", "code"), [(0, 0), (3, 3), (-1, 255), (256, 0)])
def test_a_rank_that_calls_exit_has_exited_and_its_peers_hang(status, code):
    end, seen, finding = end_of(lambda: os._exit(status))
    assert (end.how, end.exit_code, end.message) == ("exited", code, f"exited with status {code}")
    assert (seen.state, seen.detail) == ("dead", f"exit status {code}")
    assert (finding.kind, finding.ranks, finding.op) == ("hang", (1,), "barrier")
    assert end.site.startswith("tests/test_virtual_exit.py:")


@pytest.fixture
def default_of():
    """Lets a signal do what it does by default, whatever handler this process has got, such as Ray's of SIGTERM."""
    held = {}

    def reset(number):
        if number != signal.SIGKILL:
            held[number] = signal.signal(number, signal.SIG_DFL)

    yield reset
    for number, handler in held.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
@pytest.mark.parametrize("send", SENDS)
def test_a_signal_that_a_rank_sends_itself_kills_it_alone(send, number, default_of):
    default_of(number)
    end, seen, finding = end_of(lambda: send(number))
    assert (end.how, end.signal, end.message) == ("killed", number, f"killed by {number.name}")
    assert (seen.state, finding.kind, finding.ranks) == ("dead", "hang", (1,))


def test_abort_is_a_death_by_its_signal():
    end, _, _ = end_of(lambda: os.abort())
    assert (end.how, end.signal) == ("killed", signal.SIGABRT)


def test_a_rank_that_stops_itself_is_stopped_and_not_dead():
    end, seen, finding = end_of(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    assert (end, seen.state, finding.kind, finding.ranks) == (None, "stopped", "stall", (1,))


@pytest.mark.parametrize("send", SENDS)
def test_a_signal_that_is_handled_or_harmless_ends_nobody(send):
    got = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))

    def program(rank):
        for number in (signal.SIGUSR1, signal.SIGCHLD, 0):
            send(number) if number else os.kill(os.getpid(), 0)
        dist.barrier()
        return rank

    try:
        assert SimulatedWorld(2).run(program).results == (0, 1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert got == [signal.SIGUSR1] * 2


def test_what_cannot_be_is_refused_as_by_the_real_functions():
    def program(rank):
        with pytest.raises(TypeError):
            os._exit("no")
        with pytest.raises(OSError, match="Invalid argument"):
            os.kill(os.getpid(), 1000)

    assert SimulatedWorld(1).run(program).ledgers[0].end.how == "returned"


def test_others_than_ranks_keep_the_real_functions():
    served = []

    def program(rank):
        child = os.fork()
        if not child:
            os._exit(7)  # a process of the rank's own, which must not go on as the other ranks
        served.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        sleeper = os.posix_spawn(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)"], os.environ)
        os.kill(sleeper, signal.SIGKILL)
        served.append(os.waitstatus_to_exitcode(os.waitpid(sleeper, 0)[1]))
        thread = threading.Thread(target=lambda: served.append(pytest.raises(TypeError, os._exit, "no").value.args))
        thread.start()
        thread.join()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside the threads of torch
        run = SimulatedWorld(1).run(program)
    assert run.ledgers[0].end.how == "returned"
    assert served[:2] == [7, -signal.SIGKILL] and len(served) == 3


def test_a_keyboard_interrupt_that_a_rank_raises_is_its_own_error():
    def leave():
        raise KeyboardInterrupt

    for way in (leave, lambda: os.kill(os.getpid(), signal.SIGINT), lambda: signal.raise_signal(signal.SIGINT)):
        end, _, finding = end_of(way)
        assert (end.how, end.error_type, finding.ranks) == ("raised", "KeyboardInterrupt", (1,))


def test_an_interrupt_from_outside_ends_the_run():
    with pytest.raises(KeyboardInterrupt):
        end_of(_thread.interrupt_main)


class Broken(RoundRobin):
    """A schedule that fails."""

    def choose(self, runnable, asks=-1):
        raise ZeroDivisionError


@pytest.mark.parametrize("leave", [lambda: os._exit(0), lambda: 1 / 0, _thread.interrupt_main, lambda: None])
@pytest.mark.parametrize("schedule", [RoundRobin(), Broken()])
def test_the_caller_gets_its_own_functions_back_however_the_run_ends(leave, schedule):
    before = in_place()
    with contextlib.suppress(KeyboardInterrupt, ZeroDivisionError):
        SimulatedWorld(2, schedule).run(lambda rank: leave())
    assert in_place() == before


def test_a_handler_of_interrupts_that_a_rank_sets_does_not_outlive_the_run():
    before = in_place()
    SimulatedWorld(1).run(lambda rank: signal.signal(signal.SIGINT, signal.SIG_IGN))
    assert in_place() == before
