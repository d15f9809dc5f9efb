"""Benchmarks of the simulated world as ratios: its cost beside bare tensor maths, and a hang beside a healthy run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbed.harness.inputs import build_head, hidden_states
from tpbed.harness.plan import Plan, make_plan
from tpbed.harness.scenario import Scenario
from tpbed.selector.merge import merge_gathered, pad_candidates
from tpbed.selector.project import project_candidate_logits
from tpbed.selector.select import check_request, compute_candidates
from tpbed.selector.topk import canonical_topk
from tpbed.tp.simulated import SimulatedWorld


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Two things timed in turn: medians in milliseconds; median, least and greatest of the ratios pair by pair."""

    name: str
    numerator_ms: float
    denominator_ms: float
    median: float
    least: float
    greatest: float


EXAMPLES = ((4, 1_000), (4, 4_000), (8, 4_000), (56, 8_000))
"""Rows and tokens at TP=4, from the smallest that a fuzzer draws to a step's: the world costs the same for each."""


def bench_speed(*, world_size: int = 4, rows: int = 4, tokens: int = 1_000, pairs: int = 200) -> Ratio:
    """Bare tensor maths over a simulated run of the same selector step: 1.0 would be a world that costs nothing.

    rows, tokens: of the whole vocabulary; 64 hidden units, k=16.
    The bare side calls the selector's own stages, its check of the request too, for every rank in a loop, and gathers
    with torch.cat. Torch has one thread, the two are timed in turn, and what counts is this thread's time on the CPU.
    """
    plan, heads = _case(world_size, rows, tokens)
    hidden = hidden_states(plan, 0)
    world = SimulatedWorld(world_size)
    return _in_turn(
        f"bare maths / simulated, TP={world_size}, {rows} rows of {tokens:,} tokens",
        partial(_bare_step, hidden, heads, plan.scenario.k),
        lambda: world.run(lambda rank: _step(hidden, heads[rank], plan.scenario.k)),
        pairs,
    )


def bench_hang(*, world_size: int = 4, pairs: int = 200) -> Ratio:
    """A run that ends in a proved hang over a healthy one of the same program: up to the proof and clean-up."""
    plan, heads = _case(world_size)
    hidden = hidden_states(plan, 0)
    world = SimulatedWorld(world_size)

    def program(rank: int, culprit: int) -> None:
        if rank == culprit:
            raise RuntimeError("planned")
        _step(hidden, heads[rank], plan.scenario.k)

    return _in_turn(
        f"hang / healthy, TP={world_size}",
        lambda: world.run(partial(program, culprit=world_size - 1)),
        lambda: world.run(partial(program, culprit=-1)),
        pairs,
    )


def _case(world_size: int, rows: int = 4, tokens: int = 1_000) -> tuple[Plan, list[Any]]:
    scenario = Scenario(
        name="bench",
        claim="A step.",
        kind=0,
        world_size=world_size,
        org_vocab_size=tokens,
        rows=rows,
        logits="gaussian",
    )
    plan = make_plan(scenario, seed=0)
    return plan, [build_head(plan, rank) for rank in range(world_size)]


def _step(hidden: Tensor, head: Any, k: int) -> None:
    compute_candidates(hidden, head, k=k, group=dist.group.WORLD, topk=canonical_topk)


def _bare_step(hidden: Tensor, heads: Sequence[Any], k: int) -> None:
    group = _Members(len(heads))
    local = [_bare_local(hidden, head, k, group) for head in heads]
    for _ in heads:  # every rank merges for itself
        merge_gathered(torch.cat([v for v, _ in local], -1), torch.cat([i for _, i in local], -1), k)


class _Members:
    """A group of which the selector asks no more than its size."""

    def __init__(self, count: int) -> None:
        self.size = lambda: count


def _bare_local(hidden: Tensor, head: Any, k: int, group: Any) -> tuple[Tensor, Tensor]:
    check_request(hidden, head, k=k, group=group)
    logits = project_candidate_logits(hidden, head)
    values, columns = canonical_topk(logits, min(k, logits.shape[1]))
    return pad_candidates(values.float(), columns + head.shard.org_start, k)


def _in_turn(name: str, numerator: Callable[[], Any], denominator: Callable[[], Any], pairs: int) -> Ratio:
    with _one_thread():
        for _ in range(10):
            numerator(), denominator()
        times = [(_timed_ms(numerator), _timed_ms(denominator)) for _ in range(pairs)]
    ratios = sorted(above / below for above, below in times)
    return Ratio(
        name=name,
        numerator_ms=statistics.median(above for above, _ in times),
        denominator_ms=statistics.median(below for _, below in times),
        median=statistics.median(ratios),
        least=ratios[0],
        greatest=ratios[-1],
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _timed_ms(call: Callable[[], Any]) -> float:
    """Of this thread, on the CPU: what else a machine does counts little."""
    began = time.thread_time()
    call()
    return (time.thread_time() - began) * 1e3
