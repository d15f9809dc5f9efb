"""The Ray instance and the fork server that all RayWorlds of this process share."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import tempfile
from pathlib import Path

import ray

from tpbed.tp.fork_server import ForkServer
from tpbed.tp.janitor import Janitor

SERVER = f"tpbed-{secrets.token_hex(8)}"  # the name of this driver's fork server on every node
_OBJECT_STORE_BYTES = 80 << 20  # Ray's least: runs and results do not go through it
_LONGEST_TEMP_DIR = 30  # characters: Ray puts sockets far below it, whose paths are limited to 107


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


def connect(address: str | None, world_size: int) -> None:
    """Use the Ray that is initialised; else connect to `address` or RAY_ADDRESS; else start one, which ends at exit."""
    address = address or os.environ.get("RAY_ADDRESS")
    if ray.is_initialized():
        return
    if address:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace=SERVER)
    else:
        _start(world_size)


def is_local() -> bool:
    """True if all ranks will be on the driver's machine."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return len([node for node in nodes if node["Alive"]]) == 1


def own_address() -> str:
    """The address of the driver's node, for the others."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def count_gpus() -> int:
    """The GPUs that Ray has to give."""
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return int(resources.get("GPU", 0))


def _start(world_size: int) -> None:
    folder = _make_folder()
    atexit.register(Janitor(folder).close)
    atexit.register(ray.shutdown)
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


def _make_folder() -> Path:
    """A folder for Ray's logs and sockets."""
    temp = tempfile.gettempdir()
    parent = Path(temp if len(temp) <= _LONGEST_TEMP_DIR else "/tmp")
    return Path(tempfile.mkdtemp(prefix="tpbed-ray-", dir=parent))
