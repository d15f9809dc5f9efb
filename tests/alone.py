"""Runs Python in a process of its own: for what ends it, or leaves its CUDA context unfit for the next test."""

import os
import subprocess
import sys
import textwrap


def run_alone(code: str, *, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """The ended process, its output as text; code is dedented. Raises TimeoutExpired, and ends the process then."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
