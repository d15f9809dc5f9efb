"""Messages of simulated ranks: they meet as over gloo, are recorded apart from collectives, and their hangs are proved.

Expected values were measured with torch 2.13 over gloo, two processes on one machine.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tpbed.harness.diagnose import diagnose
from tpbed.tp.payload import OverrunError
from tpbed.tp.rank import current
from tpbed.tp.schedule import Seeded
from tpbed.tp.simulated import SimulatedWorld
from tpbed.tp.stuck import find_stuck


def number(value):
    return torch.tensor([float(value)])


def findings(program, size=2):
    run = SimulatedWorld(size).run(program)
    assert find_stuck(run.ledgers, run.liveness) == set(run.stuck)
    return run.stuck, [(found.kind, found.ranks) for found in diagnose(run.ledgers, run.liveness)]


# What comes.


@given(seed=st.integers(0, 2**20), tags=st.permutations(range(4)))
def test_messages_go_by_tag_whatever_the_order_of_their_receives(seed, tags):
    def program(rank):
        if rank == 0:
            works = [dist.isend(number(tag), 1, tag=tag) for tag in range(4)]
        else:
            got = {tag: number(-1) for tag in tags}
            works = [dist.irecv(got[tag], 0, tag=tag) for tag in tags]
        for work in works:
            work.wait()
        return [got[tag].item() for tag in range(4)] if rank else None

    assert SimulatedWorld(2, Seeded(seed)).run(program).results[1] == [0.0, 1.0, 2.0, 3.0]


@given(seed=st.integers(0, 2**20), sizes=st.lists(st.integers(0, 3), max_size=6))
def test_messages_of_a_pair_and_tag_come_in_the_order_in_which_they_were_sent(seed, sizes):
    def program(rank):
        if rank == 0:
            for place, size in enumerate(sizes):
                dist.send(torch.full((size,), float(place)), 2)
        if rank < 2:
            return dist.barrier()
        got = [torch.empty(size) for size in sizes]
        for value in got:
            dist.recv(value, 0)
        dist.barrier()
        return [value.tolist() for value in got]

    expected = [[float(place)] * size for place, size in enumerate(sizes)]
    assert SimulatedWorld(3, Seeded(seed)).run(program).results == (None, None, expected)


@given(seed=st.integers(0, 2**20), sources=st.permutations([0, 0, 0, 1, 1, 1]))
def test_messages_under_way_meet_by_source_and_in_order(seed, sources):
    """Whether sends wait for their receives or the other way round."""

    def program(rank):
        if rank < 2:
            works = [dist.isend(number(10 * rank + count), 2) for count in range(3)]
        else:
            got = [number(-1) for _ in sources]
            works = [dist.irecv(value, source) for value, source in zip(got, sources, strict=True)]
        for work in works:
            work.wait()
        return (
            [[v.item() for v, s in zip(got, sources, strict=True) if s == peer] for peer in (0, 1)]
            if rank == 2
            else None
        )

    assert SimulatedWorld(3, Seeded(seed)).run(program).results[2] == [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]


@given(seed=st.integers(0, 2**20))
def test_a_receive_from_anybody_says_who_sent_as_a_global_rank(seed):
    def program(rank):
        group = dist.new_group([1, 2, 3])
        if rank in (1, 2):
            return dist.send(number(rank), 3, group=group)
        if rank == 3:
            got = [number(0), number(0)]
            return [(dist.recv(value, group=group), value.item()) for value in got]
        return None

    run = SimulatedWorld(4, Seeded(seed)).run(program)
    assert sorted(run.results[3]) == [(1, 1.0), (2, 2.0)]
    peers = [(record.peer, record.anysource) for record in run.ledgers[3].messages]
    assert sorted(peers) == [(0, True), (1, True)]  # ranks within the group


def test_pipelines_batches_objects_and_complex_numbers():
    def program(rank):
        ring = number(0)
        operations = [
            dist.P2POp(dist.isend, number(rank), (rank + 1) % 3),
            dist.P2POp(dist.irecv, ring, (rank - 1) % 3),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        objects, turned = [{"from": rank}] if rank == 0 else [None], torch.full((1,), 1j * rank)
        if rank < 2:
            (dist.send_object_list if rank == 0 else dist.recv_object_list)(objects, 1 - rank)
            (dist.recv if rank == 0 else dist.send)(turned, 1 - rank)
        return ring.item(), objects, turned.item()

    assert SimulatedWorld(3).run(program).results == (
        (2.0, [{"from": 0}], 1j),
        (0.0, [{"from": 0}], 1j),
        (1.0, [None], 2j),
    )


def test_what_is_sent_is_read_when_it_is_received():
    def program(rank):
        value = number(1)
        if rank == 0:
            work = dist.isend(value, 1)
            value.fill_(9)
            dist.barrier()
            return work.wait()
        dist.barrier()
        dist.recv(value, 0)
        return value.item()

    assert SimulatedWorld(2).run(program).results == (True, 9.0)


def test_only_bytes_count():
    def program(rank):
        if rank == 0:
            for _ in range(3):
                dist.send(torch.ones(2), 1)
            return None
        longer, integers, shorter = torch.zeros(3), torch.zeros(2, dtype=torch.int32), torch.zeros(1)
        dist.recv(longer, 0)
        dist.recv(integers, 0)
        with pytest.raises(OverrunError):  # gloo aborts this process
            dist.recv(shorter, 0)
        return longer.tolist(), integers.tolist(), shorter.tolist()

    assert SimulatedWorld(2).run(program).results[1] == ([1.0, 1.0, 0.0], [0x3F800000] * 2, [0.0])


def test_handles_speak_as_gloos():
    def program(rank):
        if rank == 0:
            return dist.send(number(1), 1)
        work = dist.irecv(number(0), 0)
        before = [work.is_completed() for _ in range(5)]
        work.wait()
        for call in (work.result, work.get_future):
            with pytest.raises(RuntimeError, match="not implemented"):
                call()
        return before, work.is_completed(), work.is_success(), work.exception()

    assert SimulatedWorld(2).run(program).results[1] == ([False] * 5, True, True, None)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: dist.send(torch.ones(2, 2).t()[:1], 1), RuntimeError, "contiguous"),
        (lambda: dist.send(torch.ones(1), 1, tag=-1), RuntimeError, "nonnegative"),
        (lambda: dist.send(torch.ones(1), dist.get_rank()), ValueError, "same as the rank"),
        (lambda: dist.isend(torch.ones(1), dist.get_rank()), RuntimeError, "not connected"),
        (lambda: dist.send(torch.ones(1), 7), dist.DistStoreError, "7"),
    ],
)
def test_what_gloo_refuses_is_refused_at_the_call(call, error, said):
    def program(rank):
        if rank == 0:
            with pytest.raises(error, match=said):
                call()

    SimulatedWorld(2).run(program)
    assert SimulatedWorld(2).run(program).ledgers[0].end.how == "returned"


# What is recorded.


def test_messages_are_numbered_apart_from_collectives():
    def program(rank):
        dist.barrier()
        dist.send(number(1), 1, tag=5) if rank == 0 else dist.recv(number(0), 0, tag=5)
        dist.barrier()

    for ledger in SimulatedWorld(2).run(program).ledgers:
        assert [(record.op, record.seq) for record in ledger.collectives] == [("barrier", 1), ("barrier", 2)]
        (record,) = ledger.messages
        assert (record.seq, record.peer, record.tag, record.state) == (1, 1 - ledger.rank, 5, "completed")
        assert (record.op, record.waited) == (("send", "recv")[ledger.rank], True)
        assert "test_simulated_messages.py" in record.site


# Who waits, and why.


def both_send_first(rank):
    dist.send(number(rank), 1 - rank)
    dist.recv(number(0), 1 - rank)


def both_receive_first(rank):
    dist.recv(number(0), 1 - rank)
    dist.send(number(rank), 1 - rank)


def other_tags(rank):
    dist.send(number(0), 1, tag=1) if rank == 0 else dist.recv(number(0), 0, tag=2)


def sender_raises(rank):
    if rank == 0:
        raise ValueError
    dist.recv(number(0), 0)


def sender_dies(rank):
    if rank == 0:
        current().die("kill", "planned")
    dist.recv(number(0), 0)


def receiver_returns(rank):
    if rank == 0:
        dist.send(number(0), 1)


def nobody_sends(rank):
    if rank == 1:
        dist.recv(number(0))


def handle_is_dropped(rank):
    if rank == 0:
        dist.isend(number(0), 1)
        dist.barrier()
    else:
        dist.barrier()
        dist.recv(number(0), 0)


def one_receive_too_many(rank):
    if rank == 0:
        return dist.send(number(0), 1)
    return [dist.recv(number(0), 0) for _ in range(2)]


@pytest.mark.parametrize(
    ("program", "stuck", "kind", "ranks"),
    [
        (both_send_first, (0, 1), "hang", (0, 1)),
        (both_receive_first, (0, 1), "hang", (0, 1)),
        (other_tags, (0, 1), "hang", (0, 1)),
        (sender_raises, (1,), "hang", (0,)),
        (sender_dies, (1,), "hang", (0,)),
        (receiver_returns, (0,), "hang", (1,)),
        (nobody_sends, (1,), "hang", (0,)),
        (handle_is_dropped, (1,), "hang", (0,)),
        (one_receive_too_many, (1,), "hang", (0,)),
    ],
)
def test_a_message_that_never_meets_is_proved_and_its_cause_named(program, stuck, kind, ranks):
    assert findings(program) == (stuck, [(kind, ranks)])


def test_a_receive_from_anybody_is_stuck_only_if_everybody_is():
    def program(rank):
        if rank == 0:
            return dist.recv(number(0))
        if rank == 2:
            dist.send(number(0), 0)
        return None

    assert findings(program, 3) == ((), [])


def test_the_far_end_of_a_chain_of_waits_is_to_blame():
    def program(rank):
        if rank < 3:
            dist.recv(number(0), rank + 1)
        if rank == 3:
            raise ValueError
        dist.send(number(0), rank - 1)

    assert findings(program, 4) == ((0, 1, 2), [("hang", (3,))])


@pytest.mark.parametrize("call", [lambda: dist.isend(number(0), 1), lambda: dist.irecv(number(0), 1)])
def test_a_message_without_another_end_is_no_pass_in_silence(call):
    kept = []
    assert findings(lambda rank: kept.append(call()) if rank == 0 else None) == ((), [("mismatch", (1,))])
    assert findings(lambda rank: call() and None if rank == 0 else None) == ((), [("mismatch", (0,))])  # dropped


def test_ends_that_do_not_fit_are_a_mismatch():
    def program(rank):
        dist.send(torch.ones(2), 1) if rank == 0 else dist.recv(torch.ones(1), 0)

    assert findings(program) == ((), [("mismatch", (0, 1))])


def test_a_timeout_of_a_message_passes_on_the_worlds_clock_and_names_the_peer():
    def program(rank):
        if rank == 0:
            return current().sleep(2)
        return dist.irecv(number(0), 0).wait(timedelta(seconds=1))

    run = SimulatedWorld(2).run(program)
    assert "Timed out waiting 1000ms for recv" in run.ledgers[1].end.message
    assert [(found.kind, found.ranks) for found in diagnose(run.ledgers, run.liveness)] == [("hang", (0,))]


# Barriers that tell.


def test_a_monitored_barrier_names_who_is_missing_after_its_timeout():
    def program(rank):
        if rank == 2:
            return None
        return dist.monitored_barrier(timeout=timedelta(seconds=5))

    run = SimulatedWorld(4).run(program)
    assert run.ledgers[0].end.message == "[Rank 0]: Rank 2 failed to pass monitoredBarrier in 5000 ms"
    assert "check rank 0 logs" in run.ledgers[1].end.message
    assert 5e9 <= run.ledgers[0].end.at_ns < 6e9
    assert [(found.kind, found.ranks) for found in diagnose(run.ledgers, run.liveness)] == [("hang", (2,))]


def test_who_comes_after_the_timeout_does_not_pass():
    def program(rank):
        if rank == 1:
            current().sleep(3)
        with pytest.raises(RuntimeError, match="Ranks 1 failed" if rank == 0 else "check rank 0"):
            dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=True)
        return True

    assert SimulatedWorld(2).run(program).results == (True, True)


def test_a_monitored_barrier_that_all_reach_lets_them_pass():
    assert SimulatedWorld(3).run(lambda rank: dist.monitored_barrier()).results == (None,) * 3
