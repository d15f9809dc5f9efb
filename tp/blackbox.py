"""BlackBox: the events of a live rank in memory that outlives it; StackFile: its Python stack, on a signal."""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import re
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from tpbed.tp.ledger import END_FIELDS, Event

CAPACITY = 64 << 20  # bytes, of which only those in use take memory; about 200,000 collectives
STACK_SIGNAL = signal.SIGRTMIN + 9
_HEADER = 64  # bytes: committed, count, last_ns and truncated, as native 64-bit words
_COMMITTED, _COUNT, _LAST_NS, _TRUNCATED = range(4)
_END_RESERVE = 256 << 10  # bytes that only the end of the rank may use
_LONGEST_TEXT = 4 << 10  # characters of a field of an end that did not fit as it was; up to 12 bytes each
_KEEP_MAPPED = 1 << 20  # bytes in use beyond which a reset gives memory back

_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=str).encode


class BlackBox:
    """A rank's events, one JSON line each, in a memory file that its supervisor maps too.

    An event counts once the header says so, after its bytes are in place: whatever kills or stops the writer, and
    whenever the reader looks, it finds whole events. A full box drops further events, but for the rank's end, and
    says so; it never raises.
    """

    def __init__(self, fd: int) -> None:
        """Map the box behind `fd`, which stays the caller's; one process writes, any number read."""
        self._map = mmap.mmap(fd, 0)
        self._view = memoryview(self._map)
        self._head = self._view[:_HEADER].cast("Q")
        self._limit = len(self._map) - _HEADER
        self._lock = threading.Lock()
        self.fd = fd

    @classmethod
    def create(cls, capacity: int = CAPACITY) -> Self:
        """A new, empty box of `capacity` bytes; its `fd` can be inherited or sent to another process."""
        fd = os.memfd_create("tpbed-blackbox")
        os.ftruncate(fd, mmap.PAGESIZE + max(capacity, 2 * _END_RESERVE))
        return cls(fd)

    @property
    def count(self) -> int:
        """Events appended since the last reset, dropped ones too."""
        return self._head[_COUNT]

    @property
    def last_ns(self) -> int:
        """time.monotonic_ns() of the last append, or of the reset."""
        return self._head[_LAST_NS]

    @property
    def truncated(self) -> bool:
        """True if events were dropped."""
        return bool(self._head[_TRUNCATED])

    def append(self, event: Event) -> None:
        """Write one event; when this returns it survives the process."""
        line = format_event(event)
        with self._lock:
            if event[0] == "end":
                self._commit(line if self._fits(line) else format_event(_shortened(event)))
            elif self._head[_TRUNCATED] or not self._fits(line, _END_RESERVE):
                self._head[_TRUNCATED] = 1
                self._commit(b"")
            else:
                self._commit(line)

    def _fits(self, line: bytes, reserve: int = 0) -> bool:
        return self._head[_COMMITTED] + len(line) + reserve <= self._limit

    def _commit(self, line: bytes) -> None:
        start, head = _HEADER + self._head[_COMMITTED], self._head
        if line:
            self._map[start : start + len(line)] = line
        head[_COUNT] += 1
        head[_LAST_NS] = time.monotonic_ns()
        head[_COMMITTED] += len(line)

    def read(self, offset: int = 0) -> bytes:
        """The committed bytes from `offset` on, whole lines; the next offset is this one plus their number."""
        return bytes(self._view[_HEADER + offset : _HEADER + self._head[_COMMITTED]])

    def events(self) -> list[Event]:
        """All events since the last reset, oldest first."""
        return parse_events(self.read())

    def reset(self) -> None:
        """Forget all events; nobody may be appending."""
        used = self._head[_COMMITTED]
        self._head[_COMMITTED] = self._head[_COUNT] = self._head[_TRUNCATED] = 0
        self._head[_LAST_NS] = time.monotonic_ns()
        if used > _KEEP_MAPPED:
            pages = used // mmap.PAGESIZE
            self._map.madvise(mmap.MADV_REMOVE, mmap.PAGESIZE, pages * mmap.PAGESIZE)

    def close(self) -> None:
        """Unmap the box and close its fd."""
        self._head.release()
        self._view.release()
        self._map.close()
        os.close(self.fd)


def parse_events(lines: bytes) -> list[Event]:
    """The events in bytes that BlackBox.read returned."""
    events: list[Event] = json.loads(b"[%s]" % lines.rstrip(b"\n").replace(b"\n", b","))
    return events


def format_event(event: Event) -> bytes:
    """One event as BlackBox.read returns it."""
    return _encode(event).encode("ascii") + b"\n"


def _shortened(event: Event) -> list[Any]:
    return [field[-_LONGEST_TEXT:] if isinstance(field, str) else field for field in event]


class Pen:
    """Where a Recorder of one run writes: into `box`, until the run is over; what comes later is dropped."""

    __slots__ = ("_box",)

    def __init__(self, box: BlackBox) -> None:
        self._box: BlackBox | None = box

    def __call__(self, event: Event) -> None:
        """Write one event."""
        box = self._box
        if box is not None:
            box.append(event)

    def close(self) -> None:
        """Drop all later events."""
        self._box = None


class StackFile:
    """A memory file into which a process writes the Python stack of its main thread when it gets STACK_SIGNAL.

    The stack comes even if that thread holds the GIL or sits in C; a stopped process writes it when it is continued.
    """

    def __init__(self, fd: int) -> None:
        """The file behind `fd`, which stays the caller's."""
        self.fd = fd

    @classmethod
    def create(cls) -> Self:
        """A new, empty file."""
        return cls(os.memfd_create("tpbed-stack"))

    def serve(self) -> None:
        """Write the stack of this process's main thread at each STACK_SIGNAL from now on, and that of a crash in C."""
        faulthandler.enable(file=self.fd, all_threads=False)
        faulthandler.register(STACK_SIGNAL, file=self.fd, all_threads=False, chain=False)

    def ask(self, pidfd: int, wait_s: float = 0.05) -> tuple[str, ...]:
        """The frames of the process behind `pidfd`, innermost first; empty if it wrote none within `wait_s` seconds."""
        self.clear()
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, STACK_SIGNAL)
        deadline = time.monotonic() + wait_s
        text = ""
        while not text.endswith(_LAST_LINES) and time.monotonic() < deadline:
            time.sleep(0.0005)
            text = self._text()
        return parse_frames(text)

    def clear(self) -> None:
        """Forget what was written."""
        os.ftruncate(self.fd, 0)
        os.lseek(self.fd, 0, os.SEEK_SET)

    def last_words(self) -> str:
        """What a process that crashed in C wrote, as it was dying; "" if it did not."""
        text = self._text()
        return text[text.find(_FATAL) :] if _FATAL in text else ""

    def _text(self) -> str:
        size = os.fstat(self.fd).st_size
        return os.pread(self.fd, size, 0).decode("utf-8", "backslashreplace")

    def close(self) -> None:
        """Close the file."""
        os.close(self.fd)


_LAST_LINES = (" in _run_module_as_main\n", "  ...\n")
_FATAL = "Fatal Python error: "
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$', re.MULTILINE)


def parse_frames(text: str) -> tuple[str, ...]:
    """`file:line function` of each frame in a dump by faulthandler, in its order."""
    return tuple(frame_text(found["file"], found["line"], found["function"]) for found in _FRAME.finditer(text))


def frame_text(file: str, line: int | str, function: str) -> str:
    """`file:line function`, as call sites are written in a ledger: the file with its folder."""
    return f"{'/'.join(Path(file).parts[-2:])}:{line} {function}"


def end_event(**fields: Any) -> Event:
    """The event of an end that somebody other than the rank's Recorder saw; the rest is as in ledger.End."""
    defaults: dict[str, Any] = dict.fromkeys(("error_type", "message", "site", "traceback"), "") | {"at_ns": 0}
    return ("end", *((defaults | fields).get(name) for name in END_FIELDS))
