"""Scenario: what a catalogue entry says - what to run, what goes wrong in it, and what must be found."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tpbed.harness.faults import Fault
from tpbed.tp.errors import TestbedError

Kind = Literal[
    "hang", "mismatch", "stall", "diverge", "wrong_ids", "order", "crash_one", "crash_all", "init_fail", "leak"
]
WorldName = Literal["sim", "gloo", "nccl"]
HeadFormat = Literal[
    "fp32", "bf16", "fp16", "fp8", "fp8-tensor", "fp8-block", "int8", "nvfp4-ct", "nvfp4-modelopt"
]  # the packed ones as tpbed.selector.checkpoint.QuantFormat
Logits = Literal["distinct", "negative", "tied", "equal", "gaussian", "smollm2"]
Ties = Literal["canonical", "equivalent"]
EVERYWHERE: tuple[WorldName, ...] = ("sim", "gloo", "nccl")
PROCESSES: tuple[WorldName, ...] = ("gloo", "nccl")
LONGEST_S = 86_400.0  # what a fault or a deadline can last
_NAME = re.compile(r"(?!.*\.\.)[\w.\- ]+(/[\w.\- ]+)*")  # of a folder below the one for records
_LIMITS = {"seconds": (0, LONGEST_S), "times": (1, 10**9), "seq": (1, 10**9)}  # of the numbers of faults

KINDS = {
    0: "nothing goes wrong",
    1: "one rank raises before a collective",
    2: "one rank skips, leaves early or adds a collective",
    3: "a decision taken from rank-local facts",
    4: "a decision that is not synchronised, or too late",
    5: "vocabulary geometry",
    6: "top-k semantics",
    7: "quantized head",
    8: "kernel, transport or slow rank",
    9: "life cycle of processes",
    10: "the checker itself",
}


class ScenarioError(TestbedError):
    """A scenario says something that cannot be run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A finding that must be there. A field left out matches anything."""

    kind: Kind
    ranks: tuple[int, ...] | None = None  # the ranks at fault
    op: str | None = None
    seq: int | None = None
    error: str | None = None  # type of the error that caused it
    says: str | None = None  # a part of the explanation


@dataclass(frozen=True, slots=True, kw_only=True)
class Overwrite:
    """One true logit, replaced for everybody, the reference too: NaN, infinities, planted ties."""

    row: int
    token_id: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One entry of the catalogue.

    logits: "distinct" values without ties (exact in every dense format), "negative" the same below zero, "tied" in
        groups of four, "equal" all the same, "gaussian" random weights and states, "smollm2" trained ones.
    pad_fill: what the padding rows of the head hold.
    widths: columns per rank of an uneven, unpadded vocabulary; None shares the padded one equally.
    selector, topk: names in SELECTORS, TIMED, SERVING or MISREADINGS, and in TOPKS, of the harness.
    head_change: what is wrong with the head, a name in harness.mutant_heads.HEADS; empty: nothing.
    schedule: who runs when, as harness.schedules reads it, for what only some orders show; simulated ranks alone can
        follow one. Empty: the world's own.
    """

    name: str
    claim: str
    kind: int  # of trouble, 1 to 10 as KINDS names them; 0 for none
    source: str = ""  # public reports, as "owner/repository#number, owner/repository#number"
    worlds: tuple[WorldName, ...] = EVERYWHERE
    world_size: int = 4
    org_vocab_size: int = 1000
    added_vocab_size: int = 0
    pad_to: int = 64
    widths: tuple[int, ...] | None = None
    hidden_size: int = 64
    head: HeadFormat = "bf16"
    logits: Logits = "distinct"
    pad_fill: float = 0.0
    overwrites: tuple[Overwrite, ...] = ()
    k: int = 16
    rows: int = 4
    steps: int = 3
    selector: str = "tpbed"
    topk: str = "contract"
    head_change: str = ""
    ties: Ties = "canonical"
    faults: tuple[Fault, ...] = ()
    expect: tuple[Expected, ...] = ()
    stall_after_s: float = 1.0
    schedule: str = ""

    @property
    def reports(self) -> tuple[str, ...]:
        """The public reports of its source, one by one."""
        return tuple(filter(None, self.source.split(", ")))

    def __post_init__(self) -> None:
        for wrong in (*self._wrong_numbers(), *self._wrong_faults()):
            raise ScenarioError(f"{self.name or 'a scenario'}: {wrong}")

    def _wrong_numbers(self) -> Iterator[str]:
        if self.name and not _NAME.fullmatch(self.name):
            yield f"name={self.name!r}: give words of letters, digits, '.', '_' and '-', with '/' between them."
        for name, least in (("world_size", 1), ("steps", 1), ("rows", 0)):
            if getattr(self, name) < least:
                yield f"{name}={getattr(self, name)}: give {least} or more."
        if not 0 < self.stall_after_s <= LONGEST_S:
            yield f"stall_after_s={self.stall_after_s}: give more than 0 and at most {LONGEST_S:,} seconds."
        if self.schedule and self.worlds != ("sim",):
            yield f"schedule={self.schedule!r} needs worlds=('sim',): no other can follow it."
        if self.logits not in ("gaussian", "smollm2") and self.rows > self.hidden_size:
            yield (
                f"rows={self.rows} of planted logits need as many hidden dimensions, and hidden_size is "
                f"{self.hidden_size}: use fewer rows, a larger hidden_size, or logits='gaussian'."
            )

    def _wrong_faults(self) -> Iterator[str]:
        for fault in self.faults:
            if not 0 <= fault.rank < self.world_size:
                yield (
                    f"a fault strikes rank {fault.rank}, and world_size={self.world_size} has ranks 0 to "
                    f"{self.world_size - 1}: give the fault one of these."
                )
            for name, (least, most) in _LIMITS.items():
                given = getattr(fault, name, None)
                if given is not None and not least <= given <= most:
                    yield f"{fault.kind} with {name}={given}: give {least:,} to {most:,}."
