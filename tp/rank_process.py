"""RankProcess: what runs inside a rank process: join the group, run the program, report, be ready for the next."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import cloudpickle
import torch
import torch.distributed as dist

from tpbed.tp import batches, monitored_barrier
from tpbed.tp import rank as rank_module
from tpbed.tp.blackbox import BlackBox, Pen, StackFile
from tpbed.tp.completion import CompletionWatch
from tpbed.tp.job import Job, Station
from tpbed.tp.ledger import WORLD
from tpbed.tp.pickling import pickle_result
from tpbed.tp.rank import Death, RankContext
from tpbed.tp.recorder import Recorder
from tpbed.tp.recording import BACKEND, Issued, RecordingGroup
from tpbed.tp.store import join_store, meet

ABORT_SIGNAL = signal.SIGRTMIN + 8
_PR_SET_NAME, _PR_SET_PTRACER, _ANYBODY = 15, 0x59616D61, -1
_LAST_BYTES = 256 << 20  # that a rank gets whose memory is to be exhausted


class RunAborted(BaseException):
    """The world has given this run up; it leaves the rank program wherever it is."""


class RankProcess:
    """One rank, warm between runs: jobs come over one socket, orders to abort over another, heard by a thread."""

    def __init__(self, jobs: Connection, control: socket.socket, box: BlackBox, stacks: StackFile) -> None:
        self._jobs, self._control, self._box = jobs, control, box
        self._is_running = False  # a program, which may be aborted
        self._armed = False  # it has not been yet
        self._cut = False  # the group was torn down under it
        self._joining = False  # the group was begun and not finished
        self._groups: list[RecordingGroup] = []  # the default group first
        self._spared: set[str] = set()  # the sockets that were open before the group was formed
        self._watch: CompletionWatch | None = None
        stacks.serve()
        signal.signal(ABORT_SIGNAL, self._on_abort)

    def serve(self) -> NoReturn:
        """Settle at the station that comes first, then run jobs; ends with the process."""
        self._settle(self._jobs.recv())
        threading.Thread(target=self._obey, name="tpbed-control", daemon=True).start()
        self._jobs.send(("ready", self._gpu()))
        while True:
            told: Job | str = self._jobs.recv()
            if isinstance(told, Job):
                self._jobs.send((told.run, *self._run(told)))
                self._check_joined()
            else:
                self._leave()
                self._jobs.send("left")

    def _settle(self, station: Station) -> None:
        self._station = station
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_NAME, f"tpbed-rank-{station.rank}".encode(), 0, 0, 0)
        libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(_ANYBODY), 0, 0, 0)  # of the same user: py-spy is no parent of ranks
        sys.path += [folder for folder in station.import_path if folder not in sys.path]
        with contextlib.suppress(OSError):
            os.chdir(station.folder)
        _set_environment(station)
        torch.set_num_threads(1)
        self._context = self._new_context()
        dist.Backend.register_backend(BACKEND, self._create, extended_api=True, devices=["cpu", "cuda"])
        monitored_barrier.put_in_place()
        if station.backend == "nccl":
            batches.install()
        self._start_state = _State.now()

    def _new_context(self) -> RankContext:
        station, device = self._station, torch.device("cpu")
        if station.backend == "nccl":
            device = torch.device("cuda", station.local_rank)
            torch.cuda.set_device(device)
        return RankContext(
            rank=station.rank,
            world_size=station.world_size,
            recorder=Recorder(Pen(self._box), time.monotonic_ns),
            sleep=time.sleep,
            die=die,
            pause=pause,
            device=device,
        )

    def _gpu(self) -> str:
        """The UUID of the GPU of this rank; "" over gloo."""
        if self._station.backend == "gloo":
            return ""
        return str(torch.cuda.get_device_properties(self._context.device).uuid)

    def _run(self, job: Job) -> tuple[bytes | None, bool]:
        """The pickled result, None without one; and whether the group is as it was formed."""
        pen, payload = Pen(self._box), None
        self._begin(Recorder(pen, time.monotonic_ns))
        try:
            payload = self._attempt(job)
            self._armed = False
        except RunAborted:
            payload = None
        self._is_running = False
        pen.close()
        self._finish()
        return payload, self._is_intact()

    def _begin(self, recorder: Recorder) -> None:
        self._start_state.restore()
        self._cut = False
        self._context.recorder = recorder
        self._watch = CompletionWatch(recorder) if self._station.backend == "nccl" else None
        self._context.hooks[:] = [self._watch.before] if self._watch is not None else []
        rank_module.enter(self._context)

    def _attempt(self, job: Job) -> bytes | None:
        recorder = self._context.recorder
        self._is_running = self._armed = True
        try:
            program = cloudpickle.loads(job.program)  # it may import much: that is no stall
            self._join(job, getattr(program, "arrive", None))
            payload = pickle_result(program(self._station.rank))
            if self._watch is not None:
                self._watch.finish()
            recorder.returned()
            return payload
        except RunAborted:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the end of the program
            recorder.raised(error)
            return None

    def _finish(self) -> None:
        rank_module.enter(None)
        self._context.hooks.clear()
        if self._watch is not None:
            self._watch.close()
        if self._cut:
            self._check_joined()
            self._leave()

    def _check_joined(self) -> None:
        """End a process that began a group and did not finish it: torch.distributed counts those, its peers do not."""
        if self._joining:
            os._exit(1)

    def _is_intact(self) -> bool:
        return len(self._groups) == 1 and dist.is_initialized() and dist.group.WORLD is self._groups[0]

    def _join(self, job: Job, arrive: Callable[[int], None] | None) -> None:
        ranks = tuple(range(self._station.world_size))
        if not job.forms_group:
            self._context.recorder.group(WORLD, ranks)
            return
        self._leave()
        self._context.recorder.rendezvous("outside")
        if arrive is not None:
            arrive(self._station.rank)
        self._spared = set(_sockets().values())
        self._start_state.set_environment(MASTER_ADDR=job.store[0], MASTER_PORT=str(job.store[1]))
        store = join_store(job.store, job.prefix)
        self._context.recorder.rendezvous("arrived")
        meet(store, len(ranks), "arrived")  # whoever does not come: nobody has begun a group, or has to die for it
        self._joining = True
        dist.init_process_group(BACKEND, store=store, rank=self._station.rank, world_size=len(ranks))
        meet(store, len(ranks), "formed")  # whoever breaks in the first collective must not break others' forming
        self._joining = False

    def _create(self, options: Any, _backend_options: Any = None) -> RecordingGroup:
        members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        group = RecordingGroup(
            self._transport(options),
            self._context,
            label=options.group_id if self._groups else WORLD,
            ranks=members,
            asynchronous=self._watch is not None,
            watch=None if self._watch is None else self._watch_work,
            watch_message=None if self._watch is None else self._watch_message,
        )
        group.registered_name = options.group_id
        self._groups.append(group)
        return group

    def _watch_work(self, work: dist.Work | None, group: str, seq: int) -> None:
        if self._watch is not None:  # that of the run, which may be a later one than the group's first
            self._watch.watch(work, group, seq)

    def _watch_message(self, group: str, seq: int) -> Issued:
        assert self._watch is not None  # over NCCL there always is one, in a run
        return self._watch.message(group, seq)

    def _transport(self, options: Any) -> Any:
        place = options.store, options.group_rank, options.group_size
        if self._watch is None:
            return dist.ProcessGroupGloo(*place, timeout=options.timeout)
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = options.timeout
        group = dist.ProcessGroupNCCL(*place, nccl)
        group.eager_connect_single_device(self._context.device)  # else the first collective blocks, and does not say so
        return group

    def _leave(self) -> None:
        """Drop the groups without talking to anybody."""
        if self._watch is not None:
            _abort_all(self._groups)
        if dist.is_initialized():
            dist.destroy_process_group()
        self._groups.clear()
        gc.collect()

    def _obey(self) -> None:
        with contextlib.suppress(OSError):
            while self._control.recv(1):
                self._abort()
                self._control.send(b".")
        os._exit(0)

    def _abort(self) -> None:
        if self._is_running:
            self._cut = True
            if self._watch is not None:
                _abort_all(self._groups)
            _shut_down(self._spared)
            signal.pthread_kill(threading.main_thread().ident or 0, ABORT_SIGNAL)

    def _on_abort(self, _signal: int, _frame: FrameType | None) -> None:
        if self._armed:
            self._armed = False
            raise RunAborted


def _abort_all(groups: list[RecordingGroup]) -> None:
    for group in groups:
        with contextlib.suppress(Exception):
            group.inner.abort()


def _sockets() -> dict[int, str]:
    """The inodes of this process's sockets, by file descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found[int(name)] = target
    return found


def _shut_down(spared: set[str]) -> None:
    """Shut down all connected internet sockets but the spared ones: whoever waits on them gets an error."""
    for fd, inode in _sockets().items():
        if inode not in spared:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as line:
                if line.family in (socket.AF_INET, socket.AF_INET6) and line.type == socket.SOCK_STREAM:
                    line.getpeername()  # raises for a listener: gloo aborts the process if its own is shut down
                    line.shutdown(socket.SHUT_RDWR)


class _State:
    """What a program may leave changed in torch and Python, and the next run shall find as it was."""

    @classmethod
    def now(cls) -> _State:
        """As it is now."""
        state = cls()
        state._torch_rng, state._rng = torch.get_rng_state(), random.getstate()
        state._dtype, state._environment = torch.get_default_dtype(), dict(os.environ)
        return state

    _torch_rng: torch.Tensor
    _rng: tuple[Any, ...]
    _dtype: torch.dtype
    _environment: dict[str, str]

    def restore(self) -> None:
        """As it was then."""
        torch.set_grad_enabled(True)
        torch.set_rng_state(self._torch_rng)
        torch.set_default_dtype(self._dtype)
        torch.set_default_device(None)
        random.setstate(self._rng)
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)

    def set_environment(self, **variables: str) -> None:
        """Set variables for this run and all later ones."""
        os.environ.update(variables)
        self._environment.update(variables)


def _set_environment(station: Station) -> None:
    os.environ.update(
        RANK=str(station.rank),
        WORLD_SIZE=str(station.world_size),
        LOCAL_RANK=str(station.local_rank),
        LOCAL_WORLD_SIZE=str(station.local_world_size),
    )
    if station.single_node:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if station.backend == "nccl":
        os.environ["CUDA_VISIBLE_DEVICES"] = station.visible_gpus
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")  # connect with the group: else the first collective blocks


def die(how: Death, reason: str) -> None:
    """RankContext.die, for real; `reason` is for the stack of a stalled rank."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "exit":
        os._exit(1)
    elif how == "crash":
        ctypes.string_at(0)
    elif how == "exhaust":
        exhaust()
    else:
        stall(reason)


def exhaust() -> NoReturn:
    """Use up the memory that this process may still have, which is little from now until the allocator has raised.

    Raises RuntimeError, of torch's allocator for the CPU.
    """
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits, taken = resource.getrlimit(resource.RLIMIT_AS), []
    resource.setrlimit(resource.RLIMIT_AS, (used + _LAST_BYTES, limits[1]))
    try:
        while True:
            taken.append(torch.empty(_LAST_BYTES // 8, dtype=torch.uint8))
    finally:
        taken.clear()
        resource.setrlimit(resource.RLIMIT_AS, limits)


def pause(seconds: float) -> None:
    """RankContext.pause, for real: the shell that stops this process is what continues it."""
    script = 'kill -STOP "$0" && sleep "$1" && kill -CONT "$0"'
    subprocess.run(["sh", "-c", script, str(os.getpid()), str(seconds)], check=True)


def stall(reason: str) -> NoReturn:
    """Never go on."""
    while True:
        time.sleep(3600)


def main(fds: list[int]) -> None:
    """Be a rank. fds: the job socket, the control socket, the black box, the stack file, stdout, stderr."""
    jobs, control, box, stacks, out, err = fds
    for fd, standard in ((out, 1), (err, 2)):
        os.dup2(fd, standard)
        os.close(fd)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    with contextlib.suppress(EOFError, ConnectionError):
        RankProcess(Connection(jobs), socket.socket(fileno=control), BlackBox(box), StackFile(stacks)).serve()
    os._exit(0)
