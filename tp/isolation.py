"""Isolation: what is saved and restored when one simulated rank gives way to another.

Ranks of a simulated world share one thread, so all that belongs to a process or to a thread belongs to all of them,
unless a register says otherwise. What has no register is shared: modules and their globals, threading.local, the file
system and the current directory, the C environment that subprocesses inherit, sys.stdout, and torch's process-wide
switches (threads, deterministic algorithms, matmul precision, backends). Context variables need none: greenlets keep
them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch

from tpbed.tp.generators import NumpyRandom, PythonRandom, TorchRandom
from tpbed.tp.registers import (
    AutocastTypes,
    Context,
    Cuda,
    DefaultType,
    Environment,
    Groups,
    Register,
    Start,
    TorchModes,
    WarningFilters,
)

REGISTERS: tuple[Register, ...] = (
    TorchModes(),
    AutocastTypes(),
    DefaultType(),
    TorchRandom(),
    NumpyRandom(),
    PythonRandom(),
    WarningFilters(),
    *((Cuda(),) if torch.version.cuda or torch.version.hip else ()),
    Environment(),
    Groups(),
    Context(),
)
_NAMES = (Environment, Groups, Context)  # what they name stays the same: enough to save it once


class _Methods(NamedTuple):
    """Of some registers, looked up once, since they are called at every turn."""

    saves: tuple[Callable[[], Any], ...]
    loads: tuple[Callable[[Any], Any], ...]
    starts: tuple[Callable[[Start], Any], ...]


def _methods(registers: Iterable[Register]) -> _Methods:
    registers = tuple(registers)
    return _Methods(
        saves=tuple(register.save for register in registers),
        loads=tuple(register.load for register in registers),
        starts=tuple(register.start for register in registers),
    )


_states = _methods(register for register in REGISTERS if not isinstance(register, _NAMES))
_names = _methods(register for register in REGISTERS if isinstance(register, _NAMES))


def use(registers: Iterable[Register]) -> None:
    """Isolate these and nothing else: the tests show with it what each register is for."""
    global _states, _names
    chosen = tuple(registers)
    _states = _methods(register for register in chosen if not isinstance(register, _NAMES))
    _names = _methods(register for register in chosen if isinstance(register, _NAMES))


class Isolation:
    """One rank's own share of the process, or the caller's: in place while it runs, put away while another runs."""

    __slots__ = ("_named", "_saved")

    def __init__(self, start: Start | None = None) -> None:
        """That of a rank that has yet to start; without `start`, that of whoever runs now, which stays in place."""
        self._saved = [] if start is None else [of(start) for of in _states.starts]
        self._named = [save() for save in _names.saves] if start is None else [of(start) for of in _names.starts]

    def leave(self) -> None:
        """Put it away."""
        self._saved = [save() for save in _states.saves]

    def enter(self) -> None:
        """Put it back in place."""
        for load, saved in zip(_states.loads, self._saved, strict=True):
            load(saved)
        for load, named in zip(_names.loads, self._named, strict=True):
            load(named)


def quietly(act: Callable[[Moved], None], on: Moved) -> None:
    """Call `act(on)` under no mode of any rank, and so that it may write to any tensor, as a transport does."""
    saved = _MODES.save()
    guard = _GUARD(True)
    guard.__enter__()
    try:
        act(on)
    finally:
        guard.__exit__(None, None, None)
        _MODES.load(saved)


Moved = TypeVar("Moved")
_MODES = TorchModes()
_GUARD: Any = torch._C._InferenceMode
