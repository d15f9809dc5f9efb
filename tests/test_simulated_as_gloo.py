"""Collectives of the simulated world where gloo does something of its own: views, scratch, dtypes, refusals.

Expected values were measured with torch 2.13 over gloo, two processes on one machine.
"""

import math

import pytest
import torch
import torch.distributed as dist
from rank_tensors import all_gather_single, all_gathered_like, flat, memory, reduce_scatter_single

from tpbed.tp.payload import OverrunError
from tpbed.tp.simulated import SimulatedWorld


def transposed(rank):
    return memory(rank)[:6].reshape(2, 3).t()


def strided(rank):
    return memory(rank)[:12:2]


def gathered(view):
    got = [torch.full(view.shape, -1.0) for _ in range(2)]
    dist.all_gather(got, view)
    return flat(got)


def reduced(view):
    dist.all_reduce(view)
    return flat([view])


def broadcasted(view):
    dist.broadcast(view, 0)
    return flat([view])


def scattered(view):
    got = torch.full(view.shape, -1.0)
    dist.scatter(got, [view, view] if dist.get_rank() == 0 else None, 0)
    return flat([got])


def reduce_scattered(view):
    got = torch.full(view.shape, -1.0)
    dist.reduce_scatter(got, [view, view])
    return flat([got])


@pytest.mark.parametrize(
    ("view", "call", "expected"),
    [
        (transposed, gathered, [[0, 3, 1, 4, 2, 5], [100, 103, 101, 104, 102, 105]]),  # by index
        (strided, gathered, [[0, 2, 4, 6, 8, 10], [100, 102, 104, 106, 108, 110]]),
        (transposed, reduced, [[100, 106, 102, 108, 104, 110]]),  # by memory, alike on both
        (strided, reduced, ([[100, 104, 108, 6, 8, 10]], [[100, 104, 108, 106, 108, 110]])),  # ranks differ
        (strided, broadcasted, ([[0, 2, 4, 6, 8, 10]], [[0, 2, 4, 106, 108, 110]])),
        (transposed, scattered, [[0, 1, 2, 3, 4, 5]]),  # permuted in silence
        (strided, scattered, [[0, 1, 2, 3, 4, 5]]),  # what is in the gaps, too
        (transposed, reduce_scattered, [[100, 104, 103, 107, 106, 110]]),  # own by index, the peer's by memory
        (strided, reduce_scattered, [[100, 104, 108, 112, 116, 120]]),
    ],
)
def test_views_go_by_index_or_by_memory_as_gloo(view, call, expected):
    first, second = expected if isinstance(expected, tuple) else (expected, expected)
    assert SimulatedWorld(2).run(lambda rank: call(view(rank))).results == (first, second)


def outputs_with_gaps(rank):
    whole = torch.full((12,), -1.0)
    dist.all_to_all_single(whole[::2], memory(rank, 6))
    gaps = torch.full((6,), -1.0)
    reduce_scatter_single(gaps[::2], memory(rank, 6))
    return whole.tolist(), gaps.tolist()


def test_outputs_with_gaps_as_gloo():
    gap = [-1.0] * 6
    assert SimulatedWorld(2).run(outputs_with_gaps).results == (
        ([0, 1, 2, 100, 101, 102, *gap], [100, -1, 102, -1, 104, -1]),
        ([3, 4, 5, 103, 104, 105, *gap], [106, -1, 108, -1, 110, -1]),
    )


def test_a_rank_that_is_not_the_root_of_a_reduce_is_left_with_scratch():
    def program(rank):
        value = torch.ones(4)
        dist.reduce(value, 0)
        return value.tolist()

    assert SimulatedWorld(2).run(program).results == ([2, 2, 2, 2], [1, 1, 2, 2])


def test_equal_bytes_of_another_dtype_are_read_as_ones_own():
    def program(rank):
        value = torch.tensor([1.0, 2.0]) if rank else torch.tensor([7, 8], dtype=torch.int32)
        got = [torch.zeros_like(value) for _ in range(2)]
        dist.all_gather(got, value)
        return flat(got)

    bits = torch.tensor([1.0, 2.0]).view(torch.int32).tolist()
    floats = torch.tensor([7, 8], dtype=torch.int32).view(torch.float32).tolist()
    assert SimulatedWorld(2).run(program).results == ([[7, 8], bits], [floats, [1.0, 2.0]])


def test_the_forms_with_lists_and_with_one_tensor_meet():
    def program(rank):
        parts, whole, share = [torch.zeros(2), torch.zeros(2)], torch.zeros(4), torch.zeros(2)
        if rank == 0:
            dist.all_gather(parts, memory(rank, 2))
            dist.reduce_scatter(share, list(memory(rank, 4).chunk(2)))
            dist.all_to_all(parts, list(memory(rank, 4).chunk(2)))
            return flat([*parts, share])
        all_gather_single(whole, memory(rank, 2))
        reduce_scatter_single(share, memory(rank, 4))
        dist.all_to_all_single(whole, memory(rank, 4))
        return flat([whole, share])

    assert SimulatedWorld(2).run(program).results == ([[0, 1], [100, 101], [100, 102]], [[2, 3, 102, 103], [104, 106]])


def test_equal_bytes_of_another_shape_are_taken_as_they_lie():
    def program(rank):
        value = memory(rank, 6).reshape((2, 3) if rank else (3, 2))
        return [tensor.tolist() for tensor in all_gathered_like(value)]

    assert SimulatedWorld(2).run(program).results == (
        [[[0, 1], [2, 3], [4, 5]], [[100, 101], [102, 103], [104, 105]]],
        [[[0, 1, 2], [3, 4, 5]], [[100, 101, 102], [103, 104, 105]]],
    )


def test_each_rank_gets_the_result_of_its_own_reduce_op():
    def program(rank):
        value = torch.tensor([rank + 2])
        dist.all_reduce(value, [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MAX][rank])
        return value.item()

    assert SimulatedWorld(3).run(program).results == (9, 24, 4)


@pytest.mark.parametrize(("op", "expected"), [("MAX", [math.nan, 1.0]), ("MIN", [math.nan, 1.0])])
def test_nan_wins_or_loses_by_its_place_in_minimum_and_maximum(op, expected):
    def program(rank):
        value = torch.tensor([[math.nan, 1.0], [1.0, math.nan]][rank])
        dist.all_reduce(value, getattr(dist.ReduceOp, op))
        return str(value.tolist())

    assert SimulatedWorld(2).run(program).results == (str(expected),) * 2


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda rank: dist.all_gather([torch.empty(6)], memory(rank, 6)), RuntimeError, "expected length 2, got 1"),
        (
            lambda rank: dist.all_gather([torch.empty(2, 3)] * 2, memory(rank, 6)),
            RuntimeError,
            r"invalid tensor size at index 0 \(expected \(6\), got \(2, 3\)\)",
        ),
        (lambda rank: all_gather_single(torch.empty(10), memory(rank, 6)), RuntimeError, "invalid tensor size"),
        (
            lambda rank: all_gather_single(torch.empty(12, dtype=torch.float64), memory(rank, 6)),
            RuntimeError,
            "invalid tensor type",
        ),
        (lambda rank: all_gather_single(torch.empty(2, 6), memory(rank, 6)), RuntimeError, "invalid tensor size"),
        (lambda rank: all_gather_single(torch.empty(2), torch.tensor(1.0)), RuntimeError, "invalid tensor size"),
        (
            lambda rank: dist.gather(memory(rank, 6), [torch.empty(6)], 0),
            RuntimeError,
            "Incorrect output list size 1",
        ),
        (
            lambda rank: dist.scatter(torch.empty(6), [memory(rank, 6)], 0),
            RuntimeError,
            "Incorrect input list size 1",
        ),
        (lambda rank: dist.reduce_scatter(torch.empty(3), [memory(rank, 3)]), RuntimeError, "must be world size"),
        (lambda rank: dist.reduce_scatter(torch.empty(2), [memory(rank, 3)] * 2), RuntimeError, "invalid tensor size"),
        (lambda rank: reduce_scatter_single(torch.empty(3), memory(rank, 7)), RuntimeError, "as long as 2 outputs"),
        (
            lambda rank: reduce_scatter_single(torch.empty(3, dtype=torch.float64), memory(rank, 6)),
            RuntimeError,
            "invalid tensor type",
        ),
        (
            lambda rank: dist.all_to_all([torch.empty(2), torch.empty(4)], list(memory(rank, 6).split([2, 4]))),
            RuntimeError,
            "invalid tensor size at index 1",
        ),
        (lambda rank: dist.all_to_all([torch.empty(3)], [memory(rank, 3)] * 2), RuntimeError, "list size 1"),
        (lambda rank: dist.all_to_all_single(torch.empty(6), strided(rank)), ValueError, "must be contiguous"),
        (lambda rank: dist.all_to_all_single(torch.empty(4), memory(rank, 6)), RuntimeError, "24 bytes go in and 16"),
        (
            lambda rank: dist.all_to_all_single(torch.empty(6), memory(rank, 6), [3, 3], [2, 5]),
            RuntimeError,
            "match total dim 0",
        ),
        (
            lambda rank: dist.all_to_all_single(torch.empty(6), memory(rank, 6), [6], [6]),
            RuntimeError,
            "not equal to group size",
        ),
        (
            lambda rank: dist.all_to_all_single(torch.empty(5), memory(rank, 6), None, [3, 3]),
            RuntimeError,
            "does not divide",
        ),
        (lambda rank: dist.broadcast(memory(rank, 6), 5), RuntimeError, "invalid root rank: 5"),
        (lambda rank: dist.all_reduce(torch.ones(2, dtype=torch.int16)), RuntimeError, "Invalid scalar type"),
        (lambda rank: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND), RuntimeError, "non-integral dtype"),
        (
            lambda rank: dist.all_reduce(torch.ones(2, dtype=torch.int64), dist.ReduceOp.AVG),
            RuntimeError,
            "can't be cast",
        ),
        (lambda rank: dist.all_reduce(torch.ones(1).expand(4)), OverrunError, "16 bytes in a row .* ends after 4"),
    ],
)
def test_what_gloo_refuses_is_refused_on_that_rank_before_it_waits(call, error, said):
    def refused(rank):
        if rank == 0:
            with pytest.raises(error, match=said):
                call(rank)
        return True

    assert SimulatedWorld(2).run(refused).results == (True, True)


def test_splits_that_do_not_fit_never_complete():
    def program(rank):
        dist.all_to_all_single(torch.empty(4), torch.ones(4), [2, 2], [1, 3])

    assert SimulatedWorld(2).run(program).stuck == (0, 1)
