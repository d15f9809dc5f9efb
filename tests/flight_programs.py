"""Rank programs that hang, and how real processes run one and leave their Flight Recorder dumps.

Each yields the handles it would wait for. As `python flight_programs.py NAME BACKEND WORLD_SIZE FOLDER` processes wait
for those that come to an end, and write `FOLDER/rank_N` when they have issued the one that does not.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

Program = Callable[[int], Iterator[dist.Work]]


def returns_early(rank: int) -> Iterator[dist.Work]:
    """The last rank lacks the barrier."""
    yield dist.all_reduce(torch.ones(3), async_op=True)
    if rank != dist.get_world_size() - 1:
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


def leave_dumps(name: str, backend: str, world_size: int, folder: Path) -> None:
    """Run it on as many processes, which end of themselves; raises if one fails."""
    env = os.environ | {"TORCH_FR_BUFFER_SIZE": "100", "OMP_NUM_THREADS": "1", "NCCL_NVLS_ENABLE": "0"}
    with tempfile.TemporaryDirectory() as meeting:
        arguments = [sys.executable, __file__, name, backend, str(world_size), str(folder)]
        ranks = [
            subprocess.Popen([*arguments, str(rank), str(Path(meeting) / "store")], env=env)
            for rank in range(world_size)
        ]
        ends = [rank.wait(120) for rank in ranks]
    assert not any(ends), ends


def _run(name: str, backend: str, world_size: int, folder: Path, rank: int, store: dist.Store) -> None:
    """As one rank of a real group. Over NCCL groups are formed at once, so that no rank waits for another there."""
    device = torch.device("cuda", rank) if backend == "nccl" else None
    torch.set_default_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=device)
    program, ends = PROGRAMS[name]
    for number, work in enumerate(program(rank)):
        if number == ends[rank]:
            break
        work.wait()
        if device is not None:
            torch.cuda.current_stream().synchronize()
    (folder / f"rank_{rank}").write_bytes(_dump(backend, ends[rank]))
    store.add("dumped", 1)
    while store.add("dumped", 0) < world_size:
        os.sched_yield()
    os._exit(0)  # past what is still open


def _dump(backend: str, ended: int) -> bytes:
    """The recorder's, once it has noted that so many calls have ended: it does so a little after wait() returns."""
    recorded = torch._C._distributed_c10d
    while True:
        dump: bytes = recorded._dump_nccl_trace() if backend == "nccl" else recorded._dump_fr_trace()
        if sum(entry["retired"] for entry in pickle.loads(dump)["entries"]) >= ended:
            return dump
        os.sched_yield()


if __name__ == "__main__":
    _name, _backend, _world_size, _folder, *_own = sys.argv[1:]
    if _own:
        _store = dist.FileStore(_own[1], int(_world_size))
        _run(_name, _backend, int(_world_size), Path(_folder), int(_own[0]), _store)
    else:
        leave_dumps(_name, _backend, int(_world_size), Path(_folder))
