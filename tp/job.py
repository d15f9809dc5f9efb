"""Job: one run of a program on one rank; Station: where that rank lives. Neither needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Station:
    """A rank's place in the world, the same for all its runs and for a process that replaces it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    backend: Backend
    visible_gpus: str  # what CUDA_VISIBLE_DEVICES shall be for NCCL: the GPUs of all ranks of the node
    single_node: bool
    import_path: tuple[str, ...]  # the driver's sys.path and folder: its programs may live there
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a rank is told to run."""

    run: int  # counts the runs of a world, from 1
    store: tuple[str, int]  # host and port
    forms_group: bool  # a new one, from what is below `prefix` in the store; else the last run's group is used
    program: bytes  # a RankProgram, by cloudpickle

    @property
    def prefix(self) -> str:
        """What a group that this run forms has in the store for itself."""
        return f"tpbed/{self.run}/"
