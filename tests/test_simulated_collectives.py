"""Collectives of the simulated world: each rank gets what mathematics says."""

from dataclasses import dataclass
from functools import reduce

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from rank_tensors import all_gather_single, all_gathered_like, flat, memory, reduce_scatter_single

from tpbed.tp.schedule import RoundRobin, Seeded
from tpbed.tp.simulated import SimulatedWorld

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
