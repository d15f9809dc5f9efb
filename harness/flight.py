"""FlightReport: what Flight Recorder dumps say went wrong, by the diagnosis that tpbed's own ledgers get."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tpbed.harness.circle import tell
from tpbed.harness.diagnose import diagnose
from tpbed.harness.findings import Finding, name_group, name_ranks
from tpbed.harness.flight_ledgers import FlightRun, is_gloo, read_flight
from tpbed.harness.flight_recorder import DumpError, FlightDump, load_dumps
from tpbed.harness.report import WIDTH, explain, position_json, positions
from tpbed.tp.ledger import WORLD
from tpbed.tp.stuck import find_waits

Answer = Literal["healthy", "found", "undecided"]
FORMAT = 1  # of the JSON; goes up when a field is renamed, removed or changes its meaning
EXIT_STATUS: dict[Answer, int] = {"healthy": 0, "found": 1, "undecided": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightReport:
    """What dumps show. doubts: why they may not show all; notes: what they could not have shown."""

    dumps: tuple[FlightDump, ...]
    run: FlightRun
    findings: tuple[Finding, ...]
    doubts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def answer(self) -> Answer:
        """Healthy only without a doubt."""
        return "found" if self.findings else "undecided" if self.doubts else "healthy"

    def __str__(self) -> str:
        """The report as text, 120 columns wide."""
        return "\n".join([self._row(), explain(self.findings, self.run), *self._told()])

    def _row(self) -> str:
        entries = sum(len(dump.entries) for dump in self.dumps)
        backends = sorted({entry.backend for dump in self.dumps for entry in dump.entries})
        versions = sorted({dump.version for dump in self.dumps})
        told = f"{len(self.dumps)} of {len(self.run.ledgers)} ranks, {entries:,} entries, format {', '.join(versions)}"
        return "  ".join([self.answer.upper(), f"Flight Recorder of {' and '.join(backends) or 'nobody'}", told])

    def _told(self) -> Iterator[str]:
        for label, texts in (("doubt", self.doubts), ("note", self.notes)):
            for text in texts:
                lead = f"{label:<5} "
                yield from textwrap.wrap(
                    text, WIDTH, initial_indent=lead, subsequent_indent=" " * 6, break_on_hyphens=False
                )

    def to_json(self) -> dict[str, Any]:
        """Plain values that JSON can hold; a field keeps its name and meaning within a format."""
        return {
            "type": "flight",
            "format": FORMAT,
            "answer": self.answer,
            "world_size": len(self.run.ledgers),
            "dumps": [dump.rank for dump in self.dumps],
            "culprits": sorted({rank for finding in self.findings for rank in finding.ranks}),
            "findings": [asdict(finding) for finding in self.findings],
            "doubts": list(self.doubts),
            "notes": list(self.notes),
            "ranks": [position_json(*entry) for entry in positions(self.run).items()],
        }


def read_report(paths: Sequence[Path], world_size: int | None = None) -> FlightReport:
    """Read dumps and diagnose them.

    paths: as load_dumps takes them. world_size: of the run; None takes the most that the dumps name.
    Raises DumpError for what is no dump, and for a world_size that the dumps exceed.
    """
    dumps = load_dumps(paths)
    size = _world_size(dumps, world_size)
    run = read_flight(dumps, size)
    findings = diagnose(run.ledgers, run.liveness)
    doubts = [*_blind_spots(dumps, size), *([] if findings else _open_calls(run))]
    return FlightReport(dumps=dumps, run=run, findings=findings, doubts=tuple(doubts), notes=tuple(_notes(dumps, run)))


def _world_size(dumps: Sequence[FlightDump], given: int | None) -> int:
    named = [dump.rank for dump in dumps]
    named += [rank for dump in dumps for group in dump.pg_config.values() for rank in group.ranks]
    least = max(named) + 1
    if given is not None and given < least:
        raise DumpError(f"the dumps name rank {least - 1}, so {given} ranks are too few: give {least} or more.")
    return given or least


def _blind_spots(dumps: Sequence[FlightDump], world_size: int) -> Iterator[str]:
    absent = sorted(set(range(world_size)) - {dump.rank for dump in dumps})
    if absent:
        yield f"{name_ranks(absent)} left no dump: what happened there is not seen."
    silent = [dump.rank for dump in dumps if not dump.entries]
    if silent:
        yield (
            f"{name_ranks(silent)} recorded nothing: no collective was called, or the recorder was off "
            "(set TORCH_FR_BUFFER_SIZE, or TORCH_NCCL_TRACE_BUFFER_SIZE, to 2000 before the group is made)."
        )


def _open_calls(run: FlightRun) -> Iterator[str]:
    """What all who are known have joined, and is not complete."""
    joined = [wait.record for wait in find_waits(run.ledgers).values() if not wait.missing_ranks]
    for place in dict.fromkeys(tell(record, run.ledgers) for record in joined):
        yield (
            f"{place} is not complete, and all who are known have called it alike: it was under way, or the network "
            "or a kernel holds it, or they differ in what a dump does not show (root, reduce op, strides)."
        )


def _notes(dumps: Sequence[FlightDump], run: FlightRun) -> Iterator[str]:
    lossy = [dump.rank for dump in dumps if dump.has_lost_entries]
    if lossy:
        yield (
            f"the rings of {name_ranks(lossy)} have lost their beginning, and what peers did before it was left out: "
            "raise TORCH_FR_BUFFER_SIZE to see it."
        )
    if is_gloo(dumps):
        groups = sorted({name for ledger in run.ledgers for name in ledger.groups} - {WORLD})
        known = "".join(f"; of {name_group(name, run.ledgers)} those that used it" for name in groups)
        yield f"gloo records no messages (send, recv) and no members of groups: the default one is all ranks{known}."
