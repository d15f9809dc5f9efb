"""dist.monitored_barrier for the groups of a world: torch wants them to be called "gloo", and they are not.

get_backend keeps to that name: from "gloo" torch takes leave to make groups of its own, which nobody would record.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tpbed.tp.recording import BACKEND

_TORCHS = c10d.monitored_barrier
REPLACED = (c10d, dist)  # the modules in which programs find it


def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """In the place of torch.distributed's. Over NCCL it fails, as it does there."""
    if c10d._rank_not_in_group(group) or dist.get_backend(group) not in (BACKEND, "gloo"):
        _TORCHS(group, timeout, wait_all_ranks)
        return
    target: Any = group or c10d._get_default_group()
    if isinstance(timeout, float):
        timeout = timedelta(seconds=timeout)
    target.monitored_barrier(
        c10d._get_default_timeout(c10d.Backend("gloo")) if timeout is None else timeout, wait_all_ranks
    )


def put_in_place() -> None:
    """For good: in a process that is a rank."""
    for module in REPLACED:
        setattr(module, "monitored_barrier", monitored_barrier)  # noqa: B010
