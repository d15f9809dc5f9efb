"""Two ranks on one GPU are told from what the ranks say of themselves: no GPU is needed to test it."""

import pytest

from tpbed.tp.gpus import RankGpu, tell_shared


def told(*places: tuple[str, str]) -> str:
    return tell_shared([RankGpu(rank=rank, node=node, uuid=uuid) for rank, (node, uuid) in enumerate(places)])


def test_two_ranks_on_one_gpu_are_named_with_it():
    text = told(("a", "GPU-1"), ("a", "GPU-2"), ("a", "GPU-1"))
    assert text.startswith("ranks 0, 2 are on GPU GPU-1 of node a; NCCL needs a GPU per rank")
    assert "GPU-2" not in text


def test_every_shared_gpu_is_told():
    text = told(("a", "GPU-1"), ("a", "GPU-2"), ("a", "GPU-2"), ("a", "GPU-1"))
    assert "ranks 0, 3 are on GPU GPU-1" in text and "ranks 1, 2 are on GPU GPU-2" in text


@pytest.mark.parametrize(
    "places",
    [
        (("a", "GPU-1"), ("a", "GPU-2")),
        (("a", ""), ("a", "")),  # ranks over gloo have none
        (("a", "MIG-1"), ("a", "MIG-2")),
        (),
    ],
)
def test_ranks_that_share_none_are_fine(places):
    assert told(*places) == ""
