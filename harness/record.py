"""RunRecord: what the ranks of one run reported, with the plan that they had; nothing in it is inferred."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from tpbed.harness.plan import Plan
from tpbed.harness.stored import load, save
from tpbed.tp.errors import TestbedError
from tpbed.tp.ledger import Ledger
from tpbed.tp.world import Liveness, WorldRun


class RecordError(TestbedError):
    """A file that is no run record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run: enough to judge it again without ranks, on any machine."""

    plan: Plan
    world: str
    ledgers: tuple[Ledger, ...]
    liveness: tuple[Liveness, ...]
    stuck: tuple[int, ...]
    proof_ms: float | None
    recovery_ms: float | None
    replaced: tuple[int, ...]
    elapsed_s: float
    torch_version: str
    error: str = ""  # of the test bed itself, with its traceback: nothing is proved then

    @classmethod
    def of(cls, plan: Plan, run: WorldRun, *, elapsed_s: float, error: str = "") -> RunRecord:
        """Put a plan and what a world saw of it together."""
        return cls(
            plan=plan,
            world=run.world,
            ledgers=run.ledgers,
            liveness=run.liveness,
            stuck=run.stuck,
            proof_ms=run.proof_ms,
            recovery_ms=run.recovery_ms,
            replaced=run.replaced,
            elapsed_s=elapsed_s,
            torch_version=torch.__version__,
            error=error,
        )


def save_record(record: RunRecord, path: Path) -> None:
    """Write a record as JSON (NaN and infinities as JavaScript writes them); parents are created."""
    save(_adapter(), record, path)


def load_record(path: Path) -> RunRecord:
    """Read what save_record wrote.

    Raises RecordError for a file that is missing, cut short, or not a record of this version.
    """
    record: RunRecord = load(
        _adapter(), path, noun="run record", advice="Give the record.json of a run.", error=RecordError
    )
    if wrong := _incoherence(record):
        raise RecordError(f"{path} is no whole run record: {wrong}. Run it again.")
    return record


def _incoherence(record: RunRecord) -> str:
    """Why it cannot be what the ranks of one run reported; empty if it can."""
    size = record.plan.scenario.world_size
    members = {rank for ledger in record.ledgers for ranks in ledger.groups.values() for rank in ranks}
    if [ledger.rank for ledger in record.ledgers] != list(range(size)):
        told = ", ".join(str(ledger.rank) for ledger in record.ledgers) or "no rank"
        return f"it has the ledgers of {told}, and world_size={size} needs one of each rank from 0 to {size - 1}"
    if len(record.liveness) != size:
        return f"it has the liveness of {len(record.liveness)} ranks, and world_size={size} needs that of each rank"
    if any(ledger.world_size != size for ledger in record.ledgers) or not members <= set(range(size)):
        return f"its ledgers tell of ranks that world_size={size} does not have"
    return ""


@cache
def _adapter() -> TypeAdapter[Any]:
    return TypeAdapter(RunRecord)
