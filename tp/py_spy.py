"""PySpy: the stacks of another process, read from outside it by the program py-spy, where that is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tpbed.tp.blackbox import frame_text

_FRAMES_S = 5.0
_STACK_S = 20.0  # many at once share the machine, each reads the symbols of all that its process has loaded


def find_py_spy() -> str | None:
    """Where it is: beside this Python, or on the path."""
    return shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")


def frames_of_stopped(pid: int) -> tuple[str, ...]:
    """The Python frames of a suspended process, innermost first; empty without py-spy, or where it fails."""
    try:
        threads = json.loads(_dump(pid, "--json", "--nonblocking", wait_s=_FRAMES_S))
        frames = next(thread for thread in threads if thread["os_thread_id"] == pid)["frames"]
    except (ValueError, StopIteration):
        return ()
    return tuple(frame_text(frame["filename"], frame["line"], frame["name"]) for frame in frames)


def native_stack(pid: int, *, stopped: bool = False) -> str:
    """All threads of a process with their Python frames and those in C between them, as text; empty as above.

    It is held up for a second or so while it is read. stopped: it is suspended, and only its Python frames can be read.
    """
    return _dump(pid, "--nonblocking" if stopped else "--native", wait_s=_STACK_S)


def _dump(pid: int, *options: str, wait_s: float) -> str:
    command = [find_py_spy() or "py-spy", "dump", *options, "--pid", str(pid)]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=wait_s, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
