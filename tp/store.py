"""The store at which the ranks of a world meet: TCPStore, without its name look-ups.

c10d asks the resolver for the name of both ends of every connection, for its log. 127.0.0.1 is in /etc/hosts, the
::ffff:127.0.0.1 that c10d makes of it is not, and each DNS packet that gets lost costs 5 s (seen). So the server listens
on a plain IPv4 socket, and ranks, which connect anew for every group, do so in a thread that asks no name server.
"""

from __future__ import annotations

import ctypes
import socket
import threading
from contextlib import suppress

import torch.distributed as dist


def serve_store(address: str) -> dist.TCPStore:
    """A store that listens at a free port of `address`, bound once and kept; its `port` tells which."""
    listener = socket.create_server((address, 0), backlog=1024)
    port = listener.getsockname()[1]
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def join_store(address: str, port: int) -> dist.TCPStore:
    """A new connection to that store."""
    made: list[dist.TCPStore | BaseException] = []
    thread = threading.Thread(target=lambda: made.append(_connect(address, port)), name="tpbed-store", daemon=True)
    thread.start()
    thread.join()
    if isinstance(made[0], BaseException):
        raise made[0]
    return made[0]


def _connect(address: str, port: int) -> dist.TCPStore | BaseException:
    _stop_asking_names()
    try:
        return dist.TCPStore(address, port, is_master=False, wait_for_workers=False)
    except BaseException as error:
        return error


def forget_generation(store: dist.TCPStore, prefix: str) -> None:
    """Delete what ranks wrote below `prefix`, where this torch can list it (it is a few kilobytes)."""
    for key in getattr(store, "list_keys", list)():
        if key.startswith(prefix):
            store.delete_key(key)


def _stop_asking_names() -> None:
    """Let the resolver of this thread try no name server; it has its own state in glibc, and nothing elsewhere."""
    with suppress(AttributeError, OSError):
        state = ctypes.CDLL(None).__res_state
        socket.getnameinfo(("127.0.0.1", 0), 0)  # sets the state up
        state.restype = ctypes.POINTER(ctypes.c_int)
        state()[1] = 0  # retry, after retrans
