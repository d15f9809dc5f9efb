"""RankGpu: which GPU a rank has. Two ranks on one are refused before they form a group: NCCL says so late, and less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGpu:
    """A rank's GPU, as the rank itself sees it; "" where it has none."""

    rank: int
    node: str
    uuid: str  # of the GPU, or of the part of it (MIG): the same by whatever number a process calls it


def tell_shared(gpus: Sequence[RankGpu]) -> str:
    """Which ranks have one GPU together, and what to do; "" where each has its own."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for gpu in gpus:
        if gpu.uuid:
            ranks.setdefault((gpu.node, gpu.uuid), []).append(gpu.rank)
    shared = [
        f"ranks {', '.join(map(str, sorted(here)))} are on GPU {uuid} of node {node}"
        for (node, uuid), here in ranks.items()
        if len(here) > 1
    ]
    advice = (
        "NCCL needs a GPU per rank: give each its own (CUDA_VISIBLE_DEVICES of the Ray nodes, whole GPUs per actor)"
    )
    return f"{'; '.join(shared)}; {advice}." if shared else ""
