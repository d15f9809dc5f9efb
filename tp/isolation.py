"""Isolation: what is saved and restored when one simulated rank gives way to another.

Ranks of a simulated world share one thread, so all that belongs to a process or to a thread belongs to all of them. A
`Register` is one such thing; a rank takes its own out when it gives way and puts it back when it goes on. What has no
register is shared: modules and their globals, threading.local, the file system and the current directory, the C
environment that subprocesses inherit, sys.stdout, and torch's process-wide switches (threads, deterministic algorithms,
matmul precision, backends). Context variables need none: greenlets keep them apart.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch.distributed import distributed_c10d as c10d
from torch.utils import _device

from tpbed.tp import rank as current_rank
from tpbed.tp.rank import RankContext

START_SEED = 0  # of every rank: processes that are forked from one parent start alike, too
_TWISTER_BYTES = 2500  # 624 words and an index: a Mersenne twister in memory
_GLANCE_BYTES = 68  # of it: the index and 16 words
_CUDA: Any = torch.cuda
_ENVIRON: Any = os.environ
_ENVIRONB: Any = os.environb
_NUMPY: Any = np.random
_PYTHON: Any = vars(random)["_inst"]


class RankGroups(c10d._World):
    """torch.distributed's book of process groups, for one rank; torch itself keeps one, in globals."""

    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None
    group_count: Any = 0

    def __init__(self) -> None:
        super().__init__()
        self.pg_map, self.pg_names, self.pg_group_ranks = {}, {}, {}
        self.pg_backend_config, self.tags_to_pg, self.pg_to_tag = {}, {}, {}


@dataclass(frozen=True, slots=True)
class Start:
    """What a rank starts with that its peers do not have."""

    context: RankContext
    groups: RankGroups
    variables: Mapping[bytes, bytes]  # the whole environment
    filters: Sequence[Any]  # of warnings


class Register(Protocol):
    """A piece of the process that a rank holds as its own while it runs."""

    def save(self) -> Any:
        """What the running rank leaves behind."""
        ...

    def load(self, saved: Any) -> None:
        """Put back, once, what `save` or `start` returned, whatever is there now."""
        ...

    def start(self, start: Start) -> Any:
        """What a rank finds when it starts; called when the caller's own has been saved."""
        ...


class TorchModes:
    """Grad and inference mode, autocast's switches, TorchFunction and TorchDispatch modes, the default device.

    An inference-mode guard holds, and on exit restores, the thread's whole autograd state and its dispatch keys: so a
    rank that gives way inside a C++ operator does not leave that operator's exclusions to the next one either.
    """

    def save(self) -> Any:
        """Leaves grad mode on, inference mode off, no modes and no default device."""
        guard = _GUARD(False)  # serves once
        guard.__enter__()
        functions, dispatches = _FUNCTION_MODES(), _DISPATCH_MODES()
        return guard, (_take_modes(functions, dispatches) if functions or dispatches else None)

    def load(self, saved: Any) -> None:
        """Modes first: the guard has the last word on dispatch keys."""
        guard, modes = saved
        if modes is not None:
            _put_modes(*modes)
        guard.__exit__(None, None, None)

    def start(self, start: Start) -> Any:
        """As in a process that has just imported torch."""
        if _ANY_AUTOCAST():
            for device in _DEVICES:
                torch.set_autocast_enabled(device, False)
        return self.save()


_GUARD: Any = torch._C._InferenceMode
_FUNCTION_MODES = torch._C._len_torch_function_stack
_DISPATCH_MODES = torch._C._len_torch_dispatch_stack
_ANY_AUTOCAST = torch._C._is_any_autocast_enabled


def _take_modes(functions: int, dispatches: int) -> Any:
    device = getattr(_device, "CURRENT_DEVICE", None), getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    taken = (
        [torch._C._pop_torch_function_stack() for _ in range(functions)],
        [torch._C._pop_torch_dispatch_stack(None) for _ in range(dispatches)],
        device,
    )
    _device.CURRENT_DEVICE = torch._GLOBAL_DEVICE_CONTEXT.device_context = None
    return taken


def _put_modes(functions: list[Any], dispatches: list[Any], device: tuple[Any, Any]) -> None:
    for mode in reversed(functions):
        torch._C._push_on_torch_function_stack(mode)
    for mode in reversed(dispatches):
        torch._C._push_on_torch_dispatch_stack(mode)
    _device.CURRENT_DEVICE, torch._GLOBAL_DEVICE_CONTEXT.device_context = device


class AutocastTypes:
    """The dtypes that autocast casts to, and whether it keeps casts; what one rank has kept is not for another."""

    def __init__(self) -> None:
        self._loaded: Any = None

    def save(self) -> Any:
        """The same object again where nothing has changed."""
        if _ANY_AUTOCAST():
            torch.clear_autocast_cache()
        now = _AUTOCAST_TYPE("cpu"), _AUTOCAST_TYPE("cuda"), _KEEPS_CASTS()
        if now != self._loaded:
            self._loaded = now
        return self._loaded

    def load(self, saved: Any) -> None:
        """Both dtypes and the switch."""
        if saved is not self._loaded:
            for device, dtype in zip(_DEVICES, saved[:-1], strict=True):
                torch.set_autocast_dtype(device, dtype)
            torch.set_autocast_cache_enabled(saved[-1])
            self._loaded = saved

    def start(self, start: Start) -> Any:
        """torch's own defaults."""
        return _AUTOCAST_START


_DEVICES = ("cpu", "cuda")
_AUTOCAST_TYPE = torch.get_autocast_dtype
_KEEPS_CASTS = torch.is_autocast_cache_enabled
_AUTOCAST_START = (torch.bfloat16, torch.float16, True)


class DefaultType:
    """torch's default dtype."""

    save = staticmethod(torch.get_default_dtype)

    def load(self, saved: Any) -> None:
        """Set it where it differs: setting is ten times as dear as asking."""
        if torch.get_default_dtype() is not saved:
            torch.set_default_dtype(saved)

    def start(self, start: Start) -> Any:
        """torch's own default."""
        return torch.float32


class TorchRandom:
    """torch's default CPU generator: 5 KB, cheaper to copy than to compare."""

    def __init__(self) -> None:
        self.save: Callable[[], Any] = torch.default_generator.get_state
        self.load: Callable[[Any], Any] = torch.default_generator.set_state
        self._start = torch.Generator().manual_seed(START_SEED).get_state()

    def start(self, start: Start) -> Any:
        """As after torch.manual_seed(START_SEED)."""
        return self._start


class NumpyRandom:
    """NumPy's global generator.

    NumPy copies it in 25 us. Whether a rank has used it shows in the tail of its twister, which is compared in place;
    only the second of two normal deviates leaves that as it is, and it is known from the copy made after the first.
    """

    def __init__(self) -> None:
        self._generator: Any = None
        self._twister: Any = None
        self._loaded: Any = (None, b"", None)  # generator, words of its twister, NumPy's own copy of its state
        state = np.random.RandomState(START_SEED).get_state(legacy=False)
        self._start = (np.random.MT19937(), _numpy_words(state), state)

    def save(self) -> Any:
        """The same object again where nothing has changed."""
        now, (generator, words, state) = self._look(), self._loaded
        if generator is not self._generator or not now or not words.endswith(now) or state["has_gauss"]:
            words = self._twister.words.raw if self._twister else b""
            self._loaded = (self._generator, words, _NUMPY.get_state(legacy=False))
        return self._loaded

    def load(self, saved: Any) -> None:
        """Into the global generator; by its words where these say all."""
        known, self._loaded = self._loaded, saved
        if saved is known:
            return
        if self._look() and self._generator is saved[0] and not known[2]["has_gauss"] and not saved[2]["has_gauss"]:
            ctypes.memmove(self._twister.words, saved[1], _TWISTER_BYTES)
            return
        _NUMPY.set_bit_generator(saved[0])
        _NUMPY.set_state(saved[2])

    def start(self, start: Start) -> Any:
        """As after numpy.random.seed(START_SEED)."""
        generator = _NUMPY.get_bit_generator()
        if generator is not self._start[0] and type(generator) is np.random.MT19937:
            self._start = (generator, *self._start[1:])
        return self._start

    def _look(self) -> bytes:
        generator = _NUMPY.get_bit_generator()
        if generator is not self._generator:
            self._generator, self._twister = generator, _numpy_twister(generator)
        return self._twister.tail.raw if self._twister else b""


class _Twister:
    """A Mersenne twister in memory. Every draw moves its index, or renews all words: a few of them tell."""

    __slots__ = ("head", "tail", "words")

    def __init__(self, address: int) -> None:
        self.words = (ctypes.c_char * _TWISTER_BYTES).from_address(address)
        self.head = (ctypes.c_char * _GLANCE_BYTES).from_address(address)
        self.tail = (ctypes.c_char * _GLANCE_BYTES).from_address(address + _TWISTER_BYTES - _GLANCE_BYTES)


def _numpy_words(state: Any) -> bytes:
    words = state["state"]
    return bytes(words["key"].tobytes() + int(words["pos"]).to_bytes(4, sys.byteorder))


def _numpy_twister(generator: Any) -> _Twister | None:
    """The generator's memory, at the address that NumPy makes public; None where it is not laid out as it should be."""
    if type(generator) is not np.random.MT19937:
        return None
    twister = _Twister(generator.ctypes.state_address)
    return twister if twister.words.raw == _numpy_words(generator.state) else None


class PythonRandom:
    """The generator of the `random` module. Python copies it in 7 us; whether a rank has used it shows in its head."""

    def __init__(self) -> None:
        self._twister = _python_twister(_PYTHON)
        self._loaded: Any = (b"", ())
        start = random.Random(START_SEED)
        self._start = (_python_words(start.getstate())[:_GLANCE_BYTES], start.getstate())

    def save(self) -> Any:
        """The same object again where nothing has changed."""
        now, (head, state) = self._twister.head.raw if self._twister else b"", self._loaded
        if now != head or not now or _PYTHON.gauss_next != state[2]:
            self._loaded = (now, random.getstate())
        return self._loaded

    def load(self, saved: Any) -> None:
        """Into the module."""
        if saved is not self._loaded:
            random.setstate(saved[1])
            self._loaded = saved

    def start(self, start: Start) -> Any:
        """As after random.seed(START_SEED)."""
        return self._start


def _python_words(state: Any) -> bytes:
    *words, index = state[1]
    return b"".join(word.to_bytes(4, sys.byteorder) for word in (index, *words))


def _python_twister(generator: random.Random) -> _Twister | None:
    """The generator's memory; None where this Python does not lay it out as an index and its words."""
    header = object.__basicsize__
    if type(generator).__basicsize__ < header + _TWISTER_BYTES:
        return None
    twister = _Twister(id(generator) + header)
    return twister if twister.words.raw == _python_words(generator.getstate()) else None


class WarningFilters:
    """The filters of the `warnings` module, which catch_warnings replaces and the others change in place."""

    def save(self) -> Any:
        """The list itself."""
        return warnings.filters

    def load(self, saved: Any) -> None:
        """What warnings has found out with other filters is void."""
        if warnings.filters is not saved:
            warnings.filters = saved
            _FILTERS_CHANGED()

    def start(self, start: Start) -> Any:
        """A copy of the caller's."""
        return list(start.filters)


_FILTERS_CHANGED: Callable[[], None] = vars(warnings).get("_filters_mutated", lambda: None)


class Cuda:
    """The current CUDA device, its stream and its generator, once CUDA is in use."""

    def save(self) -> Any:
        """None while it is not."""
        if not _CUDA.is_initialized():
            return None
        stream = _CUDA.current_stream()
        return stream, _CUDA.default_generators[stream.device.index].get_state()

    def load(self, saved: Any) -> None:
        """None is the first device, with its default stream and a generator that is not used yet."""
        if not _CUDA.is_initialized():
            return
        stream, state = saved or (_CUDA.default_stream(0), None)
        _CUDA.set_stream(stream)
        generator = _CUDA.default_generators[stream.device.index]
        generator.manual_seed(START_SEED) if state is None else generator.set_state(state)

    def start(self, start: Start) -> Any:
        """None: a rank that never asks for CUDA does not start it."""
        return None


class Variables(dict[bytes, bytes]):
    """A rank's environment variables. `written` are the names that ranks set or removed, and so in C's copy as well."""

    written: ClassVar[set[bytes]] = set()

    def __setitem__(self, name: bytes, value: bytes) -> None:
        self.written.add(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: bytes) -> None:
        super().__delitem__(name)
        self.written.add(name)


class Environment:
    """os.environ. Each rank has its own; C's copy, which subprocesses inherit, holds what was written last."""

    def save(self) -> Any:
        """The variables themselves."""
        return _ENVIRON._data

    def load(self, saved: Any) -> None:
        """os.environ and os.environb are two views of one dict; where it is the caller's, C's copy follows it."""
        _ENVIRON._data = _ENVIRONB._data = saved
        if Variables.written and not isinstance(saved, Variables):
            _restore_c_environment(saved)

    def start(self, start: Start) -> Any:
        """The rank's own."""
        return Variables(start.variables)


def environment() -> dict[bytes, bytes]:
    """A copy of the variables in place."""
    return dict(_ENVIRON._data)


def _restore_c_environment(variables: Mapping[bytes, bytes]) -> None:
    for name in Variables.written:
        if name in variables:
            os.putenv(name, variables[name])
        else:
            os.unsetenv(name)
    Variables.written.clear()


class Groups:
    """torch.distributed's book of process groups."""

    def save(self) -> Any:
        """It."""
        return c10d._world

    def load(self, saved: Any) -> None:
        """torch.distributed looks it up at every call."""
        c10d._world = saved

    def start(self, start: Start) -> Any:
        """The rank's own."""
        return start.groups


class Context:
    """The rank that tpbed.tp.rank speaks for."""

    def save(self) -> Any:
        """Its context."""
        return current_rank._current

    def load(self, saved: Any) -> None:
        """Make it the current one."""
        current_rank.enter(saved)

    def start(self, start: Start) -> Any:
        """The rank's own."""
        return start.context


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
