"""Collectives of the simulated world: each rank gets what mathematics says, or what gloo does where that differs.

Expected values under "as gloo" were measured with torch 2.13 over gloo, two processes on one machine.
"""

import math
from dataclasses import dataclass
from functools import reduce

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tpbed.tp.payload import OverrunError
from tpbed.tp.schedule import RoundRobin, Seeded
from tpbed.tp.simulated import SimulatedWorld

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTS = [torch.int64, torch.int32, torch.int8, torch.uint8]
FOLDS = {
    "SUM": lambda a, b: a + b,
    "AVG": lambda a, b: a + b,
    "PRODUCT": lambda a, b: a * b,
    "MIN": min,
    "MAX": max,
    "BAND": lambda a, b: a & b,
    "BOR": lambda a, b: a | b,
    "BXOR": lambda a, b: a ^ b,
}


# Programs of any collectives, against plain Python.


@dataclass(frozen=True)
class Step:
    """One collective of all members of a group: what it is, and what the members bring to it."""

    op: str
    members: tuple[int, ...]
    dtype: torch.dtype
    count: int  # elements that a rank brings for each member
    reduce_op: str
    root: int  # rank within the group
    asynchronous: bool
    values: tuple[tuple[int, ...], ...]  # by rank within the group: count for each member

    def given(self, place):
        return self.values[place][: self.count]

    def share(self, source, target):
        return self.values[source][target * self.count : (target + 1) * self.count]

    def folded(self, columns):
        values = [reduce(FOLDS[self.reduce_op], column) for column in zip(*columns, strict=True)]
        return [value / len(self.members) for value in values] if self.reduce_op == "AVG" else values


@st.composite
def steps(draw, world_size):
    members = tuple(sorted(draw(st.sets(st.integers(0, world_size - 1), min_size=1))))
    reduce_op = draw(st.sampled_from(sorted(FOLDS)))
    kinds = {"AVG": FLOATS[:2]}.get(reduce_op, INTS if reduce_op.startswith("B") else FLOATS + INTS)
    count = draw(st.integers(1, 3))
    value = st.integers(0, 3)  # so small that no dtype rounds a sum or a product
    row = st.tuples(*[value] * (count * len(members)))
    return Step(
        op=draw(st.sampled_from(sorted(PLAY))),
        members=members,
        dtype=draw(st.sampled_from(kinds)),
        count=count,
        reduce_op=reduce_op,
        root=draw(st.integers(0, len(members) - 1)),
        asynchronous=draw(st.booleans()),
        values=draw(st.tuples(*[row] * len(members))),
    )


def finish(work):
    if work is not None:
        work.wait()


def all_gather(step, place, tensor, empty, how):
    got = [empty(step.count) for _ in step.members]
    finish(dist.all_gather(got, tensor(step.given(place)), **how))
    return got, [step.given(other) for other in range(len(step.members))]


def all_gather_whole(step, place, tensor, empty, how):
    got = empty(step.count * len(step.members))
    finish(all_gather_single(got, tensor(step.given(place)), **how))
    return [got], [[value for other in range(len(step.members)) for value in step.given(other)]]


def gather(step, place, tensor, empty, how):
    at_root = place == step.root
    got = [empty(step.count) for _ in step.members] if at_root else None
    finish(dist.gather(tensor(step.given(place)), got, dst=step.members[step.root], **how))
    return got or [], [step.given(other) for other in range(len(step.members))] if at_root else []


def scatter(step, place, tensor, empty, how):
    got = empty(step.count)
    sent = [tensor(step.share(place, other)) for other in range(len(step.members))] if place == step.root else None
    finish(dist.scatter(got, sent, src=step.members[step.root], **how))
    return [got], [step.share(step.root, place)]


def broadcast(step, place, tensor, empty, how):
    value = tensor(step.given(place))
    finish(dist.broadcast(value, src=step.members[step.root], **how))
    return [value], [step.given(step.root)]


def all_reduce(step, place, tensor, empty, how):
    value = tensor(step.given(place))
    finish(dist.all_reduce(value, op=getattr(dist.ReduceOp, step.reduce_op), **how))
    return [value], [step.folded([step.given(other) for other in range(len(step.members))])]


def reduce_to_root(step, place, tensor, empty, how):
    value = tensor(step.given(place))
    op = getattr(dist.ReduceOp, step.reduce_op)
    finish(dist.reduce(value, dst=step.members[step.root], op=op, **how))
    if place != step.root:
        return [], []
    return [value], [step.folded([step.given(other) for other in range(len(step.members))])]


def reduce_scatter(step, place, tensor, empty, how):
    got, size = empty(step.count), len(step.members)
    sent = [tensor(step.share(place, other)) for other in range(size)]
    finish(dist.reduce_scatter(got, sent, op=getattr(dist.ReduceOp, step.reduce_op), **how))
    return [got], [step.folded([step.share(other, place) for other in range(size)])]


def reduce_scatter_whole(step, place, tensor, empty, how):
    got, size = empty(step.count), len(step.members)
    op = getattr(dist.ReduceOp, step.reduce_op)
    finish(reduce_scatter_single(got, tensor(step.values[place]), op=op, **how))
    return [got], [step.folded([step.share(other, place) for other in range(size)])]


def all_to_all(step, place, tensor, empty, how):
    size = len(step.members)
    got = [empty(step.count) for _ in range(size)]
    finish(dist.all_to_all(got, [tensor(step.share(place, other)) for other in range(size)], **how))
    return got, [step.share(other, place) for other in range(size)]


def all_to_all_whole(step, place, tensor, empty, how):
    size = len(step.members)
    got = empty(step.count * size)
    finish(dist.all_to_all_single(got, tensor(step.values[place]), **how))
    return [got], [[value for other in range(size) for value in step.share(other, place)]]


def barrier(step, place, tensor, empty, how):
    finish(dist.barrier(**how))
    return [], []


PLAY = {
    play.__name__: play
    for play in (
        all_gather, all_gather_whole, gather, scatter, broadcast, all_reduce, reduce_to_root, reduce_scatter,
        reduce_scatter_whole, all_to_all, all_to_all_whole, barrier,
    )
}  # fmt: skip


def play(program):
    """A rank program that plays the steps, and answers with what the rank got and what it should have got."""

    def run(rank):
        groups = {members: dist.new_group(list(members)) for members in dict.fromkeys(s.members for s in program)}
        return [play_step(step, rank, groups[step.members]) for step in program if rank in step.members]

    return run


def play_step(step, rank, group):
    def tensor(values):
        return torch.tensor(values, dtype=step.dtype)

    def empty(count):
        return torch.full((count,), 9, dtype=step.dtype)

    place = step.members.index(rank)
    got, expected = PLAY[step.op](step, place, tensor, empty, {"group": group, "async_op": step.asynchronous})
    return [value.tolist() for value in got], [tensor(values).tolist() for values in expected]


@given(data=st.data(), world_size=st.integers(1, 4), seed=st.none() | st.integers(0, 99))
def test_every_rank_gets_what_the_definition_says_under_every_schedule(data, world_size, seed):
    program = data.draw(st.lists(steps(world_size), max_size=6))
    run = SimulatedWorld(world_size, RoundRobin() if seed is None else Seeded(seed)).run(play(program))
    assert run.stuck == ()
    for result in run.results:
        assert result is not None
        for got, expected in result:
            assert got == expected


@given(data=st.data(), seed=st.integers(0, 99))
def test_the_schedule_does_not_change_what_ranks_do(data, seed):
    program = data.draw(st.lists(steps(4), max_size=6))
    one, other = SimulatedWorld(4).run(play(program)), SimulatedWorld(4, Seeded(seed)).run(play(program))
    for mine, theirs in zip(one.ledgers, other.ledgers, strict=True):
        assert [record.op for record in mine.collectives] == [record.op for record in theirs.collectives]


@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=3, max_size=3), seed=st.integers(0, 99)
)
def test_uneven_splits_of_all_to_all_single(rows, seed):
    def exchange(rank):
        sent = torch.arange(sum(rows[rank])) + 100 * rank
        got = torch.full((sum(row[rank] for row in rows),), -1)
        dist.all_to_all_single(got, sent, [row[rank] for row in rows], rows[rank])
        return got.tolist()

    def expected(rank):
        return [100 * r + sum(row[:rank]) + i for r, row in enumerate(rows) for i in range(row[rank])]

    assert SimulatedWorld(3, Seeded(seed)).run(exchange).results == tuple(map(expected, range(3)))


def test_sums_round_once_for_each_rank_in_rank_order():
    def add(rank):
        value = torch.tensor([[256.0, 1.0, 1.0][rank], [1.0, 1.0, 256.0][rank]], dtype=torch.bfloat16)
        dist.all_reduce(value)
        return value.tolist()

    for seed in range(5):
        assert SimulatedWorld(3, Seeded(seed)).run(add).results == ([256.0, 258.0],) * 3


# Asynchronous calls.


def test_what_is_sent_is_read_when_the_last_member_comes():
    def write_after_the_call(rank):
        value, got = torch.tensor([1.0]), [torch.zeros(1), torch.zeros(1)]
        work = dist.all_gather(got, value, async_op=True)
        value.fill_(2.0)
        work.wait()
        return [tensor.item() for tensor in got]

    assert SimulatedWorld(2).run(write_after_the_call).results == ([2.0, 1.0], [2.0, 1.0])


def test_outputs_are_there_only_after_the_last_member_has_come():
    def look_too_early(rank):
        value = torch.tensor([1.0])
        work = dist.all_reduce(value, async_op=True)
        early = value.item()
        work.wait()
        return early, value.item()

    assert SimulatedWorld(3).run(look_too_early).results == ((1.0, 3.0), (1.0, 3.0), (3.0, 3.0))


def test_handles_may_be_waited_on_in_any_order_and_more_than_once():
    def program(rank):
        values = [torch.tensor([float(rank + number)]) for number in range(3)]
        works = [dist.all_reduce(value, async_op=True) for value in values]
        for work in (works[2], works[0], works[1], works[2]):
            work.wait()
        return [value.item() for value in values], [work.is_completed() for work in works], works[0].result()[0].item()

    assert SimulatedWorld(2).run(program).results == (([1.0, 3.0, 5.0], [True] * 3, 1.0),) * 2


def test_futures_wait_and_call_back_in_their_own_rank():
    def program(rank):
        seen, value = [], torch.tensor([1.0])
        future = dist.all_reduce(value, async_op=True).get_future()
        doubled = future.then(lambda done: seen.append(dist.get_rank()) or done.value()[0] * 2)
        return future.wait()[0].item(), seen, doubled.value().item(), future.done()

    assert SimulatedWorld(3).run(program).results == tuple((3.0, [rank], 6.0, True) for rank in range(3))


def test_callbacks_need_no_wait():
    def program(rank):
        seen = []
        dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda _: seen.append(dist.get_rank()))
        dist.barrier()
        return seen

    assert SimulatedWorld(3).run(program).results == ([0], [1], [2])


# As gloo.


def memory(rank, count=24):
    return torch.arange(count, dtype=torch.float32) + 100 * rank


def transposed(rank):
    return memory(rank)[:6].reshape(2, 3).t()


def strided(rank):
    return memory(rank)[:12:2]


def flat(tensors):
    return [tensor.flatten().tolist() for tensor in tensors]


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


def all_gathered_like(value):
    got = [torch.empty_like(value) for _ in range(2)]
    dist.all_gather(got, value)
    return got


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


# What ranks hold while the data move.


def test_autograd_does_not_see_collectives():
    def program(rank):
        leaf = torch.zeros(2, requires_grad=True)
        saved = leaf.exp()  # autograd keeps it, and gloo writes to it all the same
        dist.all_reduce(saved)
        got = all_gathered_like(saved.detach())
        saved.sum().backward()
        return saved.tolist(), leaf.grad.tolist(), got[0].requires_grad

    assert SimulatedWorld(2).run(program).results == (([2.0, 2.0], [2.0, 2.0], False),) * 2


@pytest.mark.parametrize("inference", [(True, False), (False, True), (True, True)])
def test_ranks_in_and_out_of_inference_mode_meet(inference):
    def program(rank):
        with torch.inference_mode(inference[rank]):
            value = memory(rank, 3)
            dist.all_reduce(value)
            return flat(all_gathered_like(value))

    assert SimulatedWorld(2).run(program).results == ([[100, 102, 104]] * 2,) * 2


def test_a_tensor_may_be_both_given_and_got():
    def program(rank):
        gathered, scattered, exchanged = torch.zeros(4), memory(rank, 4), memory(rank, 4)
        mine = gathered[2 * rank : 2 * rank + 2]
        mine.copy_(memory(rank, 2))
        all_gather_single(gathered, mine)
        reduce_scatter_single(scattered[2 * rank : 2 * rank + 2], scattered)
        dist.all_to_all_single(exchanged, exchanged)
        return gathered.tolist(), scattered.tolist(), exchanged.tolist()

    assert SimulatedWorld(2).run(program).results == (
        ([0, 1, 100, 101], [100, 102, 2, 3], [0, 1, 100, 101]),
        ([0, 1, 100, 101], [100, 101, 104, 106], [2, 3, 102, 103]),
    )
