"""Rank programs that several tests run, and what is asked of a run afterwards."""

import torch
import torch.distributed as dist

from tpbed.tp.rank import current


def total(rank):
    value = torch.tensor([rank + 1])
    dist.all_reduce(value)
    return value.item()


def states(run):
    return [seen.state for seen in run.liveness]


def hows(run):
    return [None if ledger.end is None else ledger.end.how for ledger in run.ledgers]


def return_early(rank):
    dist.barrier()
    if rank != 2:
        dist.barrier()


def raise_before(rank):
    dist.barrier()
    if rank == 2:
        raise ValueError("on purpose")
    dist.barrier()


def cross(rank):
    groups = [dist.new_group([0, 1, 2]), dist.new_group([0, 1, 3])]
    for group in groups if rank != 1 else groups[::-1]:
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.barrier(group)


def die(death):
    def program(rank):
        dist.barrier()
        if rank == 2:
            current().die(death, "on purpose")
        dist.barrier()

    return program


def never_asked_again(rank):
    work = dist.barrier(async_op=True) if rank else None
    while work and not work.is_completed():
        pass
