"""Stacks by py-spy, of a process that waits in C; and what there is without py-spy."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tpbed.tp import py_spy

PROGRAM = """
import sys

def wait_for_input():
    print("ready", flush=True)
    sys.stdin.buffer.raw.read(1)

wait_for_input()
"""


@pytest.fixture
def pid() -> Iterator[int]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        yield process.pid
        process.kill()


def test_a_native_stack_has_the_frames_in_c_above_those_in_python(pid):
    lines = [line.split()[0] for line in py_spy.native_stack(pid).splitlines() if line.startswith("    ")]
    assert any("read" in name for name in lines[: lines.index("wait_for_input")])


def test_a_suspended_process_is_read_without_waking_it(pid):
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    assert "wait_for_input" in py_spy.native_stack(pid, stopped=True)
    assert py_spy.frames_of_stopped(pid)[0].endswith(" wait_for_input")


def test_without_py_spy_there_is_nothing(pid, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    assert py_spy.find_py_spy() is None
    assert py_spy.native_stack(pid) == "" and py_spy.frames_of_stopped(pid) == ()
