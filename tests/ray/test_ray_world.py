"""RayWorld on real processes over gloo: what healthy ranks get, what is seen of the others, and what is left."""

import atexit
import collections
import ctypes
import functools
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import ray
import ray._private.worker
import torch
import torch.distributed as dist
from ray._private.utils import publish_error_to_driver

from tpbed.harness.diagnose import diagnose
from tpbed.tp import rank as this
from tpbed.tp.pickling import ProgramError
from tpbed.tp.ray_world import ClosedError, InitError, RayWorld
from tpbed.tp.store import StoreError, StoreServer

pytestmark = pytest.mark.xdist_group("ray")


def healthy(rank):
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return total.item()


def assert_ready(world, pids):
    """The next program runs, on these processes."""
    assert world.run(healthy).results == (6.0,) * 4
    assert world.pids == pids


def states(run):
    return [look.state for look in run.liveness]


# Healthy ranks


def test_collectives_give_every_rank_its_result(world):
    def program(rank):
        mine, parts = torch.tensor([rank, 10 * rank]), [torch.zeros(2, dtype=torch.long) for _ in range(4)]
        dist.all_gather(parts, mine)
        dist.broadcast(mine, src=2)
        return torch.stack(parts), mine

    run = world.run(program)
    for parts, mine in run.results:
        assert parts.tolist() == [[0, 0], [1, 10], [2, 20], [3, 30]] and mine.tolist() == [2, 20]
    assert [(c.op, c.seq, c.state) for c in run.ledgers[3].collectives] == [
        ("all_gather", 1, "completed"),
        ("broadcast", 2, "completed"),
    ]
    assert run.ledgers[0].collectives[1].root == 2 and run.ledgers[0].collectives[0].site.startswith(
        "ray/test_ray_world.py:"
    )
    assert run.world == world.name == "ray+gloo" and states(run) == ["ended"] * 4
    assert run.stuck == () and run.proof_ms is None and run.recovery_ms is None


def test_sub_groups_and_handles_work(world):
    def program(rank):
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        mine = torch.tensor([1.0 + rank])
        handle = dist.all_reduce(mine, group=pairs[rank % 2], async_op=True)
        handle.wait()
        dist.barrier()
        return mine.item()

    run = world.run(program)
    assert run.results == (4.0, 6.0, 4.0, 6.0)
    assert sorted(run.ledgers[1].groups.values()) == [(0, 1, 2, 3), (1, 3)]
    assert [c.waited for c in run.ledgers[1].collectives] == [True, True]
    assert world.run(healthy).results == (6.0,) * 4


def test_a_rank_finds_the_environment_of_a_launcher(world):
    def program(rank):
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        return [int(os.environ[n]) for n in names], os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) > 0

    results = world.run(program).results
    assert results[3] == ([3, 3, 4, 4], "127.0.0.1", True)


def test_a_run_finds_torch_as_the_last_did(world):
    def disturb(rank):
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        os.environ["TPBED_TEST"] = "left behind"
        return torch.rand(1, dtype=torch.float32).item()

    def look(rank):
        return torch.is_grad_enabled(), torch.get_default_dtype(), "TPBED_TEST" in os.environ, torch.rand(1).item()

    drawn = world.run(disturb).results
    assert world.run(look).results == tuple((True, torch.float32, False, number) for number in drawn)


def test_a_clean_group_is_kept_and_an_unclean_one_is_not(world):
    def program(rank, note):
        dist.all_reduce(torch.zeros(1), async_op=True).wait() if note else dist.all_reduce(
            torch.zeros(1), async_op=True
        )
        notes = dist.group.WORLD.__dict__.setdefault("notes", [])
        notes.append(note)
        return list(notes)

    world.run(lambda rank: dist.new_group([0, 1]))
    notes = [world.run(functools.partial(program, note=note)).results[2] for note in (1, 2, 0, 4)]
    assert notes == [[1], [1, 2], [1, 2, 0], [4]]  # the third run did not wait for its collective


def test_decisions_steps_and_checks_reach_the_ledger(world):
    def program(rank):
        this.step("warm-up")
        this.decision("fast_path", rank < 2, because=f"rank is {rank}")
        this.check(True, "never")
        this.current().sleep(0.0)

    ledger = world.run(program).ledgers[1]
    assert ledger.steps == ("warm-up",) and ledger.checks == 1
    assert (ledger.decisions[0].value, ledger.decisions[0].because) == ("True", "rank is 1")


def test_a_long_ledger_is_whole(world):
    def program(rank):
        for number in range(2000):
            this.step(str(number))

    assert [len(ledger.steps) for ledger in world.run(program).ledgers] == [2000] * 4


def test_a_slow_rank_is_waited_for(world):
    def program(rank):
        if rank == 1:
            this.current().sleep(0.3)
        return healthy(rank)

    run = world.run(program, stall_after_s=5.0)
    assert run.results == (6.0,) * 4 and run.stuck == ()


def test_a_rank_that_waits_for_a_slow_one_is_not_stalled(world):
    def program(rank):
        if rank == 1:
            for _ in range(6):
                this.step("slow")
                this.current().sleep(0.1)
        return healthy(rank)

    assert world.run(program, stall_after_s=0.4).results == (6.0,) * 4


def test_big_results_and_programs_travel(world):
    weights = torch.arange(1_000_000)

    def program(rank):
        return weights + rank

    results = world.run(program).results
    assert all(torch.equal(result, weights + rank) for rank, result in enumerate(results))


# Ranks that end early


def test_a_rank_that_raises_leaves_its_peers_proved_stuck_and_nobody_dies(world):
    def program(rank):
        dist.barrier()
        if rank == 2:
            raise ValueError("no k left")
        dist.all_reduce(torch.zeros(3))

    pids = world.pids
    run = world.run(program)
    end = run.ledgers[2].end
    assert (end.how, end.error_type, end.message) == ("raised", "ValueError", "no k left")
    assert end.site.startswith("ray/test_ray_world.py:") and "raise ValueError" in end.traceback
    assert run.stuck == (0, 1, 3) and states(run) == ["running", "running", "ended", "running"]
    assert [ledger.waiting_in().seq for ledger in run.ledgers if ledger.rank != 2] == [2, 2, 2]
    assert run.ledgers[0].end is None  # it was freed after the ledger was read, not before
    assert any("program" in frame for frame in run.liveness[0].frames)
    assert run.proof_ms > 0 and run.recovery_ms > 0 and run.replaced == ()
    assert_ready(world, pids)


def test_a_rank_that_returns_early_leaves_its_peers_proved_stuck(world):
    def program(rank):
        return rank if rank == 0 else dist.barrier()

    pids = world.pids
    run = world.run(program)
    assert run.stuck == (1, 2, 3) and run.results == (0, None, None, None)
    assert run.ledgers[0].end.how == "returned"
    assert_ready(world, pids)


def test_ranks_that_wait_for_each_other_in_two_groups_are_proved_stuck(world):
    def program(rank):
        one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
        if rank < 2:
            for group in (one, two) if rank == 0 else (two, one):
                dist.barrier(group=group)

    pids = world.pids
    run = world.run(program)
    assert run.stuck == (0, 1) and states(run) == ["running", "running", "ended", "ended"]
    assert {ledger.waiting_in().group for ledger in run.ledgers[:2]} == set(run.ledgers[0].groups) - {"world"}
    assert_ready(world, pids)


def test_collectives_that_all_joined_and_cannot_complete_end_the_run(world):
    def program(rank):
        dist.broadcast(torch.zeros(1), src=int(rank == 0))  # rank 0 takes rank 1 for the root, which takes rank 0

    pids = world.pids
    run = world.run(program)
    assert 0 in run.stuck and run.ledgers[0].collectives[0].root == 1
    assert_ready(world, pids)


def test_a_program_that_swallows_the_abort_is_replaced_alone(world):
    def program(rank):
        while rank == 3:
            try:
                dist.barrier()
            except BaseException:  # noqa: BLE001 - that is the point
                this.step("again")

    pids = world.pids
    run = world.run(program)
    assert run.stuck == (3,) and run.replaced == (3,)
    assert world.pids[:3] == pids[:3] and world.pids[3] != pids[3]
    assert_ready(world, world.pids)


def test_an_unpicklable_result_ends_its_rank_with_an_error(world):
    def program(rank):
        return threading.Lock() if rank == 1 else rank

    run = world.run(program)
    assert run.results == (0, None, 2, 3)
    assert (run.ledgers[1].end.how, run.ledgers[1].end.error_type) == ("raised", "ResultError")
    assert "lock" in run.ledgers[1].end.message


def test_an_unpicklable_program_is_refused(world):
    lock = threading.Lock()
    with pytest.raises(ProgramError, match="lock"):
        world.run(lambda rank: lock.locked())


def test_system_exit_is_an_error_of_the_rank(world):
    run = world.run(lambda rank: sys.exit(3) if rank == 0 else rank)
    assert run.ledgers[0].end.error_type == "SystemExit" and run.results == (None, 1, 2, 3)


# Ranks that die, stop or stall


@pytest.mark.parametrize(("how", "end"), [("kill", ("killed", signal.SIGKILL, None)), ("exit", ("exited", None, 1))])
def test_a_rank_that_dies_is_seen_dead_and_replaced_alone(world, how, end):
    def program(rank):
        dist.barrier()
        if rank == 1:
            this.step("last words")
            this.current().die(how, "as planned")
        dist.barrier()

    pids = world.pids
    run = world.run(program)
    ledger = run.ledgers[1]
    assert (ledger.end.how, ledger.end.signal, ledger.end.exit_code) == end and ledger.steps == ("last words",)
    assert run.liveness[1].state == "dead" and run.replaced == (1,) and run.results == (None,) * 4
    assert ledger.end.at_ns >= ledger.collectives[-1].ended_ns
    assert [world.pids[r] == pids[r] for r in range(4)] == [True, False, True, True]
    assert_ready(world, world.pids)


def test_a_crash_in_c_is_seen(world):
    run = world.run(lambda rank: ctypes.string_at(0) if rank == 2 else rank)
    end = run.ledgers[2].end
    assert end.signal == signal.SIGSEGV and run.replaced == (2,)
    assert end.site.endswith(" string_at") and "Segmentation fault" in end.traceback and "<lambda>" in end.traceback
    assert_ready(world, world.pids)


def test_a_kill_is_not_told_by_the_stack_of_an_earlier_crash(world):
    def program(rank, death):
        if rank == 1:
            this.current().die(death, "as planned")

    world.run(functools.partial(program, death="crash"))
    end = world.run(functools.partial(program, death="kill")).ledgers[1].end
    assert (end.message, end.site, end.traceback) == ("killed by SIGKILL", "", "")


def test_a_rank_without_memory_raises_and_has_all_of_it_again(world):
    def program(rank, starve):
        if rank == 1 and starve:
            this.current().die("exhaust", "as planned")
        return torch.zeros(1 << 28, dtype=torch.uint8).numel()

    pids = world.pids
    end = world.run(functools.partial(program, starve=True)).ledgers[1].end
    assert end.error_type == "RuntimeError" and "DefaultCPUAllocator: can't allocate memory" in end.message
    assert world.run(functools.partial(program, starve=False)).results == (1 << 28,) * 4 and world.pids == pids


def test_a_rank_that_dies_between_runs_is_replaced(world):
    pids = world.pids
    victim = psutil.Process(pids[0])
    victim.kill()
    psutil.wait_procs([victim])
    run = world.run(healthy)  # by now the death may have reached the driver, or not
    assert run.results == (6.0,) * 4 or run.ledgers[0].end.signal == signal.SIGKILL
    assert world.pids[0] != pids[0] and world.pids[1:] == pids[1:]
    assert_ready(world, world.pids)


def test_a_stopped_rank_is_found_at_the_deadline_and_replaced(world):
    def program(rank):
        if rank == 0:
            this.current().die("stop", "as planned")
        dist.barrier()

    pids = world.pids
    run = world.run(program, stall_after_s=0.2)
    assert states(run) == ["stopped", "running", "running", "running"] and run.stuck == (0, 1, 2, 3)
    assert run.replaced == (0,) and world.pids[1:] == pids[1:]
    assert_ready(world, world.pids)


def test_a_rank_that_is_stopped_and_continued_in_time_is_no_finding(world):
    def program(rank):
        if rank == 0:
            this.current().pause(0.3)
        return healthy(rank)

    pids = world.pids
    assert world.run(program, stall_after_s=5.0).results == (6.0,) * 4 and world.pids == pids


def test_a_rank_that_is_stopped_in_a_collective_and_continued_in_time_is_no_finding(world):
    def program(rank):
        if rank == 0:  # all others come while it is stopped
            subprocess.Popen(["sh", "-c", 'sleep 0.2; kill -STOP "$0"; sleep 0.8; kill -CONT "$0"', str(os.getpid())])
        else:
            this.current().sleep(0.5)
        return healthy(rank)

    run = world.run(program, stall_after_s=5.0)
    assert run.results == (6.0,) * 4 and run.stuck == ()


def test_a_stalled_rank_is_found_at_the_deadline_with_its_frames(world):
    def program(rank):
        if rank == 3:
            this.current().die("stall", "as planned")
        dist.barrier()

    pids = world.pids
    run = world.run(program, stall_after_s=0.2)
    assert states(run) == ["running", "running", "running", "stalled"] and run.stuck == (0, 1, 2, 3)
    assert run.liveness[3].frames[0].endswith(" stall") and "program" in run.liveness[3].frames[-1]
    assert run.replaced == ()
    assert_ready(world, pids)


def test_a_monitored_barrier_is_recorded_and_lets_pass_only_all(world):
    def program(rank):
        if rank != 2:
            dist.monitored_barrier()

    assert world.run(lambda rank: dist.monitored_barrier()).results == (None,) * 4
    run = world.run(program)
    (finding,) = diagnose(run.ledgers, run.liveness)
    assert (finding.kind, finding.ranks, finding.op) == ("hang", (2,), "monitored_barrier")


def test_the_rank_that_left_is_to_blame_and_not_those_that_ask_for_ever(world):
    def program(rank):
        work = dist.barrier(async_op=True) if rank else None
        while work and not work.is_completed():
            time.sleep(0.001)

    pids = world.pids
    run = world.run(program, stall_after_s=0.2)
    (finding,) = diagnose(run.ledgers, run.liveness)
    assert (finding.kind, finding.ranks, finding.op, finding.waiting_ranks) == ("hang", (0,), "barrier", (1, 2, 3))
    assert_ready(world, pids)


def test_stacks_of_stuck_ranks_go_down_into_c_where_they_are_asked_for(world):
    def program(rank):
        if rank == 0:
            dist.barrier()

    with RayWorld(2, stacks=True) as other:
        run = other.run(program)
        assert other.run(lambda rank: rank).results == (0, 1)
    assert run.stuck == (0,) and "libtorch" in run.liveness[0].stack and "program (" in run.liveness[0].stack
    assert run.liveness[1].stack == ""


def test_a_rank_that_holds_the_gil_forever_is_found_and_replaced(world):
    def program(rank):
        if rank == 1:
            collections.deque(itertools.repeat(0), maxlen=0)
        dist.barrier()

    run = world.run(program, stall_after_s=0.2)
    assert run.liveness[1].state == "stalled" and "program" in run.liveness[1].frames[0]
    assert run.replaced == (1,)
    assert_ready(world, world.pids)


def test_a_rank_that_does_not_come_to_form_a_sub_group_is_found(world):
    def program(rank):
        return rank if rank == 0 else dist.new_group([0, 1, 2, 3])

    pids = world.pids
    run = world.run(program, stall_after_s=0.2)
    assert run.stuck == (1, 2, 3) and states(run)[1:] == ["stalled"] * 3
    assert any("new_group" in frame for frame in run.liveness[1].frames)
    assert_ready(world, pids)


def test_a_killed_actor_is_replaced_with_its_rank(world):
    supervisor = world._crew._seats[2].place.pid

    def program(rank):
        if rank == 2:
            os.kill(supervisor, signal.SIGKILL)
            this.current().die("stall", "until its end comes")
        dist.barrier()

    run = world.run(program)
    assert run.liveness[2].state == "dead" and "supervisor" in run.liveness[2].detail and 2 in run.replaced
    [finding] = diagnose(run.ledgers, run.liveness)
    assert (finding.kind, finding.ranks) == ("hang", (2,)) and "its supervisor is gone" in finding.causes[0].text
    assert_ready(world, world.pids)


# Ranks that do not come, or do not leave


class Arriving:
    """A program in which some ranks meet with something on their way to the rendezvous."""

    def __init__(self, fates):
        self._fates = fates

    def arrive(self, rank):
        self._fates.get(rank, lambda: None)()

    def __call__(self, rank):
        return healthy(rank)


def test_a_rank_that_does_not_come_is_named_at_the_deadline_and_nobody_dies_for_it(world):
    pids = world.pids
    run = world.run(Arriving({1: lambda: this.current().die("stall", "outside")}), stall_after_s=0.3)
    [finding] = diagnose(run.ledgers, run.liveness)
    assert (finding.kind, finding.ranks, finding.waiting_ranks) == ("init_fail", (1,), (0, 2, 3))
    assert run.stuck == (0, 1, 2, 3) and run.replaced == ()
    assert_ready(world, pids)


def test_a_rank_that_raises_on_its_way_is_named_without_a_deadline(world):
    pids = world.pids
    run = world.run(Arriving({3: lambda: {}["no address"]}), stall_after_s=1000.0)
    [finding] = diagnose(run.ledgers, run.liveness)
    assert (finding.kind, finding.ranks) == ("init_fail", (3,)) and finding.causes[0].error_type == "KeyError"
    assert_ready(world, pids)


def test_a_program_that_arrives_gets_a_new_group_and_a_late_rank_is_waited_for(world):
    world.run(healthy)
    run = world.run(Arriving({0: lambda: this.current().sleep(0.3)}))
    assert run.results == (6.0,) * 4 and [ledger.rendezvous for ledger in run.ledgers] == ["arrived"] * 4
    assert [ledger.rendezvous for ledger in world.run(healthy).ledgers] == [""] * 4


@pytest.mark.parametrize("hang", [False, True], ids=["after a good end", "after a hang"])
def test_a_rank_that_hangs_in_dropping_its_group_is_replaced(world, hang):
    def program(rank):
        dist.new_group([0, 1])  # the group will not be kept
        if rank == 2:
            dist.destroy_process_group = lambda: this.current().die("stall", "in its teardown")
        if hang and rank != 2:
            dist.barrier()

    pids = world.pids
    run = world.run(program, stall_after_s=5.0)
    assert run.replaced == ((2,) if hang else ()) and run.ledgers[2].end.how == "returned"
    assert world.run(healthy).results == (6.0,) * 4
    assert [before == now for before, now in zip(pids, world.pids, strict=True)] == [True, True, False, True]


def test_a_rank_that_hangs_in_its_teardown_or_at_exit_does_not_keep_a_world_from_closing(world):
    def program(rank):
        atexit.register(time.sleep, 1000)
        dist.new_group([0, 1])
        dist.destroy_process_group = lambda: time.sleep(1000)

    with RayWorld(2) as other:
        other.run(program)
        ranks = [psutil.Process(pid) for pid in other.pids]
    assert not any(rank.is_running() for rank in ranks)


# Several worlds


def test_two_worlds_of_one_driver_form_their_groups_at_once_and_do_not_meet(world):
    def program(rank, base):
        total = torch.tensor([base + rank])
        dist.all_reduce(total)
        return total.item()

    def run_often(of, base):
        again = Arriving({})
        return [of.run(functools.partial(program, base=base)).results[0] for _ in range(10) if of.run(again)]

    with RayWorld(4) as other, ThreadPoolExecutor(2) as pool:
        totals = [pool.submit(run_often, *one) for one in ((world, 0), (other, 100))]
        assert [total.result() for total in totals] == [[6] * 10, [406] * 10]


FORMER = """
import sys
from tpbed.tp.ray_world import RayWorld
import torch, torch.distributed as dist
class Program:
    base = int(sys.argv[2])
    def arrive(self, rank): pass
    def __call__(self, rank):
        total = torch.tensor([self.base + rank])
        dist.all_reduce(total)
        return total.item()
with RayWorld(2, ray_address=sys.argv[1]) as world:
    print("ready", flush=True)
    sys.stdin.readline()
    print({world.run(Program()).results for _ in range(20)})
"""


def test_two_drivers_form_their_groups_at_once_and_do_not_meet(world):
    """Nor do the warnings with which Ray interrupts all drivers get into what they print."""
    command, pipe = [sys.executable, "-c", FORMER, ray.get_runtime_context().gcs_address], subprocess.PIPE
    drivers = [
        subprocess.Popen(
            [*command, base], stdin=pipe, stdout=pipe, text=True, env=os.environ | {"MASTER_PORT": "29500"}
        )
        for base in ("0", "100")
    ]
    assert [driver.stdout.readline() for driver in drivers] == ["ready\n"] * 2
    publish_error_to_driver("a_warning", "to all drivers", ray._private.worker.global_worker.gcs_client)
    for driver in drivers:
        driver.stdin.write("go\n")
        driver.stdin.flush()
    assert [driver.communicate()[0] for driver in drivers] == ["{(1, 1)}\n", "{(201, 201)}\n"]


def test_a_port_that_somebody_has_is_refused_and_not_shared():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StoreError, match=rf"port {port} of 127.0.0.1 .*Address already in use.*give port 0"):
            StoreServer("127.0.0.1", port)
    stores = [StoreServer("127.0.0.1") for _ in range(8)]
    assert len({store.place for store in stores}) == 8


# Nothing leaks, nothing is left


def own_resources():
    me = psutil.Process()
    return me.num_fds(), me.num_threads(), len(me.children(recursive=True))


def test_thirty_hangs_leak_nothing(world):
    def program(rank):
        dist.barrier()
        if rank == 1:
            raise ValueError
        dist.barrier()

    def resources(rank):
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    world.run(program)
    before, own = world.run(resources).results, own_resources()
    pids = world.pids
    hangs = 30
    for _ in range(hangs):
        assert world.run(program).stuck == (0, 2, 3)
    assert world.run(resources).results == before
    # In the driver Ray starts and ends threads and connections of its own, a few: what a hang leaks comes with each.
    assert all(now < then + hangs // 2 for now, then in zip(own_resources(), own, strict=True))
    assert world.pids == pids


def test_ctrl_c_ends_the_run_and_not_the_world(world):
    driver, pids = os.getpid(), world.pids

    def program(rank):
        dist.barrier()
        if rank == 0:
            os.kill(driver, signal.SIGINT)
        if rank < 2:
            dist.barrier()  # the others do not come
        this.current().die("stall", "until it is interrupted")

    with pytest.raises(KeyboardInterrupt):
        world.run(program)
    assert_ready(world, pids)


DRIVER = """
import sys, time
from tpbed.tp.ray_world import RayWorld
world = RayWorld(2, ray_address=sys.argv[1])
print(*world.pids, flush=True)
world.run(lambda rank: time.sleep(1000), stall_after_s=1000)
"""


def test_a_killed_driver_leaves_no_ranks(world):
    address = ray.get_runtime_context().gcs_address
    with subprocess.Popen([sys.executable, "-c", DRIVER, address], stdout=subprocess.PIPE, text=True) as driver:
        ranks = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
        server = ranks[0].parent()
        driver.kill()
        gone, alive = psutil.wait_procs([*ranks, server], timeout=10)
    assert len(gone) == 3 and not alive
    assert_ready(world, world.pids)


def test_a_killed_fork_server_takes_its_ranks_and_the_next_run_has_new_ones(world):
    pids = world.pids
    server = psutil.Process(pids[0]).parent()
    ranks = [psutil.Process(pid) for pid in pids]
    server.kill()
    assert not psutil.wait_procs([server, *ranks], timeout=30)[1]
    world.run(healthy)
    assert_ready(world, world.pids)
    assert not set(pids) & set(world.pids)


def test_close_leaves_nothing_and_is_bounded_by_nobody(world):
    shared = set(os.listdir("/dev/shm"))
    with RayWorld(2) as other:
        other.run(lambda rank: dist.barrier())
        ranks = [psutil.Process(pid) for pid in other.pids]
        other.run(lambda rank: this.current().die("stop", "and close"), stall_after_s=0.1)
        os.kill(other.pids[0], signal.SIGSTOP)
        ranks += [psutil.Process(pid) for pid in other.pids]
    assert not any(rank.is_running() for rank in ranks)
    assert set(os.listdir("/dev/shm")) <= shared
    other.close()
    with pytest.raises(ClosedError):
        other.run(healthy)


def test_nccl_is_refused_without_gpus(world):
    if ray.cluster_resources().get("GPU", 0) >= 64:
        pytest.skip("as many GPUs as that")
    with pytest.raises(InitError, match="need a GPU each"):
        RayWorld(64, backend="nccl")
