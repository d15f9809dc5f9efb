"""FunctionalSeam: functional collectives of simulated ranks, which wait before they enter an operator of torch.ops.

They are issued inside an operator, which waits for nothing. What waits is the operator wait_tensor, in which no rank
may give way to another; so its rank waits first, in Python, for what the tensor is to hold. An AsyncCollectiveTensor
that is given to another operator is waited for in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional


class Pending:
    """Collectives that were issued inside an operator, by the memory that they write to; as torch keeps them in C++."""

    def __init__(self) -> None:
        self._handles: dict[int, tuple[Tensor, dist.Work]] = {}

    def __len__(self) -> int:
        return len(self._handles)

    def add(self, tensors: Iterable[Tensor], handle: dist.Work) -> None:
        """A collective that writes to these was issued."""
        for tensor in tensors:
            self._handles[_memory_of(tensor)] = tensor, handle

    def wait(self, tensor: Tensor) -> None:
        """Until what is to be in `tensor` is there."""
        inner = tensor.elem if isinstance(tensor, functional.AsyncCollectiveTensor) else tensor
        memory = _memory_of(inner)
        if memory in self._handles:
            self._handles[memory][1].wait()  # if that is for ever, torch must be told to forget it, too
            self._handles.pop(memory, None)

    def dissolve(self) -> None:
        """Have torch forget what was never waited for: it drops a handle, and only then waits on it, here in vain."""
        for tensor, _ in self._handles.values():
            with suppress(Exception):
                torch.ops._c10d_functional.wait_tensor(tensor)
        self._handles.clear()


def _memory_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def functional_replacements(pending: Pending) -> list[tuple[Any, str, Any]]:
    """What to put in the place of what: object, name, new value."""
    return [
        (functional, "wait_tensor", _waiting_first(functional.wait_tensor, pending)),
        (torch._ops.OpOverload, "__call__", _waiting_for_arguments(torch._ops.OpOverload.__call__, pending)),
        (
            torch._ops.OpOverloadPacket,
            "__call__",
            _waiting_for_arguments(torch._ops.OpOverloadPacket.__call__, pending),
        ),
    ]


def _waiting_first(wait_tensor: Callable[[Tensor], Tensor], pending: Pending) -> Callable[[Tensor], Tensor]:
    def wait(tensor: Tensor) -> Tensor:
        pending.wait(tensor)
        return wait_tensor(tensor)

    return wait


def _waiting_for_arguments(call: Callable[..., Any], pending: Pending) -> Callable[..., Any]:
    def called(op: Any, /, *args: Any, **kwargs: Any) -> Any:
        if pending:
            _wait_for(args, op, pending)
        return call(op, *args, **kwargs)

    return called


def _wait_for(arguments: Sequence[Any], op: Any, pending: Pending) -> None:
    """For those of the arguments that the operator would wait for."""
    waits = str(op).endswith(("wait_tensor", "wait_tensor.default"))
    for argument in arguments:
        if isinstance(argument, functional.AsyncCollectiveTensor):
            if not _is_view(op):
                argument.trigger_wait()  # type: ignore[no-untyped-call]
        elif waits:
            pending.wait(argument)
        elif isinstance(argument, (list, tuple)):
            _wait_for(argument, op, pending)


def _is_view(op: Any) -> bool:
    return isinstance(op, torch._ops.OpOverload) and bool(functional._is_view_op(op))  # type: ignore[no-untyped-call]
