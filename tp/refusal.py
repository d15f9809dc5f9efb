"""Refusal: what a simulated world cannot do, and says so by name where a program asks for it.

A rank cannot wait inside an operator of torch.ops, backward(), a future's callback or a graph capture, and is told so;
inside a callback from C++ that is not known here, it would abort the process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.distributed import distributed_c10d as c10d

from tpbed.tp.errors import TestbedError


class UnsupportedCollectiveError(TestbedError):
    """A simulated world cannot do this, though a real one may."""


def refusing(what: str) -> Callable[..., NoReturn]:
    """A function that raises UnsupportedCollectiveError and names `what`."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise UnsupportedCollectiveError(
            f"{what} is not simulated: use the collectives that SimulatedGroup has, or run the program in a real world."
        )

    return refuse


class RefusedStore(c10d.Store):
    """Stands where torch.distributed wants a store; a rank that waited for a key in C++ would stop the whole world."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing waits here."""


_REFUSED_STORE = "set get add wait check compare_set delete_key num_keys append multi_get multi_set"
for _name in _REFUSED_STORE.split():
    setattr(RefusedStore, _name, refusing(f"Store.{_name}"))


def cannot_wait() -> str:
    """What the caller is in that cannot be left in the middle, for another rank may enter it meanwhile; "" if nothing.

    torch's Python binding and its autograd engine keep a stack per thread; ranks that leave them in another order than
    they entered would abort the process, or run each other's backward passes.
    """
    if torch._C._current_graph_task_id() != -1:
        return "backward()"
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        return "the capture of a CUDA graph"
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        functions = _INTO_CPP.get(frame.f_code.co_filename)
        if functions is not None and frame.f_code.co_qualname in functions:
            return functions[frame.f_code.co_qualname]
        frame = frame.f_back
    return ""


_WAYS_INTO_CPP: dict[str, tuple[Any, ...]] = {  # through torch's binding and back into Python
    "an operator of torch.ops": (
        torch._ops.OpOverload.__call__,
        torch._ops.OpOverload.redispatch,
        torch._ops.OpOverloadPacket.__call__,
    ),
    "a callback of a future": (
        torch.futures.Future.then,
        torch.futures.Future.add_done_callback,
        torch.futures.Future.set_result,
    ),
}
_INTO_CPP: dict[str, dict[str, str]] = {}  # what, by file and function
for _what, _ways in _WAYS_INTO_CPP.items():
    for _way in _ways:
        _INTO_CPP.setdefault(_way.__code__.co_filename, {})[_way.__code__.co_qualname] = _what
