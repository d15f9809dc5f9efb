"""Messages between two ranks over NCCL: what arrives, what the ledgers say, what is proved where one is missing."""

import pytest
import torch
import torch.distributed as dist

from tpbed.harness.diagnose import diagnose
from tpbed.tp.rank import current
from tpbed.tp.ray_world import RayWorld

pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
BIG = 1 << 24  # float32 elements: no buffer of NCCL's takes 64 MiB on its own


@pytest.fixture(scope="module")
def world():
    with RayWorld(2, "nccl") as world:
        yield world


def healthy(rank):
    total = torch.full((1,), float(rank), device=current().device)
    dist.all_reduce(total)
    return total.item()


def messages(run, rank):
    return [(message.op, message.peer, message.state) for message in run.ledgers[rank].messages]


def test_a_message_arrives_and_is_completed_in_both_ledgers(world):
    def program(rank):
        mine = torch.arange(8.0, device=current().device) * (1 + rank)
        if rank == 0:
            dist.send(mine, 1)
        else:
            dist.recv(mine, 0)
        return mine.tolist()

    run = world.run(program)
    assert run.results == (list(map(float, range(8))),) * 2
    assert messages(run, 0) == [("send", 1, "completed")] and messages(run, 1) == [("recv", 0, "completed")]
    assert all(m.started_ns < m.ended_ns for ledger in run.ledgers for m in ledger.messages)


def test_handles_of_messages_complete(world):
    def program(rank):
        mine = torch.full((4,), float(rank), device=current().device)
        work = dist.isend(mine, 1) if rank == 0 else dist.irecv(mine, 0)
        work.wait()
        torch.cuda.synchronize()
        return mine.tolist(), work.is_completed()

    assert world.run(program).results == (([0.0] * 4, True),) * 2


def test_a_batch_in_which_both_ranks_send_first_completes(world):
    def program(rank):
        mine, theirs = (torch.full((BIG,), float(value), device=current().device) for value in (rank, -1))
        ops = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return theirs.unique().tolist()

    run = world.run(program)
    assert run.results == ([1.0], [0.0])
    assert messages(run, 1) == [("send", 0, "completed"), ("recv", 0, "completed")]


def test_a_slow_sender_is_waited_for(world):
    def program(rank):
        mine = torch.full((4,), float(rank), device=current().device)
        if rank == 0:
            current().sleep(1.0)
            dist.send(mine, 1)
        else:
            dist.recv(mine, 0)
        return mine.sum().item()

    run = world.run(program)
    assert run.results == (0.0, 0.0) and diagnose(run.ledgers, run.liveness) == ()


@pytest.mark.parametrize("op", ["send", "recv"])
def test_a_message_whose_peer_returns_is_a_proved_hang_and_the_ranks_go_on(world, op):
    def program(rank):
        if rank == 1:
            mine = torch.zeros(BIG, device=current().device)
            getattr(dist, op)(mine, 0)
            return mine.sum().item()  # where the host comes to wait

    pids = world.pids
    run = world.run(program)
    [finding] = diagnose(run.ledgers, run.liveness)
    assert (finding.ranks, finding.op) == ((0,), op)
    if run.stuck:
        assert (finding.kind, run.stuck) == ("hang", (1,)) and run.ledgers[1].messages[0].waited
    else:  # a send alone may complete: seen once in two runs on H200, and then nobody hangs for want of its receive
        assert op == "send" and "has no other end" in finding.text
    assert world.run(healthy).results == (1.0, 1.0) and world.pids == pids


def test_messages_and_collectives_share_the_stream_and_are_told_apart(world):
    def program(rank):
        mine = torch.full((4,), float(rank), device=current().device)
        dist.all_reduce(mine)
        dist.send(mine, 1) if rank == 0 else dist.recv(mine, 0)
        dist.barrier()

    run = world.run(program)
    for ledger in run.ledgers:
        assert [c.state for c in ledger.collectives] == ["completed"] * 2
        assert [m.state for m in ledger.messages] == ["completed"]
