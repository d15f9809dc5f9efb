"""Injector: fires the faults planned for one rank, through what the harness hands to it - head, top-k, group, rows."""

from __future__ import annotations

import errno
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import UnionType
from typing import Any, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from tpbed.harness import mutant_topks
from tpbed.harness.faults import (
    FIRED,
    Absent,
    CollectiveFault,
    Corrupt,
    Crash,
    Delay,
    Exhaust,
    Exit,
    Extra,
    Fact,
    HeadFault,
    Kill,
    Late,
    Leave,
    Linger,
    Narrow,
    Nudge,
    OtherTopK,
    Pause,
    Quit,
    Raise,
    Recast,
    Rows,
    Skip,
    Spin,
    Stall,
    Stop,
    Strided,
    Unmasked,
    describe,
)
from tpbed.harness.head_faults import give_head
from tpbed.harness.inputs import held_shard
from tpbed.harness.mutant_heads import HEADS
from tpbed.harness.plan import Plan
from tpbed.harness.scenario import Scenario
from tpbed.selector.topk import TopK, canonical_topk, contract_topk, default_topk, torch_topk
from tpbed.selector.triton_topk import triton_topk
from tpbed.tp.errors import TestbedError
from tpbed.tp.rank import Call, RankContext

TOPKS: dict[str, TopK | type[Any] | None] = {
    "contract": contract_topk,
    "torch": torch_topk,
    "canonical": canonical_topk,
    "triton": triton_topk,
    "default": None,
    **mutant_topks.TOPKS,
}
F = TypeVar("F")


class TopKError(TestbedError):
    """A name that no top-k has."""


def check_topks(scenario: Scenario) -> None:
    """Raise TopKError for a top-k that there is not, of the scenario or of one rank, before anything is run."""
    named = [scenario.topk, *(fault.topk for fault in scenario.faults if isinstance(fault, OtherTopK))]
    for name in named:
        if name not in TOPKS:
            raise TopKError(f"{scenario.name}: there is no top-k {name!r}: give one of {', '.join(TOPKS)}.")


class InjectedError(RuntimeError):
    """What a rank raises because a fault says so."""


class Injector:
    """The faults of one rank in one run. Every one that fires is marked in the rank's ledger before it strikes."""

    def __init__(self, plan: Plan, context: RankContext) -> None:
        self._plan, self._context = plan, context
        self._faults = [(i, f) for i, f in enumerate(plan.scenario.faults) if f.rank == context.rank]
        self._fired: Counter[int] = Counter()
        self._step, self._struck = 0, -1
        self._width = 0
        self._overwrites = _overwrites_of(plan, context.rank)
        self._topks: dict[str, TopK] = {}

    def arrive(self) -> None:
        """What befalls this rank before it comes to the rendezvous of the group."""
        for absent in self._take(Absent):
            if absent.how == "port":
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            self._context.die(absent.how, "outside the rendezvous")
        for late in self._take(Late):
            self._context.sleep(late.seconds)

    def teardown(self) -> None:
        """What befalls this rank after its last step."""
        for fault in self._take(Linger):
            if fault.seconds is None:
                self._context.die("stall", "in its teardown")
            else:
                self._context.sleep(fault.seconds)

    def begin_step(self, step: int) -> bool:
        """Say which step begins. Returns False if the rank is to leave instead."""
        self._step = step
        return not self._take(Leave)

    def rows(self) -> int | None:
        """How many rows this rank believes that the step has; None if it knows."""
        return next((fault.rows for fault in self._take(Rows)), None)

    def head(self) -> Any:
        """The lm_head that this rank is given."""
        head = give_head(self._plan, self._context.rank, self._take(HeadFault), self._context.device)
        self._width = head.shard.width
        change = self._plan.scenario.head_change
        return HEADS[change](head, self._plan) if change else head

    def fact(self, name: str, usual: Any) -> Any:
        """What this rank finds out for itself under a name: `usual`, unless a fault says otherwise."""
        for index, fault in self._faults:
            if isinstance(fault, Fact) and fault.name == name and fault.step in (None, self._step):
                self._mark(index)
                return fault.value
        return usual

    def topk(self) -> TopK:
        """The top-k that this rank is given: the scenario's, and what happens to the logits on their way to it."""
        name = next((fault.topk for fault in self._take(OtherTopK)), self._plan.scenario.topk)
        given = self._topk_of(name)
        if self._take(Unmasked):
            self._overwrites = []
        strikes = any(isinstance(fault, Nudge | Spin) for _, fault in self._faults)
        return PlannedTopK(given, self._before_topk, self._width) if strikes or self._overwrites else given

    def _topk_of(self, name: str) -> TopK:
        """The one of that name that this rank has had since its first step."""
        if name not in self._topks:
            found = TOPKS[name] or default_topk(self._context.device)
            self._topks[name] = found() if isinstance(found, type) else found
        return self._topks[name]

    def _before_topk(self, logits: Tensor) -> None:
        """Do to this rank's logits what is planned for the step; what it strikes, once in each step."""
        struck, self._struck = self._struck == self._step, self._step
        if not struck and self._take(Spin):
            self._context.die("stall", f"in topk over {tuple(logits.shape)} logits")
        for row, column, value in self._overwrites:
            logits[row : row + 1, column] = value  # nothing, for a rank that believes in fewer rows
        for fault in [] if struck else self._take(Nudge):
            logits[fault.row : fault.row + 1, fault.column] = fault.value

    def on_collective(self, call: Call) -> Call | None:
        """A hook of the recording group: what befalls this rank as it issues a collective."""
        for index, fault in self._faults:
            if isinstance(fault, get_args(CollectiveFault)) and self._strikes(index, fault, call):
                self._mark(index)
                changed = _STRIKE[type(fault)](fault, call, self._context)
                if changed is None:
                    return None
                call = changed
        return call

    def _strikes(self, index: int, fault: Any, call: Call) -> bool:
        return bool(fault.group == call.group and fault.seq == call.seq and self._fired[index] < fault.times)

    def _take(self, kind: type[F] | UnionType) -> list[F]:
        taken = [
            (i, f) for i, f in self._faults if isinstance(f, kind) and getattr(f, "step", self._step) == self._step
        ]
        for index, _ in taken:
            self._mark(index)
        return [fault for _, fault in taken]

    def _mark(self, index: int) -> None:
        self._fired[index] += 1
        self._context.recorder.mark(FIRED, index)


class PlannedTopK:
    """A top-k that a plan disturbs. disturb: does to a rank's logits what is planned."""

    def __init__(self, given: TopK, disturb: Callable[[Tensor], None], width: int) -> None:
        self.disturb, self._given, self._width = disturb, given, width
        self.__name__ = getattr(given, "__name__", "topk")

    def __call__(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Those of gathered logits, wider than the shard, are not this rank's own: they are not disturbed again."""
        if logits.shape[-1] <= self._width:
            self.disturb(logits)
        return self._given(logits, k)


def _overwrites_of(plan: Plan, rank: int) -> list[tuple[int, int, float]]:
    if not plan.scenario.overwrites:
        return []
    shard = held_shard(plan, rank)
    local = [(one.row, one.token_id - shard.org_start, one.value) for one in plan.scenario.overwrites]
    return [(row, column, value) for row, column, value in local if 0 <= column < shard.num_org]


Strike = Callable[[Any, Call, RankContext], Call | None]


def _raise(fault: Raise, call: Call, context: RankContext) -> None:
    raise InjectedError(fault.message)


def _kill(fault: Kill, call: Call, context: RankContext) -> None:
    context.die("kill", describe(fault))


def _exit(fault: Exit, call: Call, context: RankContext) -> None:
    context.die("exit", describe(fault))


def _quit(fault: Quit, call: Call, context: RankContext) -> None:
    sys.exit(fault.status)


def _crash(fault: Crash, call: Call, context: RankContext) -> None:
    context.die("crash", describe(fault))


def _exhaust(fault: Exhaust, call: Call, context: RankContext) -> None:
    context.die("exhaust", describe(fault))


def _stop(fault: Stop, call: Call, context: RankContext) -> Call:
    context.die("stop", describe(fault))
    return call  # it may be continued


def _pause(fault: Pause, call: Call, context: RankContext) -> Call:
    context.pause(fault.seconds)
    return call


def _stall(fault: Stall, call: Call, context: RankContext) -> None:
    context.die("stall", f"before {call.op} {call.seq}")


def _delay(fault: Delay, call: Call, context: RankContext) -> Call:
    context.sleep(fault.seconds)
    return call


def _skip(fault: Skip, call: Call, context: RankContext) -> None:
    for out in _tensors(call.outputs):
        out.zero_()  # where a collective was swallowed, what the buffers hold must not depend on the machine


def _tensors(nested: Any) -> list[Tensor]:
    if isinstance(nested, Tensor):
        return [nested]
    return [tensor for part in nested or () for tensor in _tensors(part)]


def _extra(fault: Extra, call: Call, context: RankContext) -> Call:
    if call.payload is None:
        dist.barrier()
    else:
        copy = call.payload.clone(memory_format=torch.contiguous_format)
        dist.all_gather([torch.empty_like(copy) for _ in range(context.world_size)], copy)
    return call


def _recast(fault: Recast, call: Call, context: RankContext) -> Call:
    return _contribute(call, lambda t: t.to(getattr(torch, fault.dtype)))


def _narrow(fault: Narrow, call: Call, context: RankContext) -> Call:
    return _contribute(call, lambda t: t[..., :-1].contiguous())


def _strided(fault: Strided, call: Call, context: RankContext) -> Call:
    return _contribute(call, _permute if fault.transposed else _crop)


def _corrupt(fault: Corrupt, call: Call, context: RankContext) -> Call:
    return _contribute(call, torch.neg)


def _permute(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


def _crop(tensor: Tensor) -> Tensor:
    wide = torch.cat([tensor, torch.zeros_like(tensor)], dim=-1)
    return wide[..., : tensor.shape[-1]]


def _contribute(call: Call, change: Callable[[Tensor], Tensor]) -> Call:
    """The call with another contribution, and output buffers that take it where it has another dtype or width."""
    assert call.payload is not None
    payload = change(call.payload)
    inputs = [payload] if isinstance(call.inputs, list) else payload
    outputs = call.outputs
    if call.method == "allgather":
        outputs = [[_buffer(out, payload) for out in outs] for outs in call.outputs]
    return replace(call, payload=payload, inputs=inputs, outputs=outputs)


def _buffer(out: Tensor, payload: Tensor) -> Tensor:
    same = out.dtype == payload.dtype and out.shape == payload.shape
    return out if same else torch.empty(payload.shape, dtype=payload.dtype, device=payload.device)


_STRIKE: dict[type, Strike] = {
    Raise: _raise,
    Kill: _kill,
    Exit: _exit,
    Quit: _quit,
    Crash: _crash,
    Exhaust: _exhaust,
    Stop: _stop,
    Pause: _pause,
    Stall: _stall,
    Delay: _delay,
    Skip: _skip,
    Extra: _extra,
    Recast: _recast,
    Narrow: _narrow,
    Strided: _strided,
    Corrupt: _corrupt,
}
