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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.distributed import distributed_c10d as c10d
from torch.utils import _device

from tpbed.tp import rank as current_rank
from tpbed.tp.rank import RankContext

START_SEED = 0  # of every rank: processes that are forked from one parent start alike, too
_DEVICES = ("cpu", "cuda")  # autocast keeps a dtype for each
_TWISTER_BYTES = 2500  # 624 words and an index: a Mersenne twister in memory
_ENVIRON: Any = os.environ
_ENVIRONB: Any = os.environb


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
    variables: Mapping[str, str]  # added to the environment


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
        guard = torch._C._InferenceMode(False)
        guard.__enter__()
        functions = torch._C._len_torch_function_stack()
        dispatches = torch._C._len_torch_dispatch_stack()
        return guard, (_take_modes(functions, dispatches) if functions or dispatches else None)

    def load(self, saved: Any) -> None:
        """Modes first: the guard has the last word on dispatch keys."""
        guard, modes = saved
        if modes is not None:
            _put_modes(*modes)
        guard.__exit__(None, None, None)

    def start(self, start: Start) -> Any:
        """As in a process that has just imported torch."""
        if torch._C._is_any_autocast_enabled():
            for device in _DEVICES:
                torch.set_autocast_enabled(device, False)
        return self.save()


def _take_modes(functions: int, dispatches: int) -> Any:
    device = getattr(_device, "CURRENT_DEVICE", None), getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    taken = (
        [torch._C._pop_torch_function_stack() for _ in range(functions)],
        [torch._C._pop_torch_dispatch_stack() for _ in range(dispatches)],
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
    """The dtypes that autocast casts to, and whether it keeps casts; casts that one rank kept are not for another."""

    def __init__(self) -> None:
        self._loaded: Any = None

    def save(self) -> Any:
        """The same object again where nothing has changed."""
        if torch._C._is_any_autocast_enabled():
            torch.clear_autocast_cache()
        now = *map(torch.get_autocast_dtype, _DEVICES), torch.is_autocast_cache_enabled()
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
        return torch.bfloat16, torch.float16, True


class DefaultType:
    """torch's default dtype."""

    def save(self) -> Any:
        """It."""
        return torch.get_default_dtype()

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
        self._start = torch.Generator().manual_seed(START_SEED).get_state()

    def save(self) -> Any:
        """A copy of its state."""
        return torch.default_generator.get_state()

    def load(self, saved: Any) -> None:
        """Into the generator."""
        torch.default_generator.set_state(saved)

    def start(self, start: Start) -> Any:
        """As after torch.manual_seed(START_SEED)."""
        return self._start


class NumpyRandom:
    """NumPy's global generator.

    NumPy copies it in 25 us. Whether a rank has used it shows in the words of its twister, which are compared in place;
    only the second of two normal deviates leaves them as they are, and that one is known from the copy after the first.
    """

    def __init__(self) -> None:
        self._generator: Any = None
        self._memory: Any = None
        self._loaded: Any = (None, b"", None)  # generator, words of its twister, NumPy's own copy of its state
        state = np.random.RandomState(START_SEED).get_state(legacy=False)
        self._start = (np.random.MT19937(), _numpy_words(state), state)

    def save(self) -> Any:
        """The same object again where nothing has changed."""
        words = self._words()
        generator, known, state = self._loaded
        if generator is not self._generator or known != words or not words or state["has_gauss"]:
            self._loaded = (self._generator, words, np.random.get_state(legacy=False))
        return self._loaded

    def load(self, saved: Any) -> None:
        """Into the global generator; by its words where these say all."""
        known, self._loaded = self._loaded, saved
        if saved is known:
            return
        if self._words() and self._generator is saved[0] and not known[2]["has_gauss"] and not saved[2]["has_gauss"]:
            ctypes.memmove(self._memory, saved[1], _TWISTER_BYTES)
            return
        np.random.set_bit_generator(saved[0])
        np.random.set_state(saved[2])

    def start(self, start: Start) -> Any:
        """As after numpy.random.seed(START_SEED)."""
        generator = np.random.get_bit_generator()
        if generator is not self._start[0] and type(generator) is np.random.MT19937:
            self._start = (generator, *self._start[1:])
        return self._start

    def _words(self) -> bytes:
        generator = np.random.get_bit_generator()
        if generator is not self._generator:
            self._generator, self._memory = generator, _numpy_memory(generator)
        return b"" if self._memory is None else bytes(self._memory.raw)


def _numpy_words(state: Any) -> bytes:
    words = state["state"]
    return bytes(words["key"].tobytes() + int(words["pos"]).to_bytes(4, sys.byteorder))


def _numpy_memory(generator: Any) -> Any:
    """A view of the generator's state, whose address NumPy makes public; None where it is not what it should be."""
    if type(generator) is not np.random.MT19937:
        return None
    memory = (ctypes.c_char * _TWISTER_BYTES).from_address(generator.ctypes.state_address)
    return memory if memory.raw == _numpy_words(generator.state) else None


class PythonRandom:
    """The generator of the `random` module. Python copies it in 7 us; whether a rank has used it shows in its words."""

    def __init__(self) -> None:
        self._memory = _python_memory(random._inst)  # type: ignore[attr-defined]
        self._loaded: Any = (b"", ())
        fresh = random.Random(START_SEED)
        self._start = (_python_words(_python_memory(fresh)), fresh.getstate())

    def save(self) -> Any:
        """The same object again where nothing has changed."""
        words = _python_words(self._memory)
        if not words or words != self._loaded[0] or random._inst.gauss_next != self._loaded[1][2]:  # type: ignore[attr-defined]
            self._loaded = (words, random.getstate())
        return self._loaded

    def load(self, saved: Any) -> None:
        """Into the module."""
        if saved is not self._loaded:
            random.setstate(saved[1])
            self._loaded = saved

    def start(self, start: Start) -> Any:
        """As after random.seed(START_SEED)."""
        return self._start


def _python_memory(generator: random.Random) -> Any:
    """A view of CPython's generator, an index and its words; None where its layout is not that one."""
    memory = (ctypes.c_char * _TWISTER_BYTES).from_address(id(generator) + object.__basicsize__)
    *words, index = generator.getstate()[1]
    laid_out = b"".join(word.to_bytes(4, sys.byteorder) for word in (index, *words))
    return memory if type(generator).__basicsize__ >= object.__basicsize__ + _TWISTER_BYTES and memory.raw == laid_out else None


def _python_words(memory: Any) -> bytes:
    return b"" if memory is None else bytes(memory.raw)


class Variables(dict[bytes, bytes]):
    """A rank's environment variables. `written` are the names that ranks set or removed, and so in C's copy as well."""

    written: set[bytes] = set()

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
        """The caller's variables and the rank's."""
        added = {_ENVIRON.encodekey(name): _ENVIRON.encodevalue(value) for name, value in start.variables.items()}
        return Variables(_ENVIRON._data | added)


def _restore_c_environment(variables: Mapping[bytes, bytes]) -> None:
    for name in Variables.written:
        if name in variables:
            os.putenv(name, variables[name])
        else:
            os.unsetenv(name)
    Variables.written.clear()


class Cuda:
    """The current CUDA device, its stream and its generator, once CUDA is in use."""

    def save(self) -> Any:
        """None while it is not."""
        if not torch.cuda.is_initialized():
            return None
        stream = torch.cuda.current_stream()
        return stream, torch.cuda.default_generators[stream.device.index].get_state()

    def load(self, saved: Any) -> None:
        """None is the first device, with its default stream and a generator that is not used yet."""
        if not torch.cuda.is_initialized():
            return
        stream, state = saved or (torch.cuda.default_stream(0), None)
        torch.cuda.set_stream(stream)
        generator = torch.cuda.default_generators[stream.device.index]
        generator.manual_seed(START_SEED) if state is None else generator.set_state(state)

    def start(self, start: Start) -> Any:
        """None: a rank that never asks for CUDA does not start it."""
        return None


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
    Environment(),
    Cuda(),
    Groups(),
    Context(),
)


class Isolation:
    """One rank's own share of the process, or the caller's: in place while it runs, put away while another runs."""

    __slots__ = ("_saved",)

    def __init__(self, start: Start | None = None) -> None:
        """That of a rank that has yet to start; without `start`, that of whoever runs now."""
        self._saved: list[Any] = [] if start is None else [register.start(start) for register in REGISTERS]

    def leave(self) -> None:
        """Put it away."""
        self._saved = [save() for save in _SAVES]

    def enter(self) -> None:
        """Put it back in place."""
        for load, saved in zip(_LOADS, self._saved, strict=True):
            load(saved)


_SAVES: tuple[Callable[[], Any], ...]
_LOADS: tuple[Callable[[Any], None], ...]


def use(registers: tuple[Register, ...]) -> None:
    """Isolate these and nothing else: the tests show with it what each register is for."""
    global REGISTERS, _SAVES, _LOADS
    REGISTERS = registers
    _SAVES = tuple(register.save for register in registers)
    _LOADS = tuple(register.load for register in registers)


use(REGISTERS)
