"""The Ray instance and the fork server that all RayWorlds of this process share."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray._private.worker
from ray._private.services import canonicalize_bootstrap_address

from tpbed.tp.errors import TestbedError
from tpbed.tp.fork_server import ForkServer
from tpbed.tp.janitor import Janitor

SERVER = f"tpbed-{secrets.token_hex(8)}"  # the name of this driver's fork server on every node
_OBJECT_STORE_BYTES = 80 << 20  # Ray's least: runs and results do not go through it
_LONGEST_TEMP_DIR = 30  # characters: Ray puts sockets far below it, whose paths are limited to 107
_CONNECT_S, _ANSWER_S = 5.0, 15.0  # for a cluster to accept a connection, and to answer: most of it is for Python


class InitError(TestbedError):
    """A world could not be started; the message names the ranks that are missing, or what is wrong with the cluster."""


class SharedServer:
    """The fork server of this node, started early and by the driver, so that it imports torch while Ray starts."""

    _line: ForkServer | None = None
    _users = 0

    @classmethod
    def hold(cls) -> None:
        """Start it unless it runs."""
        if cls._line is None:
            cls._line = ForkServer(SERVER)
        cls._users += 1

    @classmethod
    def release(cls) -> None:
        """End it once nobody holds it."""
        cls._users -= 1
        if cls._users == 0 and cls._line is not None:
            cls._line.close()
            cls._line = None


def find(address: str | None) -> str | None:
    """What to join for `address`, else RAY_ADDRESS: a cluster that answers; None where a Ray is to be started here.

    address: host:port of a cluster that this machine belongs to, "auto" for the one that runs here, or "local".
    Raises InitError within seconds.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    if not address or address == "local" or ray.is_initialized():
        return None
    if "://" in address:
        raise InitError(
            f"{address} is the address of a Ray client server, and ranks could not call back through that: run tpbed "
            'on a node of the cluster, with its host:port or "auto".'
        )
    try:
        found: str | None = canonicalize_bootstrap_address(address)
    except (ValueError, OSError) as error:  # ConnectionError among them
        raise InitError(_no_cluster(address, str(error))) from error
    if found is None:
        raise InitError(_no_cluster(address, "no Ray runs here"))
    _reach(address, found)
    if address == "auto":
        return (
            address  # not the place: Ray uses this user's token for the Ray that it finds by itself, and for no other
        )
    _ask(address, found)
    return found


def connect(address: str | None, world_size: int) -> None:
    """Use the Ray that is initialised; else join the one at `address`, as `find` gives it; else start one.

    Raises InitError.
    """
    if ray.is_initialized():
        return
    if not address:
        start(world_size)
        return
    _leave_stdout_alone()
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace=SERVER)
    except (ConnectionError, RuntimeError) as error:
        why = f"{error}; is this machine a node of it (`ray start --address={address}`), with the same Ray and Python?"
        raise InitError(_no_cluster(address, why)) from error


def nodes_with(needs: dict[str, float]) -> int:
    """How many nodes have all these resources, free or not."""
    return sum(all(node["Resources"].get(name, 0.0) >= amount for name, amount in needs.items()) for node in _nodes())


def is_local() -> bool:
    """True if all ranks will be on the driver's machine."""
    return len(_nodes()) == 1


def _nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [node for node in nodes if node["Alive"]]


def own_address() -> str:
    """The address of the driver's node, for the others."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def count_gpus() -> int:
    """The GPUs that Ray has to give."""
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return int(resources.get("GPU", 0))


def _reach(address: str, place: str) -> None:
    """See that somebody listens at `place`, host:port."""
    host, _, port = place.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise InitError(_no_cluster(address, f"{place} does not answer ({error})")) from error


def _ask(address: str, place: str) -> None:
    """See Ray answer there: asked from a process of its own, as Ray waits for minutes."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", place]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=True)
    except subprocess.TimeoutExpired as error:
        raise InitError(_no_cluster(address, f"what listens at {place} did not answer in {_ANSWER_S:.0f} s")) from error
    except subprocess.CalledProcessError as error:
        last = (str(error.stderr).strip().splitlines() or [f"exit status {error.returncode}"])[-1]
        raise InitError(_no_cluster(address, last)) from error


def _no_cluster(address: str, why: str) -> str:
    return (
        f'there is no Ray cluster at {address!r}: {why}. Give host:port of its head node, or "auto", as '
        "--ray-address or RAY_ADDRESS; without either a local Ray is started."
    )


def start(world_size: int) -> str:
    """Start a Ray on this machine that ends with this process, however that ends. Returns its address."""
    folder = _make_folder()
    atexit.register(Janitor(folder).close)
    atexit.register(ray.shutdown)
    _leave_stdout_alone()
    ray.init(
        address="local",
        num_cpus=max(world_size, os.cpu_count() or 1),  # Ray starts so many workers in advance
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        namespace=SERVER,
        _temp_dir=str(folder),
    )
    return str(ray.get_runtime_context().gcs_address)


def _leave_stdout_alone() -> None:
    """Ray prints warnings of its nodes on the stdout of drivers, whatever log_to_driver says; its log has them too."""
    ray._private.worker._worker_logs_enabled = False


def _make_folder() -> Path:
    """A folder for Ray's logs and sockets."""
    temp = tempfile.gettempdir()
    parent = Path(temp if len(temp) <= _LONGEST_TEMP_DIR else "/tmp")
    return Path(tempfile.mkdtemp(prefix="tpbed-ray-", dir=parent))
