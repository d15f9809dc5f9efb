"""Isolation: what is saved and restored when one simulated rank gives way to another.

Ranks of a simulated world share one thread, so all that belongs to a process or to a thread belongs to all of them,
unless a register says otherwise. What has no register is shared: modules and their globals, threading.local, the file
system and the current directory, the C environment that subprocesses inherit, sys.stdout, and torch's process-wide
switches (threads, deterministic algorithms, matmul precision, backends). Context variables need none: greenlets keep
them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import call
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
    NameRegister,
    QuietRegister,
    Register,
    Start,
    TorchModes,
    WarningFilters,
)

REGISTERS: tuple[Register | NameRegister | QuietRegister, ...] = (
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


class _Methods(NamedTuple):
    """Of some registers, looked up once, since they are called at every turn."""

    saves: tuple[Callable[[], Any], ...]
    loads: tuple[Callable[[Any], Any], ...]
    starts: tuple[Callable[..., Any], ...]


def _methods(registers: Iterable[Register | NameRegister | QuietRegister]) -> _Methods:
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
        self.in_place: list[Any] = []  # what lies in the process
        self.looks: list[Callable[[], Any]] = [object]
        self.seen: list[Any] = []  # by them

    def save(self) -> list[Any]:
        """The same list again where nothing has changed."""
        if list(map(call, self.looks)) != self.seen:
            self._put(list(map(call, self._methods.saves)))
        return self.in_place

    def load(self, saved: list[Any]) -> None:
        """Into the process, unless it lies there."""
        if saved is not self.in_place:
            for load, one in zip(self._methods.loads, saved, strict=True):
                load(one)
            self._put(saved)

    def _put(self, state: list[Any]) -> None:
        self.in_place = state
        self.looks = [look for register in self._registers for look in register.looks()]
        self.seen = list(map(call, self.looks))

    def start(self) -> list[Any]:
        """What ranks start with, the same list for all of a run."""
        return list(map(call, self._methods.starts))


def _sort(registers: Iterable[Any]) -> tuple[_Methods, _Quiet, tuple[NameRegister, ...]]:
    registers = tuple(registers)
    quiet = tuple(register for register in registers if isinstance(register, QuietRegister))
    names = tuple(register for register in registers if isinstance(register, NameRegister))
    return _methods(r for r in registers if r not in quiet and r not in names), _Quiet(quiet), names


_states, _quiet, _names = _sort(REGISTERS)


def use(registers: Iterable[Any]) -> None:
    """Isolate these and nothing else: the tests show with it what each register is for."""
    global _states, _quiet, _names
    _states, _quiet, _names = _sort(registers)


class Isolation:
    """One rank's own share of the process: in place while it runs, put away while another runs."""

    __slots__ = ("_kept", "_named", "_saved")

    def __init__(self, start: Start, kept: list[Any]) -> None:
        """That of a rank that has yet to start; kept: what `quiet_start` gives all ranks of a run."""
        self._saved = [of(start) for of in _states.starts]
        self._kept = kept
        self._named: list[tuple[dict[str, Any], str, Any]] = []
        for register in _names:
            value = register.start(start)
            for namespace, name in register.places:
                self._named.append((namespace, name, value))

    def leave(self) -> None:
        """Put it away."""
        self._saved = list(map(call, _states.saves))
        unchanged = list(map(call, _quiet.looks)) == _quiet.seen
        self._kept = _quiet.in_place if unchanged else _quiet.save()

    def enter(self) -> None:
        """Put it back in place."""
        for load, saved in zip(_states.loads, self._saved):  # noqa: B905 - at every turn
            load(saved)
        if self._kept is not _quiet.in_place:
            _quiet.load(self._kept)
        for namespace, name, value in self._named:
            namespace[name] = value


def quiet_start() -> list[Any]:
    """What all ranks of a run start with alike; called when the caller's own has been put away."""
    return _quiet.start()


class CallersOwn:
    """The share of the process that a world's caller has, put away while ranks run."""

    def __init__(self) -> None:
        self._named = [register.save() for register in _names]
        self._saved = list(map(call, _states.saves))
        self._kept = _quiet.save()

    def put_back(self) -> None:
        """In place, as it was."""
        for load, saved in zip(_states.loads, self._saved, strict=True):
            load(saved)
        _quiet.load(self._kept)
        for register, value in zip(_names, self._named, strict=True):
            register.load(value)


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
