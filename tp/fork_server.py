"""ForkServer: one process per node that has imported torch, never touched CUDA, and forks the ranks.

Death goes down: a rank dies with the server (parent-death signal), and the server kills the ranks of whoever hangs up.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import Any, NoReturn

from tpbed.tp.errors import TestbedError

START_S = 60.0  # for a server to import torch and fork the first rank
_LONELY_S = 10.0  # a server that nobody has called yet ends itself
_MESSAGE_BYTES = 1 << 18
_PR_SET_PDEATHSIG = 1
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # one thread at fork
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # an abort makes c10d warn at length


class ForkError(TestbedError):
    """The fork server of this node could not be started, or did not fork a rank in time."""


class ForkServer:
    """A caller's line to the fork server of its node; the ranks that it forked die when it hangs up.

    fileno: to be polled; readable when `exits` has something to tell.
    """

    def __init__(self, name: str) -> None:
        """Join the server that owns the abstract socket `name`, or start it; does not wait for it to be ready."""
        self._exits: dict[int, int] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._words = os.memfd_create("tpbed-fork-server")
        self._line = self._join(name)

    def fileno(self) -> int:
        """The socket."""
        return self._line.fileno()

    def fork(self, fds: tuple[int, ...], environment: dict[str, str]) -> int:
        """A new rank process that gets copies of `fds` and runs rank_process.main on them. Returns its pid.

        Raises ForkError.
        """
        self._send({"fork": environment}, fds)
        deadline = time.monotonic() + START_S
        while True:
            answer = self._receive(deadline)
            if "forked" in answer:
                return int(answer["forked"])
            self._exits[answer["exited"]] = answer["status"]

    def kill(self, pid: int) -> None:
        """SIGKILL a rank that this caller had forked, and all processes that it started; no error if it is gone."""
        with contextlib.suppress(ForkError):
            self._send({"kill": pid})

    def exit_of(self, pid: int, wait_s: float = 0.0) -> int | None:
        """How a rank ended: its exit status, or minus its signal; None if it lives `wait_s` seconds longer."""
        deadline = time.monotonic() + wait_s
        while pid not in self._exits and select.select([self._line], [], [], max(0.0, deadline - time.monotonic()))[0]:
            try:
                answer = self._receive(deadline)
            except ForkError:
                return -signal.SIGKILL  # the ranks of a dead server die with it
            self._exits[answer["exited"]] = answer["status"]
        return self._exits.pop(pid, None)

    def close(self, wait_s: float = 5.0) -> None:
        """Hang up; wait for the server's end if this caller started it and nobody else needs it."""
        self._line.close()
        os.close(self._words)
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)

    def _send(self, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        try:
            socket.send_fds(self._line, [json.dumps(message).encode()], list(fds))
        except OSError as error:
            raise ForkError(f"the fork server of this node is gone ({error}): {self._last_words()}") from error

    def _receive(self, deadline: float) -> dict[str, Any]:
        if not select.select([self._line], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise ForkError(
                f"the fork server of this node did not answer in {START_S:.0f} s: is the machine overloaded?"
            )
        with contextlib.suppress(OSError):
            data = self._line.recv(_MESSAGE_BYTES)
            if data:
                return dict(json.loads(data))
        raise ForkError(f"the fork server of this node is gone: {self._last_words()}")

    def _last_words(self) -> str:
        words = os.pread(self._words, 4096, max(0, os.fstat(self._words).st_size - 4096))
        return words.decode(errors="replace").strip() or "it left no message"

    def _join(self, name: str) -> socket.socket:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            line = _connect(name) or self._start(name)
            if line is not None:
                return line
            time.sleep(0.01)  # somebody else has bound the name and does not listen yet
        raise ForkError(f"the fork server of this node does not listen on the abstract socket {name!r}.")

    def _start(self, name: str) -> socket.socket | None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(f"\0{name}")
            except OSError:
                return None
            listener.listen(128)
            line = _connect(name)
            self._process = self._spawn(listener)
        return line

    def _spawn(self, listener: socket.socket) -> subprocess.Popen[bytes]:
        environment = _ENVIRONMENT | _QUIET | os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "tpbed.tp.fork_server", str(listener.fileno())],
            pass_fds=(listener.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=self._words,
            stderr=self._words,
            env=environment,
            start_new_session=True,
        )


def _connect(name: str) -> socket.socket | None:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        line.connect(f"\0{name}")
    except OSError:
        line.close()
        return None
    return line


class _Server:
    """The other end: single-threaded, so that it may fork; it always answers."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._callers: dict[int, socket.socket] = {}  # by file descriptor
        self._ranks: dict[int, tuple[int, int]] = {}  # pidfd to pid and the caller's file descriptor
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)

    def serve(self) -> None:
        """Until nobody is on the line and no rank is left."""
        wait_ms: float | None = _LONELY_S * 1000
        while ready := self._poll.poll(wait_ms):
            for fd, _ in ready:
                self._attend(fd)
            wait_ms = None if self._callers or self._ranks else 0

    def _attend(self, fd: int) -> None:
        if fd == self._listener.fileno():
            self._answer()
        elif fd in self._ranks:
            self._bury(fd)
        elif fd in self._callers:
            self._hear(self._callers[fd])

    def _answer(self) -> None:
        line, _ = self._listener.accept()
        if _user_of(line) != os.getuid():
            line.close()
            return
        self._callers[line.fileno()] = line
        self._poll.register(line, select.POLLIN)

    def _hear(self, line: socket.socket) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(line, _MESSAGE_BYTES, 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        message: dict[str, Any] = json.loads(data) if data else {}
        if "fork" in message:
            self._fork(line, message["fork"], fds)
        elif "kill" in message:
            self._kill(line.fileno(), message["kill"])
        else:
            self._hang_up(line)

    def _fork(self, line: socket.socket, environment: dict[str, str], fds: list[int]) -> None:
        server, pid = os.getpid(), os.fork()
        if pid == 0:
            self._become_rank(server, environment, fds)
        pidfd = os.pidfd_open(pid)
        self._ranks[pidfd] = (pid, line.fileno())
        self._poll.register(pidfd, select.POLLIN)
        for fd in fds:
            os.close(fd)
        _tell(line, {"forked": pid})

    def _become_rank(self, server: int, environment: dict[str, str], fds: list[int]) -> NoReturn:
        try:
            _die_with(server)
            for fd in (self._listener.fileno(), *self._callers, *self._ranks):
                os.close(fd)
            os.environ.clear()
            os.environ.update(environment)
            os.setpgid(0, 0)
            _run_rank(fds)
        except BaseException:  # noqa: BLE001 - it must not get into the server's loop
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)

    def _kill(self, caller: int, pid: int) -> None:
        if (pid, caller) in self._ranks.values():
            os.kill(pid, signal.SIGKILL)

    def _bury(self, pidfd: int) -> None:
        pid, caller = self._ranks.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what the rank had started
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if caller in self._callers:
            _tell(self._callers[caller], {"exited": pid, "status": status})

    def _hang_up(self, line: socket.socket) -> None:
        for pidfd, (pid, caller) in list(self._ranks.items()):
            if caller == line.fileno():
                self._kill(caller, pid)
                self._ranks[pidfd] = (pid, -1)
        del self._callers[line.fileno()]
        self._poll.unregister(line)
        line.close()


def _tell(line: socket.socket, message: dict[str, int]) -> None:
    with contextlib.suppress(OSError):  # the caller has gone: it will be noticed when its line is read
        line.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)


def _user_of(line: socket.socket) -> int:
    _, user, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _run_rank(fds: list[int]) -> None:
    from tpbed.tp.rank_process import main as rank_main

    rank_main(fds)


def main() -> None:
    """Serve on the listening socket whose file descriptor is the argument."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    from tpbed.tp import rank_process  # noqa: F401 - torch, once for all ranks

    gc.collect()
    gc.freeze()
    _Server(listener).serve()


if __name__ == "__main__":
    main()
