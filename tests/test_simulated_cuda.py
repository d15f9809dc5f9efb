"""Simulated ranks that share one CUDA device: data, streams, generators, and graph capture, which cannot wait."""

import pytest
import torch
import torch.distributed as dist

from tpbed.tp.rank import current
from tpbed.tp.refusal import UnsupportedCollectiveError
from tpbed.tp.simulated import SimulatedWorld

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def world(world_size=4):
    return SimulatedWorld(world_size, device="cuda:0")


def test_collectives_of_device_tensors():
    def program(rank):
        device = current().device
        total, whole = torch.full((3,), float(rank), device=device), torch.zeros(8, device=device)
        dist.all_reduce(total)
        all_gather_single(whole, torch.full((2,), float(rank), device=device))
        parts = [torch.zeros(2, device=device) for _ in range(4)]
        dist.all_to_all(parts, list((torch.arange(8.0, device=device) + 10 * rank).chunk(4)))
        return total.tolist(), whole.tolist(), [part.tolist() for part in parts]

    whole = [float(rank) for rank in range(4) for _ in range(2)]
    assert world().run(program).results == tuple(
        ([6.0] * 3, whole, [[10 * other + 2 * rank, 10 * other + 2 * rank + 1.0] for other in range(4)])
        for rank in range(4)
    )


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_on_streams_of_their_own_see_what_was_queued_before(asynchronous):
    def program(rank):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            value = torch.ones(1 << 20, device="cuda")
            for _ in range(200):
                value = value * 1.0 + 0.0
            torch.cuda._sleep(10_000_000)
            value += rank
            work = dist.all_reduce(value, async_op=asynchronous)
            if asynchronous:
                work.wait()
            doubled = value * 2
            assert torch.cuda.current_stream() == stream
        torch.cuda.current_stream().wait_stream(stream)
        return doubled.min().item(), doubled.max().item()

    assert world().run(program).results == ((20.0, 20.0),) * 4


def test_each_rank_has_its_own_generator_stream_and_seed():
    def draws(rank):
        first = torch.rand(3, device="cuda").tolist()
        stream = torch.cuda.Stream() if rank else torch.cuda.current_stream()
        torch.cuda.set_stream(stream)
        dist.barrier()
        return first, torch.rand(3, device="cuda").tolist(), torch.cuda.current_stream() == stream

    before = torch.cuda.current_stream()
    state = torch.cuda.get_rng_state()
    results = world(3).run(draws).results
    assert results == results[:1] * 3
    assert results[0][0] != results[0][1]
    assert torch.cuda.current_stream() == before
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_a_collective_in_a_graph_capture_is_refused():
    def program(rank):
        value = torch.ones(4, device="cuda")
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graph.capture_begin()
            with pytest.raises(UnsupportedCollectiveError, match="capture of a CUDA graph"):
                dist.all_reduce(value)
            value * 2
            graph.capture_end()
        dist.all_reduce(value)
        return value.tolist()

    assert world(2).run(program).results == ([2.0] * 4,) * 2
