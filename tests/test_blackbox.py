"""The black box: what is in it survives the writer, and a full one never harms it."""

import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from tpbed.tp.blackbox import BlackBox, Pen, StackFile, end_event, parse_events, parse_frames
from tpbed.tp.ledger import read_ledger

START = ("start", "world", 1, "all_reduce", "float32", [2, 3], [3, 1], 24, "SUM", None, "a.py:1 f", True, "started", 5)
SMALL = 1  # bytes: the box then has its least capacity


@pytest.fixture
def box() -> Iterator[BlackBox]:
    box = BlackBox.create(SMALL)
    yield box
    box.close()


def fill(box: BlackBox) -> int:
    """Append until something is dropped; returns how many events were kept."""
    count = 0
    while not box.truncated:
        box.append(("step", f"{count:0100}"))
        count += 1
    return count - 1


def in_child(body) -> int:
    """Run `body` in a forked process; returns its wait status."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(0)
    return os.waitpid(pid, 0)[1]


def test_events_come_back_as_they_were_written(box):
    box.append(("group", "world", [0, 1]))
    box.append(START)
    box.append(("mark", "naïve \n name", 'quoted "value"'))
    assert box.events() == [["group", "world", [0, 1]], list(START), ["mark", "naïve \n name", 'quoted "value"']]
    ledger = read_ledger(box.events(), rank=0, world_size=2)
    assert ledger.collectives[0].shape == (2, 3) and ledger.waiting_in() is ledger.collectives[0]


def test_reading_goes_on_where_it_stopped(box):
    box.append(("step", "one"))
    first = box.read()
    box.append(("step", "two"))
    assert parse_events(box.read(len(first))) == [["step", "two"]]
    assert box.count == 2


def test_values_that_json_does_not_know_are_written_as_text(box):
    box.append(
        (
            "mark",
            "device",
            {
                1,
            },
        )
    )
    assert box.events() == [["mark", "device", "{1}"]]


def test_what_was_written_survives_sigkill(box):
    def write_and_die():
        box.append(("step", "last"))
        os.kill(os.getpid(), signal.SIGKILL)

    assert os.WTERMSIG(in_child(write_and_die)) == signal.SIGKILL
    assert box.events() == [["step", "last"]]


def test_a_half_written_event_does_not_count(box):
    box.append(("step", "whole"))
    box._map[box._head[0] + 64 : box._head[0] + 80] = b'["step","torn"]\n'  # as if killed before the header
    assert box.events() == [["step", "whole"]]


def test_another_mapping_of_the_same_file_sees_it_at_once(box):
    other = BlackBox(os.dup(box.fd))
    box.append(("step", "one"))
    assert other.events() == [["step", "one"]] and other.last_ns == box.last_ns
    other.close()


def test_a_full_box_keeps_what_came_first_and_says_so(box):
    kept = fill(box)
    box.append(("step", "short"))
    assert len(box.events()) == kept and box.count == kept + 2
    assert box.events()[-1] == ["step", f"{kept - 1:0100}"]


def test_a_full_box_still_takes_the_end(box):
    fill(box)
    box.append(end_event(how="raised", error_type="ValueError", message="m" * 1_000_000, traceback="😀" * 100_000))
    end = read_ledger(box.events(), rank=0, world_size=1, truncated=box.truncated).end
    assert end is not None and end.error_type == "ValueError" and end.message.endswith("mmm")


def test_a_reset_box_is_empty_and_usable(box):
    fill(box)
    box.reset()
    assert box.events() == [] and not box.truncated and box.count == 0
    box.append(("step", "new"))
    assert box.events() == [["step", "new"]]


def test_a_reset_gives_memory_back():
    box = BlackBox.create(8 << 20)
    fill(box)
    box.reset()
    assert os.fstat(box.fd).st_blocks * 512 < 1 << 20
    box.close()


def test_threads_do_not_mix_their_events(box):
    def write(name):
        for number in range(200):
            box.append(("mark", name, str(number)))

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [e[2] for e in box.events() if e[1] == "c"] == [str(number) for number in range(200)]
    assert len(box.events()) == 800


def test_a_closed_pen_writes_nothing(box):
    pen = Pen(box)
    pen(("step", "in time"))
    pen.close()
    pen(("step", "late"))
    assert box.events() == [["step", "in time"]]


def test_the_stack_of_a_rank_that_holds_the_gil_is_read():
    stacks, (ours, theirs) = StackFile.create(), socket.socketpair()
    pid = os.fork()
    if pid == 0:
        stacks.serve()
        theirs.send(b"r")
        while True:
            pass
    ours.recv(1)
    pidfd = os.pidfd_open(pid)
    frames = stacks.ask(pidfd, wait_s=1.0)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    for resource in (ours, theirs, stacks):
        resource.close()
    os.close(pidfd)
    assert "test_the_stack_of_a_rank_that_holds_the_gil_is_read" in frames[0]
    assert frames[0].startswith("tests/test_blackbox.py:")


def test_frames_are_parsed_from_a_dump():
    dump = (
        'Current thread 0x1 (most recent call first):\n  File "/a/b/c d.py", line 3 in f\n  File "x", line ??? in y\n'
    )
    assert parse_frames(dump) == ("b/c d.py:3 f", "x:??? y")
