"""Janitor: a small process beside the driver that ends what a local Ray leaves behind, however the driver dies."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_AGAIN_S = 0.05  # between two looks for processes that have yet to go


class Janitor:
    """Watches over `folder`, that of one local Ray, from a process of its own: it hears of the driver's end at once."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tpbed.tp.janitor", str(folder)],
            stdin=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,
        )

    def close(self) -> None:
        """Let it clean up now, and wait until it has."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def find_users(folder: str) -> list[int]:
    """Ray's processes that belong to the folder: this one and drivers are left out.

    Ray tells each of its processes where the folder is, and has it write its log there; some change their names later.
    """
    own = str(os.getpid())
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if entry.name != own and _uses(entry, folder)]


def _uses(process: Path, folder: str) -> bool:
    with suppress(OSError):  # it has ended, or is somebody else's
        command = (process / "cmdline").read_bytes()
        if folder.encode() in command:
            return True
        if command.startswith(b"ray::"):
            return any(os.readlink(file).startswith(folder) for file in (process / "fd").iterdir())
    return False


def main() -> None:
    """Wait until standard input ends, which it does with the driver; then end the folder's processes and remove it."""
    folder = sys.argv[1]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()
    while users := find_users(folder):
        for pid in users:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_AGAIN_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
