"""FlightDump: what PyTorch's Flight Recorder kept of one rank; read from its files, pickles or JSON.

Source of the format: FlightRecorderDetail.hpp of PyTorch 2.13, and torch.distributed.flight_recorder, which reads it.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from tpbed.tp.errors import TestbedError

VERSION = "2"  # of the format, without its minor number, which grows with fields
DEFAULT_GROUP, UNDESCRIBED = "default_pg", "undefined"  # descriptions that torch.distributed gives
_RANK = re.compile(r"(\d+)(?:\.(?:json|pickle|pkl|dump|bin))?$")
_ADVICE = "Give the files that TORCH_FR_DUMP_TEMP_FILE or TORCH_NCCL_DEBUG_INFO_TEMP_FILE names, one for each rank."


class DumpError(TestbedError):
    """A file that is no dump of a Flight Recorder, or files that are not those of one run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A Python frame of the call that issued an entry."""

    name: str
    filename: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightEntry:
    """One collective or message as the recorder saw it issued.

    state: over gloo never more than "scheduled", and "started" only where TORCH_NCCL_ENABLE_TIMING is on.
    retired: nobody looks after it any more: over gloo it is done, over NCCL it is completed or has timed out.
    """

    record_id: int  # counts the entries of the rank, from 0
    process_group: tuple[str, str]  # name and description
    collective_seq_id: int  # counts the collectives of the rank in the group, from 1
    profiling_name: str  # nccl:all_gather, gloo:barrier, nccl:send 0->1
    pg_id: int = 0
    p2p_seq_id: int = 0
    op_id: int = 0
    is_p2p: bool = False
    input_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()  # as C++ names them: Float, BFloat16, Long
    output_sizes: tuple[tuple[int, ...], ...] = ()
    output_dtypes: tuple[str, ...] = ()
    state: Literal["scheduled", "started", "completed"] = "scheduled"
    retired: bool = False
    time_created_ns: int = 0
    time_discovered_started_ns: int | None = None  # 0 in JSON, where it is not known
    time_discovered_completed_ns: int | None = None
    timeout_ms: int = 0
    frames: tuple[Frame, ...] = ()  # innermost first; none in JSON

    @property
    def backend(self) -> str:
        """`nccl`, `gloo` and the like."""
        return self.profiling_name.partition(":")[0]

    @property
    def op(self) -> str:
        """The recorder's own name, such as _all_gather_base; of a message `send` or `recv`."""
        return self.profiling_name.partition(":")[2].partition(" ")[0]


def _ranks(told: Any) -> Any:
    """`"[0, 1]"`, as the recorder writes it."""
    return json.loads(told or "[]") if isinstance(told, str) else told


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightGroup:
    """A process group. ranks: global ones, in group order; none over gloo, whose groups do not tell."""

    name: str
    desc: str
    ranks: Annotated[tuple[int, ...], BeforeValidator(_ranks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightDump:
    """All that the recorder of one rank kept: a ring, in which new entries overwrite the oldest."""

    rank: int
    version: str
    pg_config: dict[str, FlightGroup]
    entries: tuple[FlightEntry, ...]  # oldest first

    @property
    def has_lost_entries(self) -> bool:
        """Whether the ring was too small for the run."""
        return bool(self.entries) and self.entries[0].record_id > 0


def load_dumps(paths: Sequence[Path]) -> tuple[FlightDump, ...]:
    """Read dumps of the ranks of one run, in rank order; a rank is the number that ends its file's name.

    paths: files, and folders that hold nothing else. Pickles are read without running anything that they name.
    Raises DumpError for a file that is missing or no dump, and for two files of one rank.
    """
    files = [file for path in paths for file in _files(path)]
    by_rank: dict[int, Path] = {}
    for file in files:
        rank = _rank_of(file)
        if rank in by_rank:
            raise DumpError(f"{by_rank[rank]} and {file} are both of rank {rank}: give the dumps of one run.")
        by_rank[rank] = file
    return tuple(_load(by_rank[rank], rank) for rank in sorted(by_rank))


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise DumpError(f"there is no {path}. {_ADVICE}")
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if file.is_file())
    if not found:
        raise DumpError(f"{path} holds no file. {_ADVICE}")
    return found


def _rank_of(file: Path) -> int:
    found = _RANK.search(file.name)
    if found is None:
        raise DumpError(f"{file} does not say which rank it is of: its name must end with that number, as in rank_3.")
    return int(found[1])


def _load(file: Path, rank: int) -> FlightDump:
    try:
        given = _parse(file.read_bytes())
        if not isinstance(given, dict):
            raise DumpError(f"{file} is no Flight Recorder dump: it holds {type(given).__name__}. {_ADVICE}")
        dump = _adapter().validate_python({"entries": (), "pg_config": {}, **given, "rank": rank})
    except OSError as wrong:
        raise DumpError(f"cannot read {file}: {wrong.strerror}. {_ADVICE}") from wrong
    except ValidationError as wrong:
        first = wrong.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise DumpError(f"{file} is no Flight Recorder dump: {place or 'it'} - {first['msg']}. {_ADVICE}") from wrong
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, TypeError, AttributeError) as wrong:
        raise DumpError(f"{file} is no whole Flight Recorder dump ({wrong}). {_ADVICE}") from wrong
    if dump.version.partition(".")[0] != VERSION:
        raise DumpError(f"{file} is of version {dump.version} of the Flight Recorder: tpbed reads {VERSION}.x.")
    return dump


def _parse(data: bytes) -> Any:
    if data.lstrip()[:1] == b"{":
        return json.loads(data)
    return _PlainUnpickler(io.BytesIO(data)).load()


class _PlainUnpickler(pickle.Unpickler):
    """Takes containers, numbers and text alone: a dump has nothing else, and whoever wrote it may not be trusted."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}, and a dump holds plain values alone")


@cache
def _adapter() -> TypeAdapter[FlightDump]:
    return TypeAdapter(FlightDump)
