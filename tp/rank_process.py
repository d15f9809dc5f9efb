"""RankProcess: what runs inside a rank process: join the group, run the program, report, be ready for the next."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import random
import signal
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NoReturn

import cloudpickle
import torch
import torch.distributed as dist

from tpbed.tp import rank as rank_module
from tpbed.tp.blackbox import BlackBox, Pen, StackFile
from tpbed.tp.errors import TestbedError
from tpbed.tp.job import Job, Station
from tpbed.tp.ledger import WORLD
from tpbed.tp.rank import Death, RankContext
from tpbed.tp.recorder import Recorder
from tpbed.tp.recording import BACKEND, RecordingGroup

ABORT_SIGNAL = signal.SIGRTMIN + 8
NO_RESULT = None


class RunAborted(BaseException):
    """The world has given this run up; it leaves the rank program wherever it is."""


class ResultError(TestbedError):
    """A rank program returned something that cannot be sent to its world."""


class RankProcess:
    """One rank, warm between runs: jobs come over one socket, orders to abort over another, heard by a thread."""

    def __init__(self, jobs: Connection, control: socket.socket, box: BlackBox, stacks: StackFile) -> None:
        self._jobs, self._control, self._box = jobs, control, box
        self._armed = False  # a program is running, and may be aborted
        self._cut = False  # the group was torn down under the program
        self._group: RecordingGroup | None = None
        self._open_before: set[str] = set()  # the sockets that an abort spares
        stacks.serve()
        signal.signal(ABORT_SIGNAL, self._on_abort)

    def serve(self) -> NoReturn:
        """Settle in at the first message's station, then run jobs until the supervisor hangs up."""
        self._settle(self._jobs.recv())
        threading.Thread(target=self._obey, name="tpbed-control", daemon=True).start()
        self._jobs.send("ready")
        while True:
            job = self._jobs.recv()
            self._jobs.send((job.run, *self._run(job)))

    def _settle(self, station: Station) -> None:
        self._station = station
        sys.path += [folder for folder in station.import_path if folder not in sys.path]
        with contextlib.suppress(OSError):
            os.chdir(station.folder)
        _set_environment(station)
        torch.set_num_threads(1)
        if station.backend == "nccl":
            torch.cuda.set_device(station.local_rank)
        self._context = self._new_context()
        dist.Backend.register_backend(BACKEND, self._create, extended_api=True, devices=["cpu", "cuda"])
        self._state = _TorchState()

    def _new_context(self) -> RankContext:
        station = self._station
        return RankContext(
            rank=station.rank,
            world_size=station.world_size,
            recorder=Recorder(Pen(self._box), time.monotonic_ns),
            sleep=time.sleep,
            die=die,
            device=torch.device("cuda", station.local_rank) if station.backend == "nccl" else torch.device("cpu"),
        )
