"""Faults: one frozen dataclass each, keyed by rank and by where it strikes; the harness fires them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from typing import Any, Literal

from tpbed.tp.ledger import WORLD

FIRED = "fault"  # the mark that a planned fault leaves in the ledger; its value is the fault's index in the scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class _AtCollective:
    """Strikes when `rank` is about to issue collective `seq` of `group`, `times` times."""

    rank: int
    seq: int  # counts the rank's own collectives in the group, from 1
    group: str = WORLD
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Raise(_AtCollective):
    """The rank raises instead of joining."""

    message: str = "injected error"
    kind: Literal["raise"] = "raise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill(_AtCollective):
    """SIGKILL to the rank's process."""

    kind: Literal["kill"] = "kill"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit(_AtCollective):
    """The rank's process leaves through os._exit(1)."""

    kind: Literal["exit"] = "exit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quit(_AtCollective):
    """The rank calls sys.exit(status): SystemExit, an error like any other."""

    status: int = 1
    kind: Literal["quit"] = "quit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash(_AtCollective):
    """The rank's process reads where nothing is, in C: SIGSEGV."""

    kind: Literal["crash"] = "crash"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhaust(_AtCollective):
    """The rank gets no more memory: its allocator raises."""

    kind: Literal["exhaust"] = "exhaust"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(_AtCollective):
    """SIGSTOP to the rank's process: it never runs again."""

    kind: Literal["stop"] = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause(_AtCollective):
    """SIGSTOP to the rank's process, and SIGCONT after `seconds`, both from outside it: the rank is slow."""

    seconds: float = 0.0
    kind: Literal["pause"] = "pause"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall(_AtCollective):
    """The rank computes for ever and never gets to the collective."""

    kind: Literal["stall"] = "stall"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay(_AtCollective):
    """The rank is late by `seconds`."""

    seconds: float = 0.0
    kind: Literal["delay"] = "delay"


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip(_AtCollective):
    """The rank does not issue the collective and goes on as if it had completed."""

    kind: Literal["skip"] = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra(_AtCollective):
    """The rank issues the collective twice."""

    kind: Literal["extra"] = "extra"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recast(_AtCollective):
    """The rank contributes another dtype of the same shape."""

    dtype: Literal["bfloat16", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"] = (
        "bfloat16"
    )
    kind: Literal["recast"] = "recast"


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrow(_AtCollective):
    """The rank contributes one column less."""

    kind: Literal["narrow"] = "narrow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strided(_AtCollective):
    """The rank contributes the same values through a view that is not contiguous: a column crop, or a transpose.

    transposed: dense but permuted memory, which NCCL's check lets through; otherwise memory with holes: it refuses it.
    """

    transposed: bool = False
    kind: Literal["strided"] = "strided"


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrupt(_AtCollective):
    """The rank's contribution is negated on its way: the same dtype and shape, other values."""

    kind: Literal["corrupt"] = "corrupt"


@dataclass(frozen=True, slots=True, kw_only=True)
class _AtStep:
    """Strikes in step `step` of `rank`; steps count from 0."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave(_AtStep):
    """The rank returns before the step."""

    kind: Literal["leave"] = "leave"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows(_AtStep):
    """The rank believes that the step has another number of rows."""

    rows: int
    kind: Literal["rows"] = "rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Nudge(_AtStep):
    """One logit of the rank's shard reads otherwise than its peers would have computed it."""

    row: int
    column: int  # of the shard
    value: float
    kind: Literal["nudge"] = "nudge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spin(_AtStep):
    """The rank's top-k kernel never returns."""

    kind: Literal["spin"] = "spin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """What the rank finds out for itself under a name - its clock, its free memory, its tuning - reads otherwise.

    Programs of harness.serving ask for facts. step: only then; None: whenever it is asked for.
    """

    rank: int
    name: str
    value: bool | int | float | str
    step: int | None = None
    kind: Literal["fact"] = "fact"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherTopK:
    """The rank's top-k is another back end, by its name in harness.inject.TOPKS."""

    rank: int
    topk: str
    kind: Literal["other_topk"] = "other_topk"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmasked:
    """The scenario's overwrites, a constraint mask among them, do not reach the rank's logits."""

    rank: int
    kind: Literal["unmasked"] = "unmasked"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongScale:
    """The rank's quantized head carries the scales of another rank's rows."""

    rank: int
    scale_of: int
    kind: Literal["wrong_scale"] = "wrong_scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class JunkScale:
    """The rank's one scale is the largest of two slots, the second of which was never written and holds `junk`."""

    rank: int
    junk: float
    kind: Literal["junk_scale"] = "junk_scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleMethod:
    """The rank's dense head still carries the quant method of another, a class of this name."""

    rank: int
    method: str = "PackedMethod"
    kind: Literal["stale_method"] = "stale_method"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedOnly:
    """The rank's head keeps its packed weight and has lost its quant method."""

    rank: int
    kind: Literal["packed_only"] = "packed_only"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoWeight:
    """The rank's head keeps its packed weight under another name, and has no attribute `weight`."""

    rank: int
    kind: Literal["no_weight"] = "no_weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unloaded:
    """The rank's packed head is never read: a dense weight stands in its place, with whatever its memory held."""

    rank: int
    kind: Literal["unloaded"] = "unloaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleDropped:
    """The rank's packed head is cast to bfloat16 and served as a dense one, without its scales."""

    rank: int
    kind: Literal["scale_dropped"] = "scale_dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inflated:
    """The rank's packed head is allocated for world_size times the hidden units."""

    rank: int
    kind: Literal["inflated"] = "inflated"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksFromOwnRow:
    """The rank counts the blocks of 128 rows that have one scale from the first row of its shard, which cuts one."""

    rank: int
    kind: Literal["blocks_from_own_row"] = "blocks_from_own_row"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpadded:
    """The rank's dense weight is allocated for its share of the vocabulary before padding."""

    rank: int
    kind: Literal["unpadded"] = "unpadded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The rank's head is captured in its first step, off the stream, and replays that step's logits ever after."""

    rank: int
    kind: Literal["replayed"] = "replayed"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherTile:
    """The rank's head sums its products in two halves, as another tile of the kernel would."""

    rank: int
    kind: Literal["other_tile"] = "other_tile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Absent:
    """The rank does not come to the rendezvous of the group: it stays outside, alive ("stall"), or ends there.

    "exhaust": it gets no more memory. "port": the port that it was told to listen on is taken.
    """

    rank: int
    how: Literal["stall", "stop", "exit", "kill", "crash", "exhaust", "port"] = "stall"
    kind: Literal["absent"] = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """The rank comes to the rendezvous of the group `seconds` after it could have."""

    rank: int
    seconds: float
    kind: Literal["late"] = "late"


@dataclass(frozen=True, slots=True, kw_only=True)
class Linger:
    """The rank has made its last step, and its teardown takes `seconds`; None: it never ends."""

    rank: int
    seconds: float | None = None
    kind: Literal["linger"] = "linger"


CollectiveFault = (
    Raise
    | Kill
    | Exit
    | Quit
    | Crash
    | Exhaust
    | Stop
    | Pause
    | Stall
    | Delay
    | Skip
    | Extra
    | Recast
    | Narrow
    | Strided
    | Corrupt
)
StepFault = Leave | Rows | Nudge | Spin
HeadFault = (
    WrongScale
    | JunkScale
    | StaleMethod
    | PackedOnly
    | NoWeight
    | Unloaded
    | ScaleDropped
    | Inflated
    | BlocksFromOwnRow
    | Unpadded
    | Replayed
    | OtherTile
)
GivenFault = Fact | OtherTopK | Unmasked
ArrivalFault = Absent | Late
Fault = CollectiveFault | StepFault | HeadFault | GivenFault | ArrivalFault | Linger


def describe(fault: Fault) -> str:
    """The fault as `--fault` reads it: `raise@rank=2,seq=3,message=out of memory`; without what is as by default."""
    told = [(field.name, getattr(fault, field.name), field.default) for field in fields(fault) if field.name != "kind"]
    return f"{fault.kind}@" + ",".join(f"{name}={_written(value)}" for name, value, usual in told if value != usual)


def _written(value: Any) -> str:
    """A value as JSON writes it; a text without quotes where nothing in it could be taken for something else."""
    plain = isinstance(value, str) and _PLAIN_TEXT.fullmatch(value) and not _read_as_json(value)
    return value if plain else json.dumps(value, separators=(",", ":"))


def _read_as_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


_PLAIN_TEXT = re.compile(r"[\w.:/+-]([\w.:/+ -]*[\w.:/+-])?")
