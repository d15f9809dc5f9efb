"""Gathers: what one packed gather costs on real ranks, beside two gathers and beside that of all logits."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, start_processes

from tpbed.selector.candidates import Merge, choose_local, merge_candidates
from tpbed.selector.merge import gather_columns
from tpbed.selector.packed import keyed_topk
from tpbed.selector.shard import VocabShard
from tpbed.tp.errors import TestbedError

Backend = Literal["nccl", "gloo"]
Part = Literal["gather", "merge"]  # the collectives alone, or with the choice of the k best
Mode = Literal["eager", "captured"]  # captured: one replay of a CUDA graph for each call
BASE: Merge = "packed"
K = 16
_CALLS = {"nccl": 20, "gloo": 1}  # that are timed as one
_WARM_UPS = 5


class GathersError(TestbedError):
    """Ranks that this machine cannot have, that failed, or whose merges differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherPoint:
    """One merge at one size. Times are microseconds a call, of the slowest rank; ratios to BASE, round by round."""

    backend: Backend
    world_size: int
    rows: int
    tokens: int
    mode: Mode
    part: Part
    merge: Merge
    bytes_per_rank: int  # that each rank contributes
    median_us: float
    least_us: float
    greatest_us: float
    ratio: float
    ratio_least: float
    ratio_greatest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherPlan:
    """What is measured, in one run of so many ranks."""

    backend: Backend
    world_size: int
    rows: tuple[int, ...]
    tokens: int
    rounds: int


def largest_sizes(backend: str) -> tuple[int, ...]:
    """2, 4 and 8 ranks: over NCCL those that have a GPU each, over gloo all."""
    gpus = torch.cuda.device_count()
    return tuple(size for size in (2, 4, 8) if backend != "nccl" or size <= gpus)


def require_ranks(backend: str, sizes: Sequence[int]) -> Backend:
    """The backend. Raises GathersError for one that there is not, and for more ranks than this machine can have."""
    if backend not in get_args(Backend):
        raise GathersError(f"world={backend!r} is none of {', '.join(get_args(Backend))}: use one of these.")
    if min(sizes, default=2) < 2:
        raise GathersError(f"{min(sizes)} rank gathers nothing: give --tp 2 or more.")
    gpus = torch.cuda.device_count()
    if backend == "nccl" and max(sizes, default=2) > gpus:
        raise GathersError(f"NCCL needs a GPU per rank, and {gpus} are here: use --tp up to that, or --world gloo.")
    return cast("Backend", backend)


def measure_gathers(plan: GatherPlan, on_progress: Callable[[str], None] = lambda _text: None) -> list[GatherPoint]:
    """Start the ranks, time the merges in turn, round by round, eagerly and (NCCL) captured; the ranks end with it.

    Ranks are bare processes of torch.distributed, so that nothing is recorded meanwhile. NVLink multicast is off.
    Raises GathersError if a rank fails, or if merges do not agree on the candidates.
    """
    told: Any = mp.get_context("spawn").SimpleQueue()
    points: list[GatherPoint] = []
    with tempfile.TemporaryDirectory() as folder:
        ranks = start_processes(  # type: ignore[no-untyped-call]
            _rank, (plan, folder, told), nprocs=plan.world_size, join=False, start_method="spawn"
        )
        try:
            while not ranks.join(timeout=0.1):
                _hear(told, points, on_progress)
        except ProcessException as error:
            raise GathersError(f"rank {error.error_index} failed: {str(error).strip().splitlines()[-1]}") from error
        _hear(told, points, on_progress)
    return points


def _hear(told: Any, points: list[GatherPoint], on_progress: Callable[[str], None]) -> None:
    while not told.empty():
        heard = told.get()
        on_progress(heard) if isinstance(heard, str) else points.append(heard)


def _rank(rank: int, plan: GatherPlan, folder: str, told: Any) -> None:
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if plan.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    meeting = f"file://{Path(folder) / 'store'}"
    dist.init_process_group(plan.backend, init_method=meeting, rank=rank, world_size=plan.world_size)
    for rows, mode, part in product(plan.rows, _modes(plan.backend), get_args(Part)):
        if rank == 0:
            told.put(f"TP={plan.world_size}, {rows} rows, {mode} {part}")
        for point in _compare(plan, rank, device, rows, mode, part):
            if rank == 0:
                told.put(point)
    dist.destroy_process_group()


def _modes(backend: Backend) -> tuple[Mode, ...]:
    return get_args(Mode) if backend == "nccl" else ("eager",)


def _compare(
    plan: GatherPlan, rank: int, device: torch.device, rows: int, mode: Mode, part: Part
) -> Iterator[GatherPoint]:
    calls: dict[Merge, Callable[[], Any]] = {}
    sizes: dict[Merge, int] = {}
    for merge in get_args(Merge):
        calls[merge], sizes[merge] = _call(plan, rank, device, rows, part, merge)
    if part == "merge":
        _require_agreement({merge: call() for merge, call in calls.items()})
    run = calls if mode == "eager" else {merge: _capture(call) for merge, call in calls.items()}
    times = _slowest(_time_in_turn(run, plan, device), device)
    for place, merge in enumerate(calls):
        own, base = times[:, place], times[:, list(calls).index(BASE)]
        yield _point(plan, rows, mode, part, merge, sizes[merge], own.tolist(), (own / base).tolist())


def _call(
    plan: GatherPlan, rank: int, device: torch.device, rows: int, part: Part, merge: Merge
) -> tuple[Callable[[], Any], int]:
    """What a rank does, and how many bytes it contributes."""
    shard = VocabShard.even(rank=rank, world_size=plan.world_size, org_vocab_size=plan.tokens)
    seeded = torch.Generator().manual_seed(rank)
    logits = torch.randn(rows, shard.width, generator=seeded)
    logits[:, shard.num_org :] = -torch.inf
    logits = logits.bfloat16().to(device)
    local = choose_local(logits, shard, k=K, topk=keyed_topk, merge=merge)
    payload = [local[0].float(), local[1]] if merge == "two_gather" else list(local)
    size = sum(tensor.nbytes for tensor in payload)
    if part == "gather":
        return partial(_gather, payload), size
    return partial(merge_candidates, local, shard, k=K, group=None, merge=merge, topk=keyed_topk), size


def _gather(payload: Sequence[Tensor]) -> list[Tensor]:
    return [gather_columns(tensor, None) for tensor in payload]


def _require_agreement(answers: dict[Merge, Any]) -> None:
    usual = answers[BASE]
    odd = [merge for merge, answer in answers.items() if not torch.equal(answer.ids, usual.ids)]
    if odd:
        raise GathersError(f"{', '.join(odd)} chose other candidates than {BASE}: nothing was timed.")


def _capture(call: Callable[[], Any]) -> Callable[[], None]:
    """A replay of it. Only this thread's calls are watched: NCCL's watchdog asks for events meanwhile."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        kept = call()
    return partial(_replay, graph, kept)


def _replay(graph: torch.cuda.CUDAGraph, _kept: Any) -> None:
    graph.replay()


def _time_in_turn(calls: dict[Merge, Callable[[], Any]], plan: GatherPlan, device: torch.device) -> Tensor:
    """(rounds, calls) float64 microseconds a call, on this rank."""
    for call in calls.values():
        for _ in range(_WARM_UPS):
            call()
    times = [[_timed_us(call, _CALLS[plan.backend], device) for call in calls.values()] for _ in range(plan.rounds)]
    return torch.tensor(times, dtype=torch.float64)


def _timed_us(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """All ranks begin together; the time ends when the device has done the last."""
    dist.barrier()
    _synchronise(device)
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    _synchronise(device)
    return (time.perf_counter() - began) / repeats * 1e6


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(times: Tensor, device: torch.device) -> Tensor:
    """Of all ranks, the longest time of each."""
    slowest = times.to(device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.cpu()


def _point(
    plan: GatherPlan,
    rows: int,
    mode: Mode,
    part: Part,
    merge: Merge,
    size: int,
    times: list[float],
    ratios: list[float],
) -> GatherPoint:
    return GatherPoint(
        backend=plan.backend,
        world_size=plan.world_size,
        rows=rows,
        tokens=plan.tokens,
        mode=mode,
        part=part,
        merge=merge,
        bytes_per_rank=size,
        median_us=statistics.median(times),
        least_us=min(times),
        greatest_us=max(times),
        ratio=statistics.median(ratios),
        ratio_least=min(ratios),
        ratio_greatest=max(ratios),
    )
