"""Tensors that tests of collectives bring, and what they look at afterwards."""

import torch
import torch.distributed as dist

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def memory(rank, count=24):
    return torch.arange(count, dtype=torch.float32) + 100 * rank


def flat(tensors):
    return [tensor.flatten().tolist() for tensor in tensors]


def all_gathered_like(value):
    got = [torch.empty_like(value) for _ in range(2)]
    dist.all_gather(got, value)
    return got
