"""Registers: pieces of a process that each simulated rank holds as its own; random generators are in tp/generators.py.

A `Register` is one such thing; a rank takes its own out when it gives way and puts it back when it goes on.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch.distributed import distributed_c10d as c10d
from torch.utils import _device

from tpbed.tp import rank as current_rank
from tpbed.tp.rank import RankContext

START_SEED = 0  # of every rank: processes that are forked from one parent start alike, too
_CUDA: Any = torch.cuda
_ENVIRON: Any = os.environ
_ENVIRONB: Any = os.environb


class RankGroups(c10d._World):
    """torch.distributed's book of process groups, for one rank; torch itself keeps one, in globals."""

    default_pg: Any = None  # asked for several times at every call: here a plain attribute
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


class Start(NamedTuple):
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


class NameRegister:
    """A register of a few names whose values a rank changes only in place: they are read once, and set at every turn.

    places: the namespaces and names, all of which get the same value.
    """

    places: tuple[tuple[dict[str, Any], str], ...]

    def save(self) -> Any:
        """The value."""
        namespace, name = self.places[0]
        return namespace[name]

    def load(self, saved: Any) -> None:
        """Set the names to the value of the caller, when all ranks have ended."""
        for namespace, name in self.places:
            namespace[name] = saved

    def start(self, start: Start) -> Any:
        """As Register."""
        raise NotImplementedError


class QuietRegister:
    """A register of what few ranks ever change, and with which all start alike."""

    def save(self) -> Any:
        """As Register."""
        raise NotImplementedError

    def load(self, saved: Any) -> None:
        """As Register."""
        raise NotImplementedError

    def start(self) -> Any:
        """As Register; the same object again where it can be."""
        raise NotImplementedError

    def looks(self) -> Sequence[Callable[[], Any]]:
        """Of what lies in the process now: answer the same as long as it is the same. `object` never does."""
        raise NotImplementedError


class TorchModes:
    """Grad and inference mode, autocast's switches, TorchFunction and TorchDispatch modes, the default device.

    An inference-mode guard holds, and on exit restores, the thread's whole autograd state and its dispatch keys: so a
    rank that gives way inside a C++ operator does not leave that operator's exclusions to the next one either.
    """

    def save(self) -> Any:
        """Leaves grad mode on, inference mode off, no modes and no default device."""
        guard = _GUARD(False)  # serves once
        guard.__enter__()
        return guard, (_take_modes() if _FUNCTION_MODES() or _DISPATCH_MODES() else None)

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


def _take_modes() -> Any:
    device = getattr(_device, "CURRENT_DEVICE", None), getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    taken = (
        [torch._C._pop_torch_function_stack() for _ in range(_FUNCTION_MODES())],
        [torch._C._pop_torch_dispatch_stack(None) for _ in range(_DISPATCH_MODES())],
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


class AutocastTypes(QuietRegister):
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
        if saved != self._loaded:
            for device, dtype in zip(_DEVICES, saved[:-1], strict=True):
                torch.set_autocast_dtype(device, dtype)
            torch.set_autocast_cache_enabled(saved[-1])
            self._loaded = saved

    def looks(self) -> Sequence[Callable[[], Any]]:
        """Where autocast is on, there may be casts to forget at every turn."""
        return (object,) if _ANY_AUTOCAST() else _AUTOCAST_LOOKS

    def start(self) -> Any:
        """torch's own defaults."""
        return _AUTOCAST_START


_DEVICES = ("cpu", "cuda")
_AUTOCAST_TYPE = torch.get_autocast_dtype
_KEEPS_CASTS = torch.is_autocast_cache_enabled
_AUTOCAST_START = (torch.bfloat16, torch.float16, True)
_AUTOCAST_LOOKS: Sequence[Callable[[], Any]] = (
    _ANY_AUTOCAST,
    *(partial(_AUTOCAST_TYPE, device) for device in _DEVICES),
    _KEEPS_CASTS,
)


class DefaultType(QuietRegister):
    """torch's default dtype."""

    def save(self) -> Any:
        """It."""
        return torch.get_default_dtype()

    def looks(self) -> Sequence[Callable[[], Any]]:
        """It."""
        return (torch.get_default_dtype,)

    def load(self, saved: Any) -> None:
        """Set it where it differs: setting is ten times as dear as asking."""
        if torch.get_default_dtype() is not saved:
            torch.set_default_dtype(saved)

    def start(self) -> Any:
        """torch's own default."""
        return torch.float32


class WarningFilters:
    """What catch_warnings replaces: the filters of the `warnings` module, and the functions that show a warning."""

    def __init__(self) -> None:
        self.save = partial(attrgetter("filters", *_WARNING_FUNCTIONS), warnings)  # the list itself, and the functions

    def load(self, saved: Any) -> None:
        """What warnings has found out with other filters is void."""
        module, (filters, show, record) = _WARNINGS, saved
        if module["filters"] is not filters:
            module["filters"] = filters
            _FILTERS_CHANGED()
        module["showwarning"], module["_showwarnmsg_impl"] = show, record

    def start(self, start: Start) -> Any:
        """A copy of the caller's."""
        return list(start.filters), *self.save()[1:]


_WARNINGS = vars(warnings)
_WARNING_FUNCTIONS = ("showwarning", "_showwarnmsg_impl")
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


class Environment(NameRegister):
    """os.environ, which is a view of one dict with os.environb.

    Each rank has its own; C's copy, which subprocesses inherit, holds what was written last.
    """

    places = ((vars(_ENVIRON), "_data"), (vars(_ENVIRONB), "_data"))

    def load(self, saved: Any) -> None:
        """C's copy follows."""
        super().load(saved)
        if Variables.written:
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


class Groups(NameRegister):
    """torch.distributed's book of process groups, which it looks up at every call."""

    places = ((vars(c10d), "_world"),)

    def start(self, start: Start) -> Any:
        """The rank's own."""
        return start.groups


class Context(NameRegister):
    """The rank that tpbed.tp.rank speaks for."""

    places = ((vars(current_rank), "_current"),)

    def start(self, start: Start) -> Any:
        """The rank's own."""
        return start.context
