"""StoreServer: where the ranks of a world meet to form a group: TCPStore, without its name look-ups.

c10d asks the resolver for the name of both ends of every connection, for its log. 127.0.0.1 is in /etc/hosts; the
::ffff:127.0.0.1 that c10d makes of it is not, and each DNS packet that gets lost costs 5 s (seen). So the server
listens on an IPv4 socket, and ranks, which connect anew for every group, do so in a thread that asks no name server.
"""

from __future__ import annotations

import ctypes
import socket
import threading
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from tpbed.tp.errors import TestbedError


class StoreError(TestbedError):
    """The store of a world cannot listen where it was told to."""


class StoreServer:
    """A store that listens at a port of `address`, bound once and kept until nobody refers to it."""

    def __init__(self, address: str, port: int = 0) -> None:
        """port: 0 takes any that is free.

        Raises StoreError if somebody listens there.
        """
        try:
            listener = socket.create_server((address, port), backlog=1024)
        except OSError as error:
            raise StoreError(f"no store can listen at port {port} of {address} ({error}): give port 0.") from error
        self.place: tuple[str, int] = (address, listener.getsockname()[1])
        options: Any = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
        self._store: Any = dist.TCPStore(*self.place, **options)  # type: ignore[attr-defined]

    def forget(self, prefix: str) -> None:
        """Delete what ranks wrote below `prefix`; some kilobytes stay where this torch cannot list keys."""
        for key in getattr(self._store, "list_keys", list)():
            if key.startswith(prefix):
                self._store.delete_key(key)


def join_store(place: tuple[str, int], prefix: str) -> Any:
    """A new connection to the store at that host and port, for what is below `prefix` in it."""
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(_connect(place)), name="tpbed-store", daemon=True)
    thread.start()
    thread.join()
    if isinstance(made[0], Exception):
        raise made[0]
    return dist.PrefixStore(prefix, made[0])  # type: ignore[attr-defined]


def meet(store: Any, world_size: int, place: str) -> None:
    """Wait until as many ranks have come to the place of that name."""
    if store.add(place, 1) == world_size:
        store.set(f"all-{place}", "1")
    store.wait([f"all-{place}"])


def _connect(place: tuple[str, int]) -> Any:
    _stop_asking_names()
    try:
        return dist.TCPStore(*place, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
    except Exception as error:  # noqa: BLE001 - it is raised in the thread that waits
        return error


def _stop_asking_names() -> None:
    """Let the resolver of this thread try no name server; it has its own state in glibc, and nothing elsewhere."""
    with suppress(AttributeError, OSError):
        state = ctypes.CDLL(None).__res_state
        socket.getnameinfo(("127.0.0.1", 0), 0)  # sets the state up
        state.restype = ctypes.POINTER(ctypes.c_int)
        state()[1] = 0  # retry, after retrans
