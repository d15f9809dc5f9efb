"""World: where ranks live; and WorldRun: what it saw of one rank program, nothing inferred."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from tpbed.tp.errors import TestbedError
from tpbed.tp.ledger import Ledger

RankProgram = Callable[[int], Any]
RankState = Literal["running", "ended", "dead", "stopped", "stalled", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """How a rank looked from outside when the run was over.

    running: alive, and free to move or waiting in a collective. ended: its program returned or raised.
    dead: its process is gone. stopped: its process is suspended (SIGSTOP).
    stalled: alive, outside any collective, and without progress for the deadline; or it can never run again.
    unknown: nobody looked; the ledger comes from what another recorder left behind.
    """

    state: RankState
    detail: str = ""  # a signal, an exit status, the reason it stalled
    frames: tuple[str, ...] = ()  # Python frames, innermost first, where they could be read
    stack: str = ""  # all threads with their native frames, as text, of a rank that did not end, where asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldRun:
    """One rank program on every rank of a world: results, ledgers and liveness, by rank."""

    world: str  # "sim", "ray+gloo", "ray+nccl"
    results: tuple[Any, ...]  # None where a rank did not return
    ledgers: tuple[Ledger, ...]
    liveness: tuple[Liveness, ...]
    stuck: tuple[int, ...] = ()  # the ranks that can never move again, as the world proved it or its deadline said
    proof_ms: float | None = None  # from the last event of the ranks to the proof that some are stuck
    recovery_ms: float | None = None  # from that proof until every rank was ready again
    replaced: tuple[int, ...] = ()  # ranks whose process had to be replaced


class WorldSizeError(TestbedError):
    """A world cannot have so many ranks."""


def require_world_size(world_size: int) -> None:
    """Raises WorldSizeError for anything but a number of ranks."""
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise WorldSizeError(f"world_size={world_size!r}: give a whole number of ranks, 1 or more.")


class World(Protocol):
    """Runs rank programs; a context manager that leaves nothing behind.

    A rank program is a function of its rank that talks through torch.distributed, whose default group is ready when it
    starts and spans all ranks. One with a method `arrive(rank)` gets a new group, on real ranks: it is called on each
    before that comes to the rendezvous. After a run, whatever happened in it, the same world runs the next program.
    """

    @property
    def name(self) -> str:
        """As in WorldRun.world."""
        ...

    @property
    def world_size(self) -> int:
        """Ranks."""
        ...

    def run(self, program: RankProgram, *, stall_after_s: float = 10.0) -> WorldRun:
        """Run `program` on every rank until all have ended or the rest are stuck for good.

        stall_after_s: a rank outside any collective that makes no progress for so long counts as stalled (a simulated
            world needs no such deadline). Errors of the program are in the ledgers, and never raised here.
        """
        ...

    def close(self) -> None:
        """End the ranks; idempotent."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
