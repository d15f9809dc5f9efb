"""RayShare: one local Ray for several drivers, such as the workers of pytest-xdist; it ends with the last of them.

Ray lives with a keeper, a process of its own that the first driver starts; each driver holds a line to it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

import ray
from ray._raylet import Config  # type: ignore[attr-defined]

from tpbed.tp.ray_cluster import InitError, start

_START_S = 120.0  # for Ray: it shares the machine with the drivers that wait for it
_AUTH_MODE = "RAY_AUTH_MODE"
_AGAIN_S = 0.02  # to the next try, where another driver has bound the name and does not listen yet


class Held:
    """What this process holds: no more than one Ray, until it ends."""

    line: socket.socket | None = None
    address: str | None = None
    keeper: subprocess.Popen[bytes] | None = None  # if this process has started it; it ends later than that


def shared_address(world_size: int) -> str | None:
    """The Ray that the workers of this pytest-xdist session share; None outside of one, or where Ray is initialised.

    world_size: ranks that this driver will ask for.
    Raises InitError.
    """
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if not session or ray.is_initialized():
        return None
    if Held.line is None:
        Held.line, answer = _join(f"tpbed-ray-{os.getuid()}-{session}", world_size)
        Held.address = answer["address"]
        _use_tokens(answer["auth_mode"])
    return Held.address


def _use_tokens(auth_mode: str) -> None:
    """Whoever starts a Ray has tokens turned on by it; whoever joins one by its address has to turn them on."""
    if auth_mode:
        os.environ[_AUTH_MODE] = auth_mode
        Config.initialize("")  # Ray looks at the environment when it is imported


def _join(name: str, world_size: int) -> tuple[socket.socket, dict[str, str]]:
    """A line to the keeper of that name, and what it says of its Ray; both started if this driver is the first."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        line = _connect(name) or _start_keeper(name, world_size)
        answer = _read(line, deadline) if line is not None else {}
        if line is not None and "address" in answer:
            return line, answer
        if "failed" in answer:
            raise InitError(f"the Ray that pytest-xdist workers share did not start: {answer['failed']}")
        time.sleep(_AGAIN_S)  # or the keeper was just ending
    raise InitError(f"the Ray that pytest-xdist workers share did not start within {_START_S:.0f} s.")


def _connect(name: str) -> socket.socket | None:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        line.connect(f"\0{name}")
    except OSError:
        line.close()
        return None
    return line


def _start_keeper(name: str, world_size: int) -> socket.socket | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(f"\0{name}")
        except OSError:
            return None
        listener.listen(128)
        line = _connect(name)
        Held.keeper = subprocess.Popen(
            [sys.executable, "-P", "-m", "tpbed.tp.ray_share", str(listener.fileno()), str(world_size)],
            pass_fds=(listener.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # it outlives this process, whose output somebody may read to its end
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )
    return line


def _read(line: socket.socket, deadline: float) -> dict[str, str]:
    if select.select([line], [], [], max(0.0, deadline - time.monotonic()))[0]:
        with suppress(OSError):
            data = line.recv(1 << 16)
            return dict(json.loads(data)) if data else {}
    return {}


def _keep(listener: socket.socket, answer: dict[str, str]) -> None:
    """Give everybody the answer, until all have hung up."""
    lines: list[socket.socket] = []
    while ready := select.select([listener, *lines], [], [], None if lines else 0.0)[0]:
        for line in ready:
            if line is listener:
                lines.append(listener.accept()[0])
                with suppress(OSError):
                    lines[-1].send(json.dumps(answer).encode())
            else:
                lines.remove(line)
                line.close()


def main() -> None:
    """Keep a Ray for whoever calls the listening socket whose file descriptor is the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the drivers
    listener = socket.socket(fileno=int(sys.argv[1]))
    try:
        answer = {"address": start(int(sys.argv[2])), "auth_mode": os.environ.get(_AUTH_MODE, "")}
    except Exception as error:  # noqa: BLE001 - whatever it is, the drivers shall say it
        answer = {"failed": f"{type(error).__name__}: {error}"}
    with listener:  # whoever still calls finds nobody, and starts another
        _keep(listener, answer)


if __name__ == "__main__":
    main()
