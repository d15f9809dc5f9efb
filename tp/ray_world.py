"""RayWorld: real ranks, each a process that a Ray actor supervises; they talk through gloo or NCCL."""

from __future__ import annotations

import atexit
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import cloudpickle

from tpbed.tp import ray_cluster
from tpbed.tp.blackbox import end_event, format_event
from tpbed.tp.crew import Crew, Message
from tpbed.tp.errors import TestbedError
from tpbed.tp.job import Backend, Job
from tpbed.tp.ledger import WORLD, CollectiveRecord, End, Ledger
from tpbed.tp.pickling import ProgramError, pickle_program
from tpbed.tp.ray_cluster import InitError
from tpbed.tp.ray_share import shared_address
from tpbed.tp.reading import Reading
from tpbed.tp.run_watch import IDLE_S, RunWatch
from tpbed.tp.seats import Placement
from tpbed.tp.store import StoreServer
from tpbed.tp.world import RankProgram, WorldRun, require_world_size

__all__ = ["ClosedError", "InitError", "ProgramError", "RayWorld"]

_FAR_IDLE_S = 2.0  # instead of IDLE_S where data travels between nodes


class ClosedError(TestbedError):
    """The world was closed, and runs nothing any more."""


class RayWorld:
    """Rank programs on real processes: World, with SIGKILL, SIGSTOP, sockets and clocks that are real.

    The ranks stay warm from run to run, and so does their group if the last run left it clean. A rank that is stuck is
    got out of its program by shutting down the connections that it has opened since its group was formed; one that does
    not come, or has died, is replaced alone. Nothing outlives the driver, however it ends.
    """

    def __init__(
        self,
        world_size: int = 4,
        backend: Backend = "gloo",
        ray_address: str | None = None,
        progress: Callable[[str], None] | None = None,
        placement: Placement = "pack",
        stacks: bool = False,
    ) -> None:
        """Start Ray, unless it is initialised or an address is given (here or as RAY_ADDRESS), and the ranks.

        In a worker of pytest-xdist, the Ray that all workers of the session share is started by the first and joined.

        progress: told what is being waited for. placement: of the ranks, on as few nodes as can be, or over as many.
        stacks: of ranks that are stuck read the native stacks, too, which takes a second, where py-spy is installed.
        Raises WorldSizeError; InitError: no such cluster; fewer GPUs than ranks for "nccl", or two ranks on one; actors
        or ranks that do not come up.
        """
        require_world_size(world_size)
        self.world_size, self._backend, self._placement = world_size, backend, placement
        self._reads_stacks = stacks
        self._progress = progress or (lambda _text: None)
        self._crew: Crew | None = None
        self._is_open = True
        self._run_number, self._keeps_group = 0, False
        self._is_leaving = False  # ranks drop their groups since the last run, and may hang in that
        self._store: StoreServer | None = None
        self._prefix = ""  # of the group's generation in the store
        address = ray_cluster.find(ray_address)
        ray_cluster.SharedServer.hold()
        try:
            self._open(address)
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        """As in WorldRun.world: ray+gloo or ray+nccl."""
        return f"ray+{self._backend}"

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the ranks, by rank; on other nodes, as they count there."""
        return self._open_crew().pids

    def run(self, program: RankProgram, *, stall_after_s: float = 10.0) -> WorldRun:
        """As World.run. Ctrl-C ends the run and leaves the world ready for the next.

        A rank that is missing when the group is formed ends the run at once if it has ended, after stall_after_s if it
        is stopped, or alive and outside; after FORM_S (60 s) if it still loads the program, or the connecting hangs.
        Raises ClosedError, and ProgramError if the program cannot be pickled.
        """
        crew, pickled = self._open_crew(), pickle_program(program)
        self._keeps_group &= not hasattr(program, "arrive")
        with _interrupts_held() as interrupted:
            try:
                return self._run(crew, pickled, stall_after_s, interrupted)
            except BaseException:
                self._rescue(crew)
                raise

    def close(self) -> None:
        """End ranks and actors; idempotent; takes seconds at most, whatever they are doing."""
        if self._is_open:
            self._is_open = False
            atexit.unregister(self.close)
            with _interrupts_held():
                if self._crew is not None:
                    self._crew.close()
                self._crew = self._store = None
                ray_cluster.SharedServer.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, address: str | None) -> None:
        self._progress(f"joining Ray at {address}" if address else "starting Ray")
        ray_cluster.connect(address or shared_address(self.world_size), self.world_size)
        atexit.register(self.close)  # after Ray has registered its own end, so before it
        gpus = ray_cluster.count_gpus()
        if self._backend == "nccl" and gpus < self.world_size:
            raise InitError(
                f"world_size={self.world_size} ranks over NCCL need a GPU each, and Ray has {gpus}: "
                'use a smaller world, or backend="gloo".'
            )
        self._progress(f"forking {self.world_size} ranks")
        self._crew = Crew(self.world_size, self._backend, self._placement)
        self._store = StoreServer(self._crew.address)

    def _open_crew(self) -> Crew:
        if self._crew is None:
            raise ClosedError("this world was closed: make a new one.")
        return self._crew

    def _run(self, crew: Crew, pickled: bytes, stall_after_s: float, interrupted: Callable[[], bool]) -> WorldRun:
        self._mend(crew)
        idle_s = IDLE_S if crew.is_local else _FAR_IDLE_S
        watch = RunWatch(self.world_size, stall_after_s, time.monotonic(), idle_s=idle_s)
        run = _Run(crew, self._next_job(crew, pickled), watch)
        run.follow(interrupted)
        seen = run.freeze(self.name, with_stacks=self._reads_stacks)
        self._keeps_group = run.intact and _is_clean(seen.ledgers)
        if seen.stuck or _has_dead(seen):
            return self._recover(crew, seen, run.over_at)
        if not self._keeps_group:
            crew.tell_all("leave")
            self._is_leaving = True
        return seen

    def _next_job(self, crew: Crew, pickled: bytes) -> Job:
        assert self._store is not None
        self._run_number += 1
        forms_group, self._keeps_group = not self._keeps_group, False
        if forms_group:
            self._store.forget(self._prefix)
        job = Job(
            run=self._run_number,
            store=self._store.place,
            forms_group=forms_group,
            program=pickled,
        )
        self._prefix = job.prefix if forms_group else self._prefix
        return job

    def _mend(self, crew: Crew) -> None:
        """Replace what died between runs, or hangs in dropping the last one's groups."""
        if self._is_leaving or crew.gone or crew.hear(range(self.world_size), 0.0):
            self._keeps_group = False
            self._make_ready(crew)

    def _recover(self, crew: Crew, seen: WorldRun, over_at: float) -> WorldRun:
        replaced = self._make_ready(crew)
        return replace(seen, recovery_ms=(time.monotonic() - over_at) * 1e3, replaced=replaced)

    def _make_ready(self, crew: Crew) -> tuple[int, ...]:
        """Get every rank out of its program, or replace it. Returns the ranks that were replaced."""
        self._is_leaving = False
        answers = crew.ask(range(self.world_size), "recover")
        for rank, (_, pid, _) in answers.items():
            crew.set_pid(rank, pid)
        gone = crew.replace(sorted(crew.gone)) if crew.gone else ()
        return tuple(sorted({*gone, *(rank for rank, (_, _, replaced) in answers.items() if replaced)}))

    def _rescue(self, crew: Crew) -> None:
        """After a run was broken off: be ready for the next, or closed."""
        self._keeps_group = False
        try:
            self._make_ready(crew)
        except BaseException:
            crew.hang_up()
            self.close()
            raise


class _Run:
    """One run, from the driver's side."""

    def __init__(self, crew: Crew, job: Job, watch: RunWatch) -> None:
        self._crew, self._job, self._watch = crew, job, watch
        self._payloads: dict[int, bytes | None] = {}
        self._why_gone: dict[int, str] = {}
        self.intact = True  # every rank's group is as it was formed
        self.over_at = 0.0

    def follow(self, interrupted: Callable[[], bool]) -> None:
        """Start the job everywhere and watch it until it is over.

        Raises KeyboardInterrupt once `interrupted` says so.
        """
        for rank in self._watch.open_ranks:
            self._crew.tell(rank, "run", self._job)
        while self._watch.open_ranks and not self._advance():
            if interrupted():
                raise KeyboardInterrupt
        self.over_at = time.monotonic()

    def freeze(self, world: str, *, with_stacks: bool) -> WorldRun:
        """What was seen, with the Python frames of the ranks that did not end, and their stacks."""
        frames = self._ask_open("frames")
        liveness = self._watch.liveness(frames, self._ask_open("stack") if with_stacks else None)
        ledgers, results = list(self._watch.ledgers), []
        for rank, ledger in enumerate(ledgers):
            result, ledgers[rank] = _unpack(self._payloads.get(rank), ledger)
            results.append(result)
        return WorldRun(
            world=world,
            results=tuple(results),
            ledgers=tuple(ledgers),
            liveness=liveness,
            stuck=self._watch.stuck,
            proof_ms=self._watch.proof_ms,
        )

    def _ask_open(self, what: str) -> dict[int, Any]:
        return {rank: found for rank, (_, found) in self._crew.ask(self._watch.open_ranks, what).items()}

    def _advance(self) -> bool:
        """Wait until a rank ends, or look at those that have not. True if that proves that the run is over."""
        heard = self._crew.hear(self._watch.open_ranks, self._watch.look_s)
        for rank, message in heard:
            self._take(rank, message)
        if heard:
            return False
        asked_at = time.monotonic()
        answers = self._crew.ask(self._watch.open_ranks, "peek", self._watch.look_deep, other=self._take)
        for rank, (_, reading) in answers.items():
            self._watch.read(rank, reading, asked_at)
        return self._watch.judge(time.monotonic())

    def _take(self, rank: int, message: Message) -> None:
        word, *rest = message
        if word == "gone":
            self._watch.deliver(rank, _lost(self._why_gone.get(rank, "")), time.monotonic())
        elif word == "failed":
            self._why_gone[rank] = rest[0]
        elif word in ("ended", "dead") and rest[0] == self._job.run:
            self._watch.deliver(rank, rest[1], time.monotonic())
            self._payloads[rank] = rest[2] if word == "ended" else None
            self.intact &= word == "ended" and rest[3]


def _lost(why: str) -> Reading:
    message = f"its supervisor is gone{': ' if why else ''}{why}"
    end = end_event(how="killed", signal=signal.SIGKILL, message=message, at_ns=time.monotonic_ns())
    return Reading(events=format_event(end), count=-1, truncated=False, quiet_ns=0, stopped=False)


def _unpack(payload: bytes | None, ledger: Ledger) -> tuple[Any, Ledger]:
    """A rank's result; a ledger that ends with the error, if it cannot be unpickled here."""
    try:
        return (None if payload is None else cloudpickle.loads(payload)), ledger
    except Exception as error:  # noqa: BLE001 - unpickling runs code of the program's
        message = f"the driver cannot unpickle the result of rank {ledger.rank}: {error}"
        at_ns = ledger.end.at_ns if ledger.end else 0
        return None, replace(
            ledger, end=End(how="raised", error_type=type(error).__name__, message=message, at_ns=at_ns)
        )


def _has_dead(seen: WorldRun) -> bool:
    return any(look.state == "dead" for look in seen.liveness)


def _is_clean(ledgers: Sequence[Ledger]) -> bool:
    """True if the ranks' group is at one place, with nothing under way: then the next run may use it."""
    if any(ledger.end is None or ledger.end.how != "returned" or ledger.truncated for ledger in ledgers):
        return False
    if any(set(ledger.groups) != {WORLD} for ledger in ledgers):
        return False
    if any(message.state != "completed" for ledger in ledgers for message in ledger.messages):
        return False
    return len({tuple(map(_signature, ledger.collectives)) for ledger in ledgers}) == 1


def _signature(record: CollectiveRecord) -> tuple[Any, ...]:
    if record.state != "completed":
        return (record.state, id(record))  # equal to no other
    sized = record.op not in ("all_to_all", "gather", "scatter")  # where ranks may differ, rightly
    return (record.op, record.reduce_op, record.root, *(sized and (record.dtype, record.payload_bytes) or ()))


@contextmanager
def _interrupts_held() -> Iterator[Callable[[], bool]]:
    """Hold back Ctrl-C, which must not break off a message; yields what tells that it came. It is raised at the end."""
    came: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield lambda: False
        return
    signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGINT, handler)
    if came:
        signal.raise_signal(signal.SIGINT)
