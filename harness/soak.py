"""Soak: hang after hang of every kind on the same real ranks: how soon each is found, what it costs, what leaks."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from tpbed.harness.diagnose import diagnose
from tpbed.harness.findings import Finding
from tpbed.harness.worlds import open_world
from tpbed.tp.errors import TestbedError
from tpbed.tp.rank import current
from tpbed.tp.world import World


class SoakError(TestbedError):
    """A hang was not found, or somebody else was blamed for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """One hang on warm ranks, and the healthy step after it."""

    kind: str
    verdict_ms: float  # from the last event of any rank to the finding
    recovery_ms: float  # from there until every rank was ready
    replaced: int  # ranks that needed a new process


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What this process and those below it hold."""

    processes: int
    descriptors: int
    shared_files: int  # in /dev/shm
    resident_mib: float  # each page that processes share is counted once

    def __sub__(self, other: Footprint) -> Footprint:
        return Footprint(
            processes=self.processes - other.processes,
            descriptors=self.descriptors - other.descriptors,
            shared_files=self.shared_files - other.shared_files,
            resident_mib=self.resident_mib - other.resident_mib,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of a number of times, in milliseconds."""

    count: int
    median: float
    p99: float
    worst: float

    @classmethod
    def of(cls, times: Sequence[float]) -> Spread:
        """Of at least one."""
        ordered = sorted(times)
        rank = min(len(ordered) - 1, round(0.99 * len(ordered)))
        return cls(count=len(ordered), median=statistics.median(ordered), p99=ordered[rank], worst=ordered[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksReport:
    """What one world of real ranks was measured at, in one go."""

    world: str
    world_size: int
    hogs: int
    ready_s: float  # from the call that opens the world; Ray's own start is part of it, unless it runs
    verdict_ms: dict[str, Spread]  # by kind; those of WITH_DEADLINE hold the deadline
    recovery_ms: Spread
    replaced: int  # processes, over all cycles
    leaked: Footprint  # between the first cycle of each kind and the last
    held: Footprint  # before
    runs_per_s: float
    loop_steps_per_s: float  # of the same step in a loop written by hand, on the same ranks

    def __str__(self) -> str:
        leaked, held = self.leaked, self.held
        return (
            f"{self.world}, {self.world_size} ranks, {self.hogs} processors kept busy: ready in {self.ready_s:.1f} s; "
            f"{self.recovery_ms.count} hangs, each with a healthy run after it; {self.replaced} processes replaced\n"
            f"leaked: {leaked.processes:+d} of {held.processes} processes, {leaked.descriptors:+d} of "
            f"{held.descriptors} descriptors, {leaked.shared_files:+d} files in shared memory, "
            f"{leaked.resident_mib:+.1f} of {held.resident_mib:.0f} MiB\n"
            f"{self.runs_per_s:.0f} runs/s, {self.runs_per_s / self.loop_steps_per_s:.2f} of the "
            f"{self.loop_steps_per_s:.0f} steps/s of a loop written by hand"
        )


def measure_ranks(
    kind: str,
    world_size: int,
    hangs: int,
    *,
    hogs: int = 0,
    seed: int = 0,
    stall_after_s: float = 0.5,
    on_progress: Callable[[str], None] = lambda _text: None,
) -> RanksReport:
    """Soak a world of that kind; rates are measured before processors are kept busy.

    Raises SoakError, and what open_world raises.
    """
    began = time.monotonic()
    with open_world(kind, world_size, progress=on_progress) as world:
        ready_s = time.monotonic() - began
        world.run(healthy)
        on_progress("running steps")
        runs_per_s, loop_steps_per_s = rate(world, _RATE_STEPS)
        with hog(hogs):
            list(soak(world, len(KINDS), seed=seed, stall_after_s=stall_after_s))  # whatever is kept for once
            held, cycles = footprint(), []
            for cycle in soak(world, hangs, seed=seed, stall_after_s=stall_after_s):
                cycles.append(cycle)
                on_progress(f"hang {len(cycles)} of {hangs}: rank {cycle.kind}")
            leaked = footprint() - held
        return RanksReport(
            world=world.name,
            world_size=world_size,
            hogs=hogs,
            ready_s=ready_s,
            verdict_ms={
                kind: Spread.of([c.verdict_ms for c in cycles if c.kind == kind])
                for kind in dict.fromkeys(c.kind for c in cycles)
            },
            recovery_ms=Spread.of([c.recovery_ms for c in cycles]),
            replaced=sum(c.replaced for c in cycles),
            leaked=leaked,
            held=held,
            runs_per_s=runs_per_s,
            loop_steps_per_s=loop_steps_per_s,
        )


_RATE_STEPS = 200


def _meet(size: int = 4) -> None:
    """On its device, and until the answer is there: over NCCL the host goes on before."""
    value = torch.ones(size, device=current().device)
    dist.all_reduce(value)
    value.sum().item()


def healthy(rank: int) -> None:
    """Two collectives, of which nothing is wrong."""
    _meet()
    _meet()


def _instead(act: Callable[[], None], culprit: int, rank: int) -> None:
    """One collective by all; then `culprit` does something else than the second."""
    _meet()
    if rank == culprit:
        act()
        return
    _meet()


def _raise() -> None:
    raise RuntimeError("planned")


def _crash() -> None:
    ctypes.string_at(0)


def _other_op() -> None:
    dist.barrier()


def _other_size() -> None:
    _meet(5)


def _hold_the_gil() -> None:
    deque(repeat(None), 0)  # a loop in C that asks for no signals


KINDS: dict[str, Callable[[], None]] = {
    "raises": _raise,
    "returns": lambda: None,
    "exits with sys.exit": lambda: sys.exit(3),
    "exits with os._exit": lambda: os._exit(3),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crashes in C": _crash,
    "is stalled": lambda: current().die("stall", "planned"),
    "holds the GIL": _hold_the_gil,
    "is stopped": lambda: current().die("stop", "planned"),
    "calls another op": _other_op,
    "brings another size": _other_size,
}
"""What the culprit does instead of the second collective; those of WITH_DEADLINE are found by the deadline."""
WITH_DEADLINE = ("is stalled", "holds the GIL", "is stopped")


def soak(world: World, cycles: int, *, seed: int = 0, stall_after_s: float = 0.5) -> Iterator[Cycle]:
    """Hang `cycles` times, each kind in its turn and each time another rank's fault, with a healthy run in between.

    Times of kinds WITH_DEADLINE hold the deadline, `stall_after_s`. Raises SoakError unless each finding names the
    culprit alone, and the run after it has none.
    """
    chance, kinds = random.Random(seed), list(KINDS)
    for number in range(cycles):
        kind, culprit = kinds[number % len(kinds)], chance.randrange(world.world_size)
        run = world.run(partial(_instead, KINDS[kind], culprit), stall_after_s=stall_after_s)
        began = time.perf_counter()
        findings = diagnose(run.ledgers, run.liveness)
        _require(kind, culprit, findings)
        verdict_ms = (run.proof_ms or 0.0) + (time.perf_counter() - began) * 1e3
        _require_health(world)
        yield Cycle(kind=kind, verdict_ms=verdict_ms, recovery_ms=run.recovery_ms or 0.0, replaced=len(run.replaced))


def _require(kind: str, culprit: int, findings: Sequence[Finding]) -> None:
    if not findings or any(set(finding.ranks) != {culprit} for finding in findings):
        found = "; ".join(f"{finding.kind} of ranks {finding.ranks}" for finding in findings) or "nothing"
        raise SoakError(f"rank {culprit} {kind}, and found was: {found}.")


def _require_health(world: World) -> None:
    run = world.run(healthy)
    if findings := diagnose(run.ledgers, run.liveness):
        raise SoakError(f"a healthy run after a hang has findings: {findings}.")


def footprint() -> Footprint:
    """Of this process and all its descendants, now; processes that end meanwhile are left out."""
    own = psutil.Process()
    processes = [own, *own.children(recursive=True)]
    held = [found for process in processes if (found := _held(process)) is not None]
    return Footprint(
        processes=len(held),
        descriptors=sum(descriptors for descriptors, _ in held),
        shared_files=len(list(Path("/dev/shm").iterdir())),
        resident_mib=sum(pss for _, pss in held) / 2**20,
    )


def _held(process: psutil.Process) -> tuple[int, int] | None:
    try:
        return process.num_fds(), process.memory_full_info().pss
    except psutil.Error:
        return None


@contextmanager
def hog(processes: int) -> Iterator[None]:
    """Keep so many processors busy meanwhile."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def rate(world: World, runs: int) -> tuple[float, float]:
    """Healthy steps a second: one run a step, and the same steps in a loop written by hand within one run."""
    began = time.perf_counter()
    for _ in range(runs):
        world.run(healthy)
    by_run = runs / (time.perf_counter() - began)
    return by_run, runs / max(world.run(partial(_loop, runs)).results)


def _loop(steps: int, rank: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        healthy(rank)
    return time.perf_counter() - began
