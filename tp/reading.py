"""Reading: what a supervisor read of its rank, on its way to the driver."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """What the threads of a process did: tells one that waits from one that works or cannot get a processor."""

    main_slices: int  # times that the main thread got a processor so far
    busy_ns: int  # on processors so far, all threads
    main_runnable: bool  # the main thread has or wants a processor now
    runnable: bool  # some thread does


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a supervisor read of its rank: events since the last reading, and how the rank looked."""

    events: bytes
    count: int  # of this run so far, dropped ones too
    truncated: bool
    quiet_ns: int  # since the last event, or the start of the run
    stopped: bool
    threads: Threads | None = None
