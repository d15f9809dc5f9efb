"""RankContext: what a rank program may know of, and say to, the world that runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from tpbed.tp.errors import TestbedError
from tpbed.tp.recorder import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A collective on its way to the group: what a hook may look at, change or swallow."""

    method: str  # of the process group, e.g. "allgather"
    op: str  # as in torch.distributed, e.g. "all_gather"
    group: str
    seq: int  # the seq it will get
    outputs: Any  # as the process group takes them: nested lists of tensors, or None
    inputs: Any
    payload: Tensor | None  # the tensor that this rank contributes
    extra: tuple[Any, ...]  # the remaining arguments, options last


Hook = Callable[[Call], Call | None]
Death = Literal["kill", "crash", "exit", "exhaust", "stop", "stall"]


class NoWorldError(TestbedError):
    """The caller is not a rank program that a world is running."""


@dataclass(slots=True, kw_only=True)
class RankContext:
    """One rank in one run.

    hooks: called in order before a collective is recorded and issued; a hook returns the call, another call, or None
        to swallow it (the caller is then told that it completed); it may raise, sleep or end the rank.
    sleep: let seconds pass for this rank, on the clock of its world.
    die: end or freeze this rank as its world can: "kill", "crash" (SIGSEGV), "exit", "exhaust" (memory: raises what the
        allocator raises), "stop" or "stall" (never runs again, and says why).
    pause: let this rank be stopped from outside, and continued after seconds.
    """

    rank: int
    world_size: int
    recorder: Recorder
    sleep: Callable[[float], None]
    die: Callable[[Death, str], None]
    pause: Callable[[float], None]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    hooks: list[Hook] = field(default_factory=list)


_current: RankContext | None = None


def enter(context: RankContext | None) -> None:
    """Make `context` the one that the functions below speak for; worlds call this, rank programs do not."""
    global _current
    _current = context


def current() -> RankContext:
    """The rank that is running.

    Raises NoWorldError outside a rank program.
    """
    if _current is None:
        raise NoWorldError("no rank is running here: call this from a function that World.run executes.")
    return _current


def decision(name: str, value: object, because: str) -> None:
    """Log a choice that this rank took from facts of its own; ranks that choose differently are reported."""
    current().recorder.decision(name, value, because)


def step(label: str) -> None:
    """Say that a new step begins; ranks that meet in a collective with other labels are out of step."""
    current().recorder.step(label)


def check(condition: bool, message: str) -> None:
    """Assert and count it: a rank that checks less than its peers does not pass in silence.

    Raises AssertionError with `message` where the condition is false.
    """
    current().recorder.check()
    if not condition:
        raise AssertionError(message)
