"""pytest-xdist workers on Ray: one Ray for all of them, ranks and fork servers of their own, and nothing left."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from tpbed.tp.janitor import find_users

pytestmark = pytest.mark.xdist_group("ray")

SOURCE = """
    import json
    import os
    from pathlib import Path

    import pytest
    import torch
    import torch.distributed as dist

    @pytest.mark.tp(2, world="gloo")
    def test_sum(rank):
        total = torch.tensor([rank + 1])
        dist.all_reduce(total)
        assert total.item() == 3

    @pytest.mark.tp(2, world="gloo")
    def test_hang(rank):
        if rank == 1:
            raise RuntimeError("out of memory")
        dist.barrier()

    def test_where(tp):
        import ray

        pids = tp(lambda rank: os.getpid(), world_size=2, world="gloo")
        servers = tp(lambda rank: os.getppid(), world_size=2, world="gloo")
        [node] = [node for node in ray.nodes() if node["Alive"]]
        told = {"pids": pids, "servers": servers, "socket": node["ObjectStoreSocketName"]}
        worker = os.environ["PYTEST_XDIST_WORKER"]
        Path(f"{worker}.json").write_text(json.dumps(told))
"""


def test_two_workers_share_one_ray_and_nothing_else(pytester, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    pytester.makepyfile(SOURCE)
    outcome = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-n", "2", "--dist", "each")
    outcome.assert_outcomes(passed=4, failed=2)
    outcome.stdout.fnmatch_lines(["*barrier seq 1*waits for rank 1*"])
    one, two = (json.loads((pytester.path / f"gw{number}.json").read_text()) for number in (0, 1))
    assert one["socket"] == two["socket"]
    assert not {*one["pids"], *one["servers"]} & {*two["pids"], *two["servers"]}
    assert_gone(next(part for part in Path(one["socket"]).parents if part.name.startswith("tpbed-ray-")))


def assert_gone(folder: Path) -> None:
    """Ray's processes, their janitor and their folder."""
    left = [process for process in psutil.process_iter() if uses(process, str(folder))]
    assert psutil.wait_procs(left, timeout=60)[1] == []
    assert find_users(str(folder)) == [] and not folder.exists()


def uses(process: psutil.Process, folder: str) -> bool:
    try:
        return folder in " ".join(process.cmdline())
    except psutil.Error:
        return False
