"""Coalesced calls that gloo has in C++ but not in its Python class: the same, by those that it has there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor


class Works(dist.Work):
    """The handles of several collectives as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Until all are complete."""
        answers = [work.wait(timeout) if timeout else work.wait() for work in self._works]
        return all(answers)

    def is_completed(self) -> bool:
        """Whether all are."""
        return all(work.is_completed() for work in self._works)


def allgather_into_tensor_coalesced(inner: Any, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
    """As gloo: by the form with lists."""
    chunks = [output.chunk(inner.size()) for output in outputs]
    by_member = [[chunk[place] for chunk in chunks if place < len(chunk)] for place in range(inner.size())]
    return inner.allgather_coalesced(by_member, inputs, *([opts] if opts is not None else []))


def reduce_scatter_tensor_coalesced(inner: Any, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Works:
    """As gloo: one after the other."""
    more = [opts] if opts is not None else []
    return Works([inner._reduce_scatter_base(*pair, *more) for pair in zip(outputs, inputs, strict=True)])


COALESCED: dict[str, Callable[..., Any]] = {
    "allgather_into_tensor_coalesced": allgather_into_tensor_coalesced,
    "reduce_scatter_tensor_coalesced": reduce_scatter_tensor_coalesced,
}


def method_of(inner: Any, name: str) -> Callable[..., Any]:
    """Of a transport: its own, or what stands for it."""
    own: Callable[..., Any] | None = getattr(inner, name, None)
    if own is None and name in COALESCED:
        return lambda *arguments: COALESCED[name](inner, *arguments)
    return getattr(inner, name) if own is None else own
