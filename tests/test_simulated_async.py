"""Asynchronous collectives of the simulated world: when tensors are read and written, handles and futures."""

import torch
import torch.distributed as dist

from tpbed.tp.simulated import SimulatedWorld


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
