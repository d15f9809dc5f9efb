"""Unmodified torch.distributed in simulated ranks: book of groups, objects, meshes, and the caller's own groups."""

import gc
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tpbed.tp.ledger import WORLD
from tpbed.tp.rank import current
from tpbed.tp.simulated import SimulatedWorld

MINUTE = timedelta(minutes=1)


def sum_over(group=None, value=None):
    tensor = torch.tensor([dist.get_rank() if value is None else value])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def test_each_rank_is_itself():
    def program(rank):
        group = dist.group.WORLD
        assert dist.is_initialized()
        assert dist.get_process_group_ranks(group) == [0, 1, 2]
        assert (group.rank(), group.size()) == (rank, 3)
        assert dist.get_global_rank(group, rank) == rank
        return dist.get_rank(), dist.get_world_size(), current().rank, current().world_size, dist.get_backend()

    assert SimulatedWorld(3).run(program).results == tuple((rank, 3, rank, 3, "tpbed") for rank in range(3))


@pytest.mark.parametrize(
    "options", [{}, {"backend": "gloo"}, {"backend": "nccl", "timeout": MINUTE}, {"group_desc": "tensor parallel"}]
)
def test_sub_groups_of_any_backend_are_simulated(options):
    def program(rank):
        even, odd = dist.new_group([0, 2], **options), dist.new_group([3, 1], **options)
        mine, other = (odd, even) if rank % 2 else (even, odd)
        assert other is dist.GroupMember.NON_GROUP_MEMBER
        assert (dist.get_rank(mine), dist.get_world_size(mine)) == (rank // 2, 2)
        assert dist.get_group_rank(mine, rank) == rank // 2
        assert dist.get_backend(mine) == options.get("backend", "tpbed")
        assert mine.group_desc == options.get("group_desc", "undefined")
        return sum_over(mine), sum_over()

    run = SimulatedWorld(4).run(program)
    assert run.results == ((2, 6), (4, 6), (2, 6), (4, 6))
    assert [ledger.groups for ledger in run.ledgers] == [
        {WORLD: (0, 1, 2, 3), name: members} for name, members in [("1", (0, 2)), ("2", (1, 3))] * 2
    ]


def test_groups_of_the_same_ranks_are_kept_apart():
    def program(rank):
        first, second = dist.new_group(), dist.new_group()
        one, two = torch.ones(1), torch.full((1,), 10.0)
        order = [(first, one), (second, two)]
        works = [
            dist.all_reduce(value, group=group, async_op=True) for group, value in (order if rank else order[::-1])
        ]
        for work in works:
            work.wait()
        return one.item(), two.item()

    assert SimulatedWorld(2).run(program).results == ((2.0, 20.0),) * 2


def test_new_subgroups_and_local_synchronization():
    def program(rank):
        pair, _ = dist.new_subgroups(2)
        if rank >= 2:
            return sum_over(pair)
        mine = dist.new_group([0, 1], use_local_synchronization=True)
        return sum_over(pair), sum_over(mine)

    assert SimulatedWorld(4).run(program).results == ((1, 1), (1, 1), 5, 5)


def test_objects():
    def program(rank):
        everybody, shared, mine = [None] * 3, [None], [None]
        dist.all_gather_object(everybody, {"rank": rank})
        if rank == 1:
            shared = [("from", 1)]
        dist.broadcast_object_list(shared, 1)
        dist.scatter_object_list(mine, ["a", "bb", "ccc"] if rank == 2 else None, 2)
        gathered = [None] * 3 if rank == 0 else None
        dist.gather_object(mine[0], gathered, 0)
        return everybody, shared, mine, gathered

    everybody = [{"rank": rank} for rank in range(3)]
    assert SimulatedWorld(3).run(program).results == tuple(
        (everybody, [("from", 1)], [mine], ["a", "bb", "ccc"] if rank == 0 else None)
        for rank, mine in enumerate(["a", "bb", "ccc"])
    )


def test_device_meshes():
    def program(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return sum_over(mesh.get_group("dp")), sum_over(mesh.get_group("tp")), mesh.get_local_rank("tp")

    assert SimulatedWorld(4).run(program).results == ((2, 1, 0), (4, 1, 1), (2, 5, 0), (4, 5, 1))


def test_a_program_may_destroy_its_groups_and_make_them_again():
    def program(rank):
        sub = dist.new_group([0, 1])
        before = sum_over(sub)
        dist.destroy_process_group(sub)
        dist.destroy_process_group()
        assert not dist.is_initialized()
        dist.init_process_group("gloo")
        return before, sum_over(), sum_over(dist.new_group([0, 1])), dist.get_backend()

    world = SimulatedWorld(2)
    for _ in range(2):
        assert world.run(program).results == ((1, 1, 1, "gloo"),) * 2


def test_a_group_made_again_has_nothing_of_the_one_before():
    def program(rank):
        if rank == 1:
            dist.barrier(async_op=True)  # which nobody joins
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        return sum_over()

    assert SimulatedWorld(2).run(program).results == (1, 1)


def test_one_rank_that_destroys_its_groups_leaves_those_of_the_others():
    def program(rank):
        if rank == 0:
            return dist.destroy_process_group()
        return dist.get_world_size(), dist.get_rank()

    assert SimulatedWorld(3).run(program).results == (None, (3, 1), (3, 2))


def test_names_in_torchs_registry_are_one_per_rank_and_go_with_the_run():
    def program(rank):
        name = dist.group.WORLD.group_name
        found = dist.distributed_c10d._resolve_process_group(name)
        dist.barrier()
        return name, found.rank(), dist.distributed_c10d._resolve_process_group(name).rank()

    results = SimulatedWorld(3).run(program).results
    assert [(found, later) for _, found, later in results] == [(rank, rank) for rank in range(3)]
    assert len({name for name, _, _ in results}) == 3
    with pytest.raises(RuntimeError):
        dist.distributed_c10d._resolve_process_group(results[0][0])


def test_the_callers_own_groups_are_as_before():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mine, name = dist.group.WORLD, dist.group.WORLD.group_name
        assert (
            SimulatedWorld(3).run(lambda rank: (sum_over(), dist.destroy_process_group())).results == ((3, None),) * 3
        )
        assert dist.group.WORLD is mine
        assert dist.distributed_c10d._resolve_process_group(name) is not None
        assert (dist.get_world_size(), sum_over(value=7)) == (1, 7)
        assert dist.new_group([0]).size() == 1
    finally:
        dist.destroy_process_group()


def test_errors_of_a_program_about_groups_are_its_own():
    def program(rank):
        with pytest.raises(ValueError, match="Rank 5 is out of range|within the world_size"):
            dist.new_group([0, 5])
        with pytest.raises(ValueError, match="twice"):
            dist.init_process_group("gloo")
        return sum_over()

    assert SimulatedWorld(2).run(program).results == (1, 1)


@pytest.mark.filterwarnings("ignore:torch.distributed.nn:FutureWarning")
def test_collectives_with_gradients_find_the_group_of_the_rank_that_calls():
    def program(rank):
        value = torch.ones(2, requires_grad=True)
        total = torch.distributed.nn.functional.all_reduce(value * (rank + 1))
        return total.tolist()

    assert SimulatedWorld(2).run(program).results == ([3.0, 3.0],) * 2


def test_dtensor_keeps_nothing_of_a_run_that_is_over():
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    def program(rank):
        mesh = dist.init_device_mesh("cpu", (2,))
        left = distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)])
        return (left @ distribute_tensor(torch.ones(2, 2), mesh, [Replicate()])).full_tensor().sum().item()

    def specs():
        gc.collect()
        return sum(type(kept).__name__ in ("DTensorSpec", "DeviceMesh", DTensor.__name__) for kept in gc.get_objects())

    world = SimulatedWorld(2)
    assert world.run(program).results == (8.0, 8.0)
    before = specs()
    for _ in range(3):
        world.run(program)
    assert specs() == before
