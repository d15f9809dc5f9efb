"""Run by test_ray_nodes.py in a process of its own, which is a driver of a cluster of two nodes; writes what it saw."""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import cloudpickle
import psutil
import ray
import torch
import torch.distributed as dist
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from tpbed.harness.diagnose import diagnose
from tpbed.tp.ray_world import RayWorld

cloudpickle.register_pickle_by_value(sys.modules["__main__"])


def total(rank):
    mine = torch.tensor([float(rank)])
    dist.all_reduce(mine)
    return mine.item()


def place(rank):
    dist.barrier()
    return os.getpid(), int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])


def one_raises(culprit, rank):
    dist.barrier()
    if rank == culprit:
        raise ValueError("on the other node")
    dist.barrier()


def one_is_killed(culprit, rank):
    dist.barrier()
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def node_is_lost(near, fifo, lost, rank):
    """A rank has the other node removed, whose ranks wait in a collective that it does not join before."""
    if rank == near:
        open(fifo, "w").close()
        while any(psutil.pid_exists(pid) for pid in lost):
            time.sleep(0.01)
    dist.barrier()


def remove(cluster, node, fifo):
    with open(fifo):
        cluster.remove_node(node, allow_graceful=False)


def told(run):
    found = diagnose(run.ledgers, run.liveness)
    return {
        "findings": [(f.kind, list(f.ranks), " ".join([f.text, *(cause.text for cause in f.causes)])) for f in found],
        "replaced": run.replaced,
        "frames": [" ".join(look.frames) for look in run.liveness],
    }


def main(folder):
    os.environ |= {"RAY_health_check_period_ms": "200", "RAY_health_check_initial_delay_ms": "200"}
    arguments = {"num_cpus": 2, "include_dashboard": False, "temp_dir": folder}
    cluster = Cluster(initialize_head=True, head_node_args=arguments)
    other = cluster.add_node(num_cpus=2)
    seen = {}
    with RayWorld(8, ray_address=cluster.address, placement="pack") as world:
        seen["packed"] = [seat.place.node for seat in world._crew._seats]
        seen["eight"] = world.run(total).results
    with RayWorld(4, ray_address=cluster.address, placement="spread") as world:
        nodes = [seat.place.node for seat in world._crew._seats]
        far = [rank for rank, node in enumerate(nodes) if node == other.node_id]
        near = next(rank for rank in range(4) if rank not in far)
        seen["nodes"], seen["far"], seen["total"] = nodes, far, world.run(total).results
        seen["places"] = [where[1:] for where in world.run(place).results]
        seen["raised"] = told(world.run(partial(one_raises, far[-1])))
        seen["killed"] = told(world.run(partial(one_is_killed, far[-1])))
        seen["mended"] = world.run(total).results
        lost, fifo = [world.pids[rank] for rank in far], f"{folder}/remove"
        os.mkfifo(fifo)
        remover = threading.Thread(target=remove, args=(cluster, other, fifo))
        remover.start()
        seen["lost"] = told(world.run(partial(node_is_lost, near, fifo, lost), stall_after_s=60))
        remover.join()
        seen["after"] = world.run(total).results
        seen["places_after"] = [where[1:] for where in world.run(place).results]
        ranks = world.pids
    seen["alive"] = [pid for pid in ranks if psutil.pid_exists(pid)]
    seen["groups"] = sorted({group["state"] for group in placement_group_table().values()})
    ray.shutdown()
    with contextlib.suppress(Exception):
        cluster.shutdown()
    (Path(folder) / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
