"""run_plan: the rank program of every scenario - the same on every rank and in every world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from tpbed.harness.faults import ArrivalFault
from tpbed.harness.foreign import Chosen
from tpbed.harness.inject import Injector
from tpbed.harness.inputs import hidden_states
from tpbed.harness.plan import Plan
from tpbed.harness.selectors import Selector, find_selector, made
from tpbed.harness.staged import Staged
from tpbed.harness.turn import Serving
from tpbed.selector.candidates import Candidates
from tpbed.tp.rank import current
from tpbed.tp.world import RankProgram

ANSWER = "answer"  # the mark that a step's candidates leave in the ledger, so that they outlive the rank


def rank_program(plan: Plan) -> RankProgram:
    """The program that `World.run` takes: it carries the whole plan."""
    arrives = any(isinstance(fault, ArrivalFault) for fault in plan.scenario.faults)
    program = partial(run_plan, plan, select=find_selector(plan.scenario.selector))
    return _ArrivingProgram(plan, program) if arrives else program


@dataclass(frozen=True, slots=True)
class _ArrivingProgram:
    """The program of a plan in which something befalls a rank before the group is formed."""

    plan: Plan
    program: Callable[[int], None]

    def __call__(self, rank: int) -> None:
        self.program(rank)

    def arrive(self, _rank: int) -> None:
        """As worlds call it that form a group."""
        Injector(self.plan, current()).arrive()


def run_plan(plan: Plan, rank: int, *, select: Selector | type[Staged] | Serving) -> None:
    """Run every step of a plan on one rank with its selector, and write the answers to the ledger."""
    context = current()
    injector = Injector(plan, context)
    context.hooks.append(injector.on_collective)
    head = injector.head()
    selector = select.on(injector.fact) if isinstance(select, Serving) else made(select)
    for step in range(plan.scenario.steps):
        context.recorder.step(str(step))
        if not injector.begin_step(step):
            return
        answer = _select(selector, plan, step, injector, head)
        context.recorder.mark(ANSWER, _plain(answer))
        context.recorder.check()
    injector.teardown()


def _plain(answer: Candidates | Chosen) -> dict[str, Any]:
    """Flat lists and their shape: an answer without a row has a shape too. Values may be None."""
    ids = answer.ids.flatten().tolist()
    values = None if answer.values is None else answer.values.flatten().tolist()
    return {"shape": list(answer.ids.shape), "ids": ids, "values": values}


def _select(selector: Selector, plan: Plan, step: int, injector: Injector, head: Any) -> Candidates | Chosen:
    context = current()
    return selector(
        hidden_states(plan, step, rows=injector.rows()).to(context.device),
        head,
        k=plan.scenario.k,
        group=dist.group.WORLD,
        topk=injector.topk(),
        note=context.recorder.decision,
    )
