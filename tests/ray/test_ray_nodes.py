"""Ranks on a cluster of two nodes: spread over them, diagnosed where they live, and without the node that is lost."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="module")
def seen() -> Iterator[dict[str, object]]:
    """What the driver of two_nodes.py saw; when it has ended, nothing of its cluster is left."""
    folder = tempfile.mkdtemp(prefix="tpbed-2n-", dir="/tmp")  # short: Ray puts sockets into it
    try:
        script = Path(__file__).with_name("two_nodes.py")
        (Path(folder) / "ray").mkdir()  # Ray's Cluster leaves its address in the default folder, and makes none
        argv, env = [sys.executable, str(script), folder], {**os.environ, "RAY_TMPDIR": folder}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        yield json.loads((Path(folder) / "seen.json").read_text())
        left = [process for process in psutil.process_iter(["cmdline"]) if folder in str(process.info["cmdline"])]
        assert psutil.wait_procs(left, timeout=30)[1] == []
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_eight_packed_ranks_share_a_node_of_two_processors(seen):
    assert len(set(seen["packed"])) == 1 and seen["eight"] == [28.0] * 8


def test_spread_ranks_are_two_a_node_and_know_it(seen):
    assert [seen["nodes"].count(node) for node in set(seen["nodes"])] == [2, 2]
    assert seen["total"] == [6.0] * 4
    assert seen["places"] == [[0, 2], [1, 2], [0, 2], [1, 2]]


def test_a_hang_is_proved_with_the_ledgers_and_frames_of_the_other_node(seen):
    culprit = seen["far"][-1]
    [(kind, ranks, text)] = seen["raised"]["findings"]
    assert (kind, ranks) == ("hang", [culprit]) and "raised ValueError" in text and "on the other node" in text
    frames = seen["raised"]["frames"]
    assert all("one_raises" in frames[rank] for rank in range(4) if rank != culprit)
    assert seen["raised"]["replaced"] == []


def test_a_rank_that_is_killed_on_the_other_node_is_replaced_there(seen):
    culprit = seen["far"][-1]
    [(kind, ranks, text)] = seen["killed"]["findings"]
    assert (kind, ranks) == ("hang", [culprit]) and "SIGKILL" in text
    assert seen["killed"]["replaced"] == [culprit] and seen["mended"] == [6.0] * 4


def test_a_lost_node_is_a_finding_that_names_its_ranks_and_the_world_goes_on_without_it(seen):
    assert {rank for _, ranks, _ in seen["lost"]["findings"] for rank in ranks} == set(seen["far"])
    assert "supervisor is gone" in " ".join(text for _, _, text in seen["lost"]["findings"])
    assert set(seen["lost"]["replaced"]) >= set(seen["far"])
    assert seen["after"] == [6.0] * 4
    assert seen["places_after"] == [[0, 4], [1, 4], [2, 4], [3, 4]]


def test_the_ranks_are_ended_and_their_places_given_back_at_close(seen):
    assert seen["alive"] == [] and seen["groups"] == ["REMOVED"]
