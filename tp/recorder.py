"""Recorder: writes one rank's events, each before the thing it tells of can block or kill the rank."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import typing_extensions
from torch import Tensor

from tpbed.tp.ledger import END_FIELDS, PENDING, End, Event, Rendezvous, State

Sink = Callable[[Event], None]
Clock = Callable[[], int]  # nanoseconds, or any count that never goes back

_FIELDS_OF_END = attrgetter(*END_FIELDS)
_RETURNED = _FIELDS_OF_END(End(how="returned"))[:-1]  # all but the time
_NOTHING: tuple[str, list[int], list[int], int] = ("", [], [], 0)  # the layout of no tensor
_HERE = str(Path(__file__).parent)
_BETWEEN = tuple(str(module.__file__) for module in (contextlib, typing_extensions))  # wrap functions of torch
_SKIP = (_HERE, str(Path(torch.__file__).parent), "<frozen", *_BETWEEN)


class Recorder:
    """One rank's pen: `sink` takes each event at once, `clock` dates it."""

    __slots__ = ("_clock", "_sink", "message_seqs", "seqs")

    def __init__(self, sink: Sink, clock: Clock) -> None:
        self._sink = sink
        self._clock = clock
        self.seqs: dict[str, int] = {}  # the last seq issued in each group
        self.message_seqs: dict[str, int] = {}

    def rendezvous(self, where: Rendezvous) -> None:
        """How far the rank is on its way to the group that is to be formed."""
        self._sink(("rendezvous", where))

    def group(self, name: str, ranks: Sequence[int]) -> None:
        """A process group was formed; ranks are global, in group order."""
        self.seqs.setdefault(name, 0)
        self.message_seqs.setdefault(name, 0)
        self._sink(("group", name, tuple(ranks)))  # as it is where it is one: a thousand ranks share it

    def start(
        self,
        group: str,
        op: str,
        payload: Tensor | None,
        reduce_op: str = "",
        root: int | None = None,
        waited: bool = True,
        state: State = "started",
    ) -> int:
        """A collective is about to be issued. Returns its seq."""
        if (pending := sys.exception()) is not None:
            self.mark(PENDING, [type(pending).__name__, str(pending), error_site(pending)])
        seq = self.seqs[group] = self.seqs[group] + 1
        site = call_site(sys._getframe(1))
        dtype, shape, stride, size = _NOTHING if payload is None else _layout(payload)
        self._sink(
            ("start", group, seq, op, dtype, shape, stride, size, reduce_op, root, site, waited, state, self._clock())
        )
        return seq

    def state(self, group: str, seq: int, state: State, error: str = "") -> None:
        """A collective changed its state."""
        self._sink(("state", group, seq, state, error, self._clock()))

    def wait(self, group: str, seq: int) -> None:
        """The rank blocks on a collective that it had issued without waiting."""
        self._sink(("wait", group, seq))

    def ask(self, group: str, seq: int) -> None:
        """The rank asked whether a collective is complete, and it was not."""
        self._sink(("ask", group, seq))

    def message(self, group: str, op: str, peer: int | None, tag: int, payload: Tensor) -> int:
        """A message is about to be sent or received; peer as in MessageRecord. Returns its seq."""
        seq = self.message_seqs[group] = self.message_seqs[group] + 1
        site = call_site(sys._getframe(1))
        self._sink(("message", group, seq, op, peer, tag, *_layout(payload), site, self._clock()))
        return seq

    def message_state(self, group: str, seq: int, state: State, error: str = "") -> None:
        """A message was sent or received, or failed."""
        self._sink(("message_state", group, seq, state, error, self._clock()))

    def message_wait(self, group: str, seq: int) -> None:
        """The rank blocks until a message is sent or received."""
        self._sink(("message_wait", group, seq))

    def message_from(self, group: str, seq: int, source: int) -> None:
        """Who sent it, where anybody might have."""
        self._sink(("message_from", group, seq, source))

    def decision(self, name: str, value: object, because: str) -> None:
        """The rank chose `value` for `name` from facts of its own."""
        self._sink(("decision", name, str(value), because, call_site(sys._getframe(1))))

    def mark(self, name: str, value: Any) -> None:
        """A named fact for the harness; `value` is made of plain values that JSON can hold."""
        self._sink(("mark", name, value))

    def step(self, label: str) -> None:
        """A new step of the rank program begins."""
        self._sink(("step", label))

    def check(self, count: int = 1) -> None:
        """The rank made `count` checks of its own results."""
        self._sink(("check", count))

    def end(self, end: End) -> None:
        """The rank ended."""
        self._sink(("end", *_FIELDS_OF_END(end)))

    def returned(self) -> None:
        """The rank program returned."""
        self._sink(("end", *_RETURNED, self._clock()))

    def raised(self, error: BaseException) -> None:
        """The rank program raised; the site is the innermost frame outside torch and tpbed.tp."""
        self.end(
            End(
                how="raised",
                error_type=type(error).__name__,
                message=str(error),
                site=error_site(error),
                traceback=_own_traceback(error),
                at_ns=self._clock(),
            )
        )


def _own_traceback(error: BaseException) -> str:
    """The traceback from the rank program on: the frames of the world that called it say nothing."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename.startswith(_HERE):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _layout(payload: Tensor) -> tuple[str, list[int], list[int], int]:
    return _name(payload.dtype), list(payload.shape), list(payload.stride()), payload.numel() * payload.element_size()


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def call_site(frame: FrameType | None) -> str:
    """`file:line function` of the nearest frame outside torch and tpbed.tp; the file with its folder."""
    while frame is not None and _is_skipped(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else _site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def error_site(error: BaseException) -> str:
    """`file:line function` of the innermost frame of an error outside torch and tpbed.tp.

    Nor in functions that hide themselves by the convention of pytest, as pytest.fail and helpers of assertions do.
    """
    frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if not _is_hidden(frame)]
    return _site(frames[-1][0].f_code.co_filename, frames[-1][1], frames[-1][0].f_code.co_name) if frames else ""


def _is_hidden(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_SKIP) or bool(frame.f_locals.get("__tracebackhide__"))


@cache
def _site(filename: str, line: int, function: str) -> str:
    return f"{_with_folder(filename)}:{line} {function}"


@cache
def _is_skipped(filename: str) -> bool:
    return filename.startswith(_SKIP)


@cache
def _with_folder(filename: str) -> str:
    return "/".join(Path(filename).parts[-2:])
