"""Isolation: what is saved and restored when one simulated rank gives way to another.

Ranks of a simulated world share one thread, so all that belongs to a process or to a thread belongs to all of them,
unless a register says otherwise. What has no register is shared: modules and their globals, threading.local, the file
system and the current directory, the C environment that subprocesses inherit, sys.stdout, and torch's process-wide
switches (threads, deterministic algorithms, matmul precision, backends). Context variables need none: greenlets keep
them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import is_
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
    QuietRegister,
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


class _Quiet:
    """The registers that few ranks ever change, as one: a look at them tells whether there is anything to do."""

    def __init__(self, registers: Iterable[QuietRegister]) -> None:
        self._registers = tuple(registers)
        self._methods = _methods(self._registers)
        self._in_place: list[Any] = []  # what lies in the process
        self._looks: list[Callable[[], Any]] = []
        self._seen: list[Any] = []  # by them
        self._first: list[Any] = []  # what ranks start with

    def save(self) -> list[Any]:
        """The same list again where nothing has changed."""
        if [look() for look in self._looks] != self._seen or not self._in_place:
            self._put([save() for save in self._methods.saves])
        return self._in_place

    def load(self, saved: list[Any]) -> None:
        """Into the process, unless it lies there."""
        if saved is not self._in_place:
            for load, one in zip(self._methods.loads, saved, strict=True):
                load(one)
            self._put(saved)

    def _put(self, state: list[Any]) -> None:
        self._in_place = state
        self._looks = [look for register in self._registers for look in register.looks()]
        self._seen = [look() for look in self._looks]

    def start(self, start: Start) -> list[Any]:
        """The same list for all ranks, as long as they start with the same."""
        first = [of(start) for of in self._methods.starts]
        if not (self._first and all(map(is_, first, self._first))):
            self._first = first
        return self._first


def _sort(registers: Iterable[Register]) -> tuple[_Methods, _Quiet, _Methods]:
    registers = tuple(registers)
    quiet = tuple(register for register in registers if isinstance(register, QuietRegister))
    names = tuple(register for register in registers if isinstance(register, _NAMES))
    return _methods(r for r in registers if r not in quiet and r not in names), _Quiet(quiet), _methods(names)


_states, _quiet, _names = _sort(REGISTERS)


def use(registers: Iterable[Register]) -> None:
    """Isolate these and nothing else: the tests show with it what each register is for."""
    global _states, _quiet, _names
    _states, _quiet, _names = _sort(registers)


class Isolation:
    """One rank's own share of the process, or the caller's: in place while it runs, put away while another runs."""

    __slots__ = ("_kept", "_named", "_saved")

    def __init__(self, start: Start | None = None) -> None:
        """That of a rank that has yet to start; without `start`, that of whoever runs now, which stays in place."""
        self._saved = [] if start is None else [of(start) for of in _states.starts]
        self._kept = [] if start is None else _quiet.start(start)
        self._named = [save() for save in _names.saves] if start is None else [of(start) for of in _names.starts]

    def leave(self) -> None:
        """Put it away."""
        self._saved = [save() for save in _states.saves]
        self._kept = _quiet.save()

    def enter(self) -> None:
        """Put it back in place."""
        for load, saved in zip(_states.loads, self._saved):  # noqa: B905 - at every turn
            load(saved)
        if self._kept is not _quiet._in_place:
            _quiet.load(self._kept)
        for load, named in zip(_names.loads, self._named):  # noqa: B905
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
