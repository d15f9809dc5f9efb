"""What simulated ranks may not do, and that they are told so by name."""

import threading

import pytest
import torch
import torch.distributed as dist
from rank_programs import total

from tpbed.tp.refusal import UnsupportedCollectiveError
from tpbed.tp.simulated import SimulatedWorld
from tpbed.tp.simulated_run import ForeignGroupError


def test_groups_of_other_ranks_and_of_other_runs_are_refused():
    shared = []

    def program(rank):
        shared.append(dist.group.WORLD)
        dist.barrier(group=shared[0])

    run = SimulatedWorld(2).run(program)
    assert run.ledgers[1].end.error_type == ForeignGroupError.__name__
    with pytest.raises(ForeignGroupError):
        shared[0].barrier().wait()


def test_another_thread_of_a_rank_is_refused():
    def program(rank):
        said = []

        def call():
            with pytest.raises(UnsupportedCollectiveError, match="thread") as refused:
                dist.barrier()
            said.append(refused)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return len(said)

    assert SimulatedWorld(2).run(program).results == (1, 1)


@torch.library.custom_op("tpbed_test::wait", mutates_args=())
def wait_in_an_operator(value: torch.Tensor) -> torch.Tensor:
    called_outside.pop().wait()
    return value.clone()


called_outside = []


def in_backward(rank):
    value = torch.ones(2, requires_grad=True)
    value.register_hook(lambda grad: dist.all_reduce(grad.clone()))
    (value * 2).sum().backward()


@torch.library.custom_op("tpbed_test::meet", mutates_args=())
def meet_in_an_operator(value: torch.Tensor) -> torch.Tensor:
    dist.barrier()
    return value.clone()


def in_an_operator(rank):
    torch.ops.tpbed_test.meet(torch.ones(1))


def in_a_callback(rank):
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    future.wait()
    future.then(lambda _: dist.barrier()).value()


@pytest.mark.parametrize(
    ("program", "inside"),
    [
        (in_backward, r"backward\(\)"),
        (in_an_operator, "operator of torch.ops"),
        (in_a_callback, "callback of a future"),
    ],
)
def test_waiting_where_torch_would_mix_up_ranks_is_refused_by_name(program, inside):
    def refused(rank):
        with pytest.raises((UnsupportedCollectiveError, RuntimeError), match=inside):
            program(rank)
        return total(rank)

    assert SimulatedWorld(2).run(refused).results == (3, 3)
    assert SimulatedWorld(1).run(program).ledgers[0].end.how == "returned"  # alone, it need not wait


def test_a_handle_is_not_waited_on_in_an_operator_either():
    def program(rank):
        called_outside.append(dist.barrier(async_op=True))
        if rank == 0:
            with pytest.raises(UnsupportedCollectiveError, match="operator"):
                torch.ops.tpbed_test.wait(torch.ones(1))
        else:
            torch.ops.tpbed_test.wait(torch.ones(1))  # it is complete
        return total(rank)

    assert SimulatedWorld(2).run(program).results == (3, 3)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: dist.all_reduce(torch.ones(2).to_sparse()), "sparse"),
        (lambda: dist.distributed_c10d._get_default_store().get("key"), "Store.get"),
        (lambda: dist.split_group(None, [[0], [1]]), "split_group"),
        (lambda: dist.group.WORLD.gather_single(torch.ones(4), torch.ones(2)), "gather_single"),
        (lambda: dist.group.WORLD.merge_remote_group(None, 2), "merge_remote_group"),
        (lambda: torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2)), "DistributedDataParallel"),
    ],
)
def test_what_is_not_simulated_is_refused_by_name(call, name):
    def program(rank):
        with pytest.raises((UnsupportedCollectiveError, ValueError), match=name):  # torch 2.14 refuses one itself
            call()
        return total(rank)

    assert SimulatedWorld(2).run(program).results == (3, 3)
