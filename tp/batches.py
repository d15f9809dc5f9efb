"""batch_isend_irecv for recorded groups over NCCL: one launch for all messages, as torch has for its own groups.

One by one they would be queued on one stream, where two ranks that both send first wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tpbed.tp.recording import RecordingGroup

_batch_of_torch = dist.batch_isend_irecv


def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
    """As torch.distributed.batch_isend_irecv over NCCL: a list with one handle, which completes when all messages have.

    Groups over transports that cannot coalesce get torch's own.
    """
    group: Any = getattr(next(iter(p2p_op_list), None), "group", None)  # P2POp has filled in the default one
    if not isinstance(group, RecordingGroup) or not group.inner.supports_coalescing:
        return list(_batch_of_torch(p2p_op_list))
    c10d._check_p2p_op_list(p2p_op_list)
    works: list[dist.Work] = []
    with _one_launch(group, works):
        for message in p2p_op_list:
            peer = "group_dst" if message.op is dist.isend else "group_src"
            message.op(message.tensor, group=message.group, tag=message.tag, **{peer: message.group_peer})
    return works


def install() -> None:
    """Put it in the place of torch's own in this process."""
    dist.batch_isend_irecv = c10d.batch_isend_irecv = batch_isend_irecv


@contextmanager
def _one_launch(group: RecordingGroup, works: list[dist.Work]) -> Iterator[None]:
    group.batch = []
    group.inner._start_coalescing()
    try:
        yield
    finally:
        messages, group.batch = group.batch, None
        work = group.inner._end_coalescing()
        works += [] if work is None else [work]
        for issued in messages:
            issued(work)
