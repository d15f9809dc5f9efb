"""Functional collectives, device meshes, DTensor and coalescing in simulated ranks, under any schedule."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tpbed.harness.diagnose import diagnose
from tpbed.tp.refusal import UnsupportedCollectiveError
from tpbed.tp.schedule import RoundRobin, Seeded
from tpbed.tp.simulated import SimulatedWorld

seeds = st.integers(0, 2**20)
all_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
reduce_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


@given(seed=seeds)
def test_each_functional_collective_gives_what_it_says(seed):
    def program(rank):
        world, mine = dist.group.WORLD, torch.tensor([float(rank)])
        total = functional.all_reduce(mine, "sum", world)
        every = all_gather(mine, 0, world)
        share = reduce_scatter(torch.arange(3.0), "sum", 0, world)
        turned = functional.all_to_all_single(torch.arange(3.0) + 10 * rank, None, None, world)
        second = functional.broadcast(mine, 1, world)
        assert isinstance(total, functional.AsyncCollectiveTensor)
        return [functional.wait_tensor(value).tolist() for value in (second, turned, share, every, total)]

    assert SimulatedWorld(3, Seeded(seed)).run(program).results == tuple(
        [[1.0], [rank, 10.0 + rank, 20.0 + rank], [3.0 * rank], [0.0, 1.0, 2.0], [3.0]] for rank in range(3)
    )


USES = [
    lambda value: value + 1,
    lambda value: torch.add(value, 1),
    lambda value: torch.ops.aten.add.Tensor(value, 1),
    lambda value: torch.ops.aten.add(value, 1),
    lambda value: torch.stack([value, value])[0] + 1,
    lambda value: torch.ops.aten.cat.default([value.view(1), torch.ones(1)]).sum().view(1),
    lambda value: value.view(1, 1).squeeze(0) + 1,
    lambda value: torch.ops._c10d_functional.wait_tensor(value.elem) + 1,
]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("seed", range(3))
def test_the_first_use_waits_whichever_way_torch_is_entered(use, seed):
    def program(rank):
        return use(functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD)).tolist()

    assert SimulatedWorld(3, Seeded(seed)).run(program).results == ([4.0],) * 3


def test_issuing_waits_for_nobody_and_waiting_is_recorded():
    def program(rank):
        value = functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD)
        return value.elem.item() if rank == 0 else (value + 0).item()

    run = SimulatedWorld(2).run(program)
    assert run.results == (1.0, 2.0)  # rank 0 is first, and does not wait
    assert [ledger.collectives[0].waited for ledger in run.ledgers] == [False, True]


def test_torch_keeps_no_handle_of_what_was_never_waited_for():
    def program(rank):
        if rank:
            value = functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD)
        return value + 1 if rank == 1 else None

    SimulatedWorld(3).run(program)
    assert torch._C._distributed_c10d._get_work_registry_size() == 0  # else they are destroyed after Python


def test_who_uses_a_value_that_never_comes_is_stuck_and_the_cause_named():
    def program(rank):
        if rank == 1:
            raise ValueError
        return functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD) + 1

    run = SimulatedWorld(3).run(program)
    assert run.stuck == (0, 2)
    assert [(found.kind, found.ranks) for found in diagnose(run.ledgers, run.liveness)] == [("hang", (1,))]


def test_a_value_is_used_inside_an_operator_only_if_it_is_there():
    @torch.library.custom_op("tpbed_test::reduce_inside", mutates_args=())
    def reduce_inside(value: torch.Tensor) -> torch.Tensor:
        return functional.wait_tensor(functional.all_reduce(value, "sum", dist.group.WORLD)).clone()

    def program(rank):
        if rank == 0:
            with pytest.raises(UnsupportedCollectiveError, match=r"operator of torch\.ops"):
                torch.ops.tpbed_test.reduce_inside(torch.ones(1))
            return None
        return torch.ops.tpbed_test.reduce_inside(torch.ones(1)).item()

    assert SimulatedWorld(2).run(program).results == (None, 2.0)


@settings(max_examples=10)
@given(seed=seeds)
def test_meshes_and_dtensors_are_each_ranks_own(seed):
    def program(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        total = functional.all_reduce(torch.tensor([float(rank)]), "sum", (mesh, 1)).tolist()
        rows = distribute_tensor(torch.arange(8.0).view(2, 4), mesh["tp"], [Shard(1)])
        weight = distribute_tensor(torch.ones(4, 2), mesh["tp"], [Shard(0)])
        product = rows @ weight
        return total, product.full_tensor().tolist(), product.redistribute(placements=[Replicate()]).to_local().tolist()

    product = [[6.0, 6.0], [22.0, 22.0]]
    results = SimulatedWorld(4, Seeded(seed)).run(program).results
    assert results == tuple(([total], product, product) for total in (1.0, 1.0, 5.0, 5.0))


@pytest.mark.parametrize("schedule", [RoundRobin(), Seeded(1), Seeded(2)])
def test_a_parallel_module_runs_forward_and_back(schedule):
    def program(rank):
        model = torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 4, bias=False))
        for weight in model.parameters():
            torch.nn.init.ones_(weight)
        mesh = init_device_mesh("cpu", (3,))
        model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        answer = model(torch.ones(1, 4))
        answer.sum().backward()
        return answer.tolist(), model[0].weight.grad.to_local().tolist()

    assert SimulatedWorld(3, schedule).run(program).results == (([[24.0] * 4], [[4.0] * 4] * 2),) * 3


def test_a_mesh_of_one_run_is_not_taken_for_one_of_another():
    def program(rank, groups_before):
        for _ in range(groups_before):
            dist.new_group([0])
        mesh = init_device_mesh("cpu", (2,))
        value = distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)])
        return (value @ value.T).full_tensor().sum().item()

    for before in (0, 2, 1):
        assert SimulatedWorld(2).run(lambda rank, before=before: program(rank, before)).results == (8.0, 8.0)


@given(seed=seeds, asynchronous=st.booleans())
def test_coalesced_collectives_are_one_collective(seed, asynchronous):
    def program(rank):
        one, two, every, share = torch.ones(2, 1), torch.ones(3), torch.zeros(6), torch.zeros(2)
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            dist.all_reduce(one)
            dist.all_reduce(two)
        manager.wait()
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            dist.all_gather_into_tensor(every, two[:2] * rank)
        manager.wait()
        with dist._coalescing_manager(async_ops=asynchronous) as manager:
            dist.reduce_scatter_tensor(share, every)
        manager.wait()
        return one.tolist(), two.tolist(), every.tolist(), share.tolist()

    run = SimulatedWorld(3, Seeded(seed)).run(program)
    every = [0.0, 0.0, 3.0, 3.0, 6.0, 6.0]
    assert run.results == tuple(([[3.0]] * 2, [3.0] * 3, every, [9.0 * rank] * 2) for rank in range(3))
    assert [record.seq for record in run.ledgers[0].collectives] == [1, 2, 3]


def test_a_coalescing_manager_with_a_device_is_refused_as_by_gloo():
    def program(rank):
        with pytest.raises(RuntimeError, match="startCoalescing"), dist._coalescing_manager(device=torch.device("cpu")):
            dist.all_reduce(torch.ones(1))

    assert SimulatedWorld(2).run(program).ledgers[0].end.how == "returned"


def test_groups_made_in_another_order_are_found():
    def program(rank):
        first, second = ([0], [0, 1]) if rank == 0 else ([0, 1], [0])
        groups = [dist.new_group(first), dist.new_group(second)]
        dist.barrier(groups[rank == 0])

    run = SimulatedWorld(2).run(program)
    (found,) = diagnose(run.ledgers, run.liveness)
    assert (found.kind, found.op, found.group) == ("mismatch", "new_group", "1")


def test_the_one_rank_that_makes_its_groups_in_another_order_is_named():
    def program(rank):
        for members in ([0, 1, 2], [1, 2, 3]) if rank != 2 else ([1, 2, 3], [0, 1, 2]):
            dist.new_group(members)

    run = SimulatedWorld(4).run(program)
    assert [(found.kind, found.ranks) for found in diagnose(run.ledgers, run.liveness)] == [("mismatch", (2,))]
