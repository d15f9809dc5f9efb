"""SimulatedRank: one rank of a simulated run, what it waits for and where it stands."""

from __future__ import annotations

from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch

from tpbed.tp.ledger import Event
from tpbed.tp.rank import RankContext
from tpbed.tp.recorder import call_site
from tpbed.tp.registers import RankGroups
from tpbed.tp.world import Liveness, RankState


class Awaited(Protocol):
    """What a rank waits for: its part in a collective."""

    rank: SimulatedRank
    done: bool
    vetted: bool  # it is waited on where it is called, and that may wait
    called: int  # how many events its rank had written when it was called, the last of them of the call

    def fulfil(self) -> None:
        """Give the future its result, and so call its callbacks."""
        ...


class SimulatedRank:
    """One rank of one run."""

    greenlet: Any = None  # from its start to its end
    isolation: Any = None
    state: RankState = "running"
    detail = ""
    result: Any = None
    waits_for: Awaited | None = None
    waits = 0  # that are over: a time-out of an earlier one is void
    polls = polled_at = refusals = 0
    looks = naps = napped_at = 0  # at the clock, and sleeps, while nothing else happens
    looked_at = -1  # what progress, for it may read the clock before any

    def __init__(self, index: int, context: RankContext, events: list[Event]) -> None:
        self.index, self.context, self.events = index, context, events
        self.groups: Any = RankGroups()
        self.formed: dict[tuple[str, tuple[int, ...]], int] = {}  # how many groups, by name and members
        self.owed: list[Awaited] = []  # with futures to fulfil when the rank goes on


def observe(rank: SimulatedRank) -> Liveness:
    """What can be seen of a rank when nobody can move."""
    if rank.state == "ended":
        return _ENDED
    frames = () if rank.state == "dead" else _frames(rank.greenlet and rank.greenlet.gr_frame)
    return Liveness(state=rank.state, detail=rank.detail, frames=frames)


_ENDED = Liveness(state="ended")


def _frames(frame: FrameType | None) -> tuple[str, ...]:
    """Where a rank stands, innermost first, outside torch and the test bed."""
    sites = []
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_OURS):
            sites.append(call_site(frame))
        frame = frame.f_back
    return tuple(sites)


_NOT_OURS = (str(Path(__file__).parent), str(Path(torch.__file__).parent), "<frozen")
