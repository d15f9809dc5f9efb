"""Rank programs that hang, and how a real process runs one over gloo and leaves its Flight Recorder dump.

Each yields the handles it would wait for. As `python flight_programs.py NAME RANK WORLD_SIZE FOLDER` a process waits
for those that come to an end, and writes `FOLDER/dumps/rank_N` when it has issued the one that does not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

Program = Callable[[int], Iterator[dist.Work]]


def returns_early(rank: int) -> Iterator[dist.Work]:
    """Rank 2 lacks the barrier."""
    yield dist.all_reduce(torch.ones(3), async_op=True)
    if rank != 2:
        yield dist.barrier(async_op=True)


def skips_in_a_subgroup(rank: int) -> Iterator[dist.Work]:
    """Rank 1 comes to the common barrier without the second gather of its group."""
    pair = dist.new_group([0, 1])
    for step in range(2):
        if rank == 0 or (rank == 1 and step == 0):
            yield dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(4), group=pair, async_op=True)
    yield dist.barrier(async_op=True)


def calls_another_op(rank: int) -> Iterator[dist.Work]:
    """Rank 1 broadcasts where the others reduce."""
    yield dist.all_reduce(torch.ones(3), async_op=True)
    value = torch.ones(3)
    yield dist.barrier(async_op=True) if rank == 1 else dist.all_reduce(value, async_op=True)


def crosses_groups(rank: int) -> Iterator[dist.Work]:
    """Ranks 0 and 1 come to their own group and to all in different orders."""
    pair = dist.new_group([0, 1])
    if rank == 0:
        yield dist.all_reduce(torch.ones(2), group=pair, async_op=True)
    yield dist.barrier(async_op=True)
    if rank == 1:
        yield dist.all_reduce(torch.ones(2), group=pair, async_op=True)


PROGRAMS: dict[str, tuple[Program, tuple[int, ...]]] = {
    "returns_early": (returns_early, (1, 1, 1)),
    "skips_in_a_subgroup": (skips_in_a_subgroup, (1, 1, 0)),
    "calls_another_op": (calls_another_op, (1, 1, 1)),
    "crosses_groups": (crosses_groups, (0, 0, 0)),
}
"""With how many handles each rank comes to an end."""


def main(name: str, rank: int, world_size: int, folder: Path) -> None:
    """Run it as one rank of a real group."""
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    program, ends = PROGRAMS[name]
    for number, work in enumerate(program(rank)):
        if number == ends[rank]:
            break
        work.wait()
    recorded = torch._C._distributed_c10d._dump_fr_trace()
    (folder / "dumps" / f"rank_{rank}").write_bytes(recorded)
    store.add("dumped", 1)
    while store.add("dumped", 0) < world_size:
        os.sched_yield()
    os._exit(0)  # past what is still open


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
