"""RankActor: supervises one rank process: its black box, liveness, stacks and end. It imports no torch."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import socket
import struct
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Any, Literal

from tpbed.tp.blackbox import BlackBox, StackFile, end_event, parse_frames
from tpbed.tp.fork_server import START_S, ForkError, ForkServer
from tpbed.tp.job import Job, Station
from tpbed.tp.py_spy import frames_of_stopped, native_stack
from tpbed.tp.reading import Reading, Threads

LEAVE_S = 3.0  # for an idle rank to drop its groups; else it is replaced
ABORT_S = 3.0  # for a rank to leave the program that is aborted: long, as machines are loaded; else it is replaced
_ABORT_AGAIN_S = 0.05
_SEND_S = 5  # for a rank to take a job
_DIE_S = 5.0  # for a killed process to be gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where Ray put an actor."""

    node: str
    address: str
    pid: int
    gpus: tuple[str, ...]


class RankActor:
    """One rank's supervisor. Ray creates it and asks where it is; from then on it serves a socket to the driver.

    A call through Ray costs about 0.5 ms per actor, a message on the socket 0.02 ms (measured): it carries the runs and
    the readings. It also is the driver's lifeline: when it closes, the actor kills its rank and ends.
    """

    def __init__(self, ticket: int, driver: tuple[str, int], key: bytes) -> None:
        """ticket: the driver's number for this actor; driver: where it listens; key: proves that we belong to it."""
        self._channel = Client(driver, authkey=key)
        send_at_once(self._channel)
        self._channel.send(ticket)

    def place(self) -> Place:
        """Where this actor is."""
        import ray

        context = ray.get_runtime_context()
        gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return Place(node=context.get_node_id(), address=address, pid=os.getpid(), gpus=gpus)

    def start(self, station: Station, server: str) -> None:
        """Start to serve the driver: fork the rank, from the node's fork server of that name."""
        supervisor = Supervisor(self._channel, station, server)
        threading.Thread(target=supervisor.serve, name="tpbed-supervisor", daemon=True).start()


class Supervisor:
    """Serves the driver: one thread that always answers, and waits for its rank only within bounds."""

    def __init__(self, channel: Connection, station: Station, server: str) -> None:
        self._channel, self._station, self._server_name = channel, station, server
        self._server = ForkServer(server)
        self._box, self._stacks = BlackBox.create(), StackFile.create()
        self._child: Child | None = None  # None once it is dead
        self._run = 0
        self._running = False
        self._groups: Literal["held", "leaving", "left"] = "left"  # by the rank, since its last run
        self._sent = 0  # bytes of the black box that the driver has

    def serve(self) -> None:
        """Until the driver hangs up; then the rank is killed and this process ends."""
        try:
            self._child = self._fork()
            self._channel.send(("ready", self._child.pid, self._child.gpu))
            while True:
                self._turn()
        except (EOFError, ConnectionError):
            pass
        except BaseException:  # noqa: BLE001 - the driver shall say why this actor is gone
            with contextlib.suppress(OSError):
                self._channel.send(("failed", traceback.format_exc()))
        self._end()
        os._exit(0)

    def _turn(self) -> None:
        child = self._child
        lines: list[Any] = [self._channel, child.jobs, self._server] if child else [self._channel]
        ready: list[Any] = wait(lines)
        if child and child.jobs in ready:
            self._hear_rank(child)
        elif self._server in ready:
            self._notice_death()
        if self._channel in ready:
            kind, *rest = self._channel.recv()
            getattr(self, f"_on_{kind}")(*rest)

    def _hear_rank(self, child: Child) -> None:
        try:
            said = child.jobs.recv()
        except (EOFError, ConnectionError):
            self._notice_death(_DIE_S)
            return
        if said == "left":
            self._groups = "left"
            return
        run, payload, intact = said
        if self._running and run == self._run:
            self._running = False
            self._channel.send(("ended", run, self._read(), payload, intact))

    def _notice_death(self, wait_s: float = 0.0) -> None:
        child = self._child
        status = None if child is None else self._server.exit_of(child.pid, wait_s)
        if child is None or status is None:
            return
        child.close()
        self._child = None
        if self._running:
            self._box.append(_death(status, self._stacks.last_words()))
            self._running = False
        self._channel.send(("dead", self._run, self._read()))

    def _on_run(self, job: Job) -> None:
        self._box.reset()
        self._stacks.clear()
        self._run, self._running, self._sent, self._groups = job.run, True, 0, "held"
        if self._child is None:
            self._running = False
            self._box.append(_death(-signal.SIGKILL))
            self._channel.send(("dead", self._run, self._read()))
            return
        try:
            self._child.jobs.send(job)
        except OSError:  # it is dying, or takes nothing
            self._server.kill(self._child.pid)

    def _on_peek(self, deep: bool) -> None:
        self._channel.send(("peek", self._run, self._read(deep)))

    def _on_frames(self) -> None:
        child = self._child
        frames: tuple[str, ...] = ()
        if child is not None:
            frames = frames_of_stopped(child.pid) if child.is_stopped() else self._stacks.ask(child.pidfd)
        self._channel.send(("frames", self._run, _of_program(frames)))

    def _on_stack(self) -> None:
        child = self._child
        text = "" if child is None else native_stack(child.pid, stopped=child.is_stopped())
        self._channel.send(("stack", self._run, text))

    def _on_leave(self) -> None:
        """Let an idle rank drop its groups, while nobody waits for it."""
        if self._child is not None and not self._running and self._groups == "held":
            self._groups = "leaving"
            with contextlib.suppress(OSError):  # it is dying: that will be noticed
                self._child.jobs.send("leave")

    def _on_recover(self) -> None:
        self._on_leave()
        replaced = not (self._child and (self._abort if self._running else self._has_left)(self._child))
        self._running, self._groups = False, "left"
        if replaced:
            self._kill()
            self._child = self._fork()
        self._channel.send(("recover", self._run, self._child and self._child.pid, replaced))

    def _on_move(self, station: Station) -> None:
        """A new process, since its station is another one: ranks were moved to or from this node."""
        self._station = station
        self._kill()
        self._child = self._fork()
        self._channel.send(("move", self._run, self._child.pid))

    def _on_close(self) -> None:
        self._end()
        self._channel.send(("close",))

    def _read(self, deep: bool = False) -> Reading:
        events = self._box.read(self._sent)
        self._sent += len(events)
        child = self._child
        return Reading(
            events=events,
            count=self._box.count,
            truncated=self._box.truncated,
            quiet_ns=time.monotonic_ns() - self._box.last_ns,
            stopped=child is not None and self._running and child.is_stopped(),
            threads=child.threads() if child is not None and deep else None,
        )

    def _abort(self, child: Child) -> bool:
        """Get a running rank out of its program, alive. False if it does not come in time."""
        if child.is_stopped():
            return False
        deadline, asked, answered, is_out = time.monotonic() + ABORT_S, 0, 0, False
        try:
            while time.monotonic() < deadline and not (is_out and answered == asked):
                if not is_out:  # again and again: it may just be opening what would have been shut down
                    child.control.send(b"a")
                    asked += 1
                for line in wait([child.jobs, child.control], _ABORT_AGAIN_S):
                    if line is child.jobs:
                        is_out = bool(child.jobs.recv())
                    else:
                        answered += len(child.control.recv(64))
        except (EOFError, OSError):
            return False
        return is_out and answered == asked

    def _has_left(self, child: Child) -> bool:
        """Wait until an idle rank has dropped its groups. False if something in it keeps it from that."""
        if self._groups == "left":
            return not child.is_stopped()
        with contextlib.suppress(EOFError, OSError):
            return not child.is_stopped() and child.jobs.poll(LEAVE_S) and child.jobs.recv() == "left"
        return False

    def _fork(self) -> Child:
        try:
            return Child.fork(self._server, self._station, self._box, self._stacks)
        except ForkError:  # the server may have died: once more, with a new one
            self._server.close(0.0)
            self._server = ForkServer(self._server_name)
            return Child.fork(self._server, self._station, self._box, self._stacks)

    def _kill(self) -> None:
        if self._child is not None:
            self._server.kill(self._child.pid)
            self._server.exit_of(self._child.pid, _DIE_S)
            self._child.close()
            self._child = None

    def _end(self) -> None:
        self._kill()
        self._server.close(0.0)


class Child:
    """A rank process, seen from its supervisor."""

    def __init__(self, pid: int, jobs: Connection, control: socket.socket) -> None:
        self.pid, self.jobs, self.control = pid, jobs, control
        self.pidfd = os.pidfd_open(pid)
        self.gpu = ""  # its UUID

    @classmethod
    def fork(cls, server: ForkServer, station: Station, box: BlackBox, stacks: StackFile) -> Child:
        """A new rank process, ready for its first job.

        Raises ForkError.
        """
        (ours, theirs), (control, their_control) = socket.socketpair(), socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@qq", _SEND_S, 0))
        with theirs, their_control:
            fds = (theirs.fileno(), their_control.fileno(), box.fd, stacks.fd, 1, 2)
            pid = server.fork(fds, dict(os.environ))
        child = cls(pid, Connection(ours.detach()), control)
        child._settle(station)
        return child

    def _settle(self, station: Station) -> None:
        try:
            self.jobs.send(station)
            if self.jobs.poll(START_S):
                _, self.gpu = self.jobs.recv()
                return
        except (EOFError, OSError):
            pass
        raise ForkError(
            f"the process of rank {station.rank} was forked and did not settle in; see its output in Ray's logs."
        )

    def is_stopped(self) -> bool:
        """True if it is suspended, as by SIGSTOP."""
        return _state(f"/proc/{self.pid}/stat") == "T"

    def threads(self) -> Threads | None:
        """What its threads did so far; None if it is gone, or the kernel does not tell."""
        try:
            tasks = os.listdir(f"/proc/{self.pid}/task")
            stats = {task: Path(f"/proc/{self.pid}/task/{task}/schedstat").read_text().split() for task in tasks}
        except OSError:
            return None
        return Threads(
            main_slices=int(stats[str(self.pid)][2]),
            busy_ns=sum(int(stat[0]) for stat in stats.values()),
            main_runnable=_state(f"/proc/{self.pid}/task/{self.pid}/stat") == "R",
            runnable=any(_state(f"/proc/{self.pid}/task/{task}/stat") == "R" for task in tasks),
        )

    def close(self) -> None:
        """Let go of it."""
        self.jobs.close()
        self.control.close()
        os.close(self.pidfd)


def _state(stat: str) -> str:
    """The one-letter state in a stat file of /proc; "" if the process is gone."""
    try:
        return Path(stat).read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _death(status: int, last_words: str = "") -> Any:
    at_ns = time.monotonic_ns()
    if status < 0:
        site = next((frame for frame in parse_frames(last_words) if not frame.startswith("tp/")), "")
        message = f"killed by {_signal_name(-status)}" + (f" in {site}" if site else "")
        fields = {"signal": -status, "message": message, "site": site, "traceback": last_words}
        return end_event(how="killed", at_ns=at_ns, **fields)
    return end_event(how="exited", exit_code=status, message=f"exited with status {status}", at_ns=at_ns)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have none
        return f"signal {number}"


def _of_program(frames: tuple[str, ...]) -> tuple[str, ...]:
    """The frames without those of the rank process around its program."""
    return tuple(itertools.takewhile(lambda frame: not re.search(r"tp/rank_process\.py:\d+ _attempt$", frame), frames))


def send_at_once(line: Connection) -> None:
    """Turn off the delay of small messages on a TCP connection."""
    with socket.socket(fileno=os.dup(line.fileno())) as copy:
        copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
