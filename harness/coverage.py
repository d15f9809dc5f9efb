"""Coverage: which kinds of faults have struck, and where in a run; and which could."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from tpbed.harness.fault_oracle import UNFORESEEN, calls_of
from tpbed.harness.faults import (
    FIRED,
    ArrivalFault,
    CollectiveFault,
    Fault,
    Linger,
    Nudge,
    Spin,
    StepFault,
    Unmasked,
    WrongScale,
)
from tpbed.harness.record import RunRecord
from tpbed.harness.scenario import Scenario, WorldName

Place = Literal["start", "first", "between", "last", "past", "end"]
PLACES: dict[Place, str] = {
    "start": "as the rank starts",
    "first": "first collective or step",
    "between": "one between",
    "last": "last one",
    "past": "past the last",
    "end": "in the teardown",
}


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """A kind of fault, and where in a run it is planned. At a collective past the last it must not strike."""

    kind: str  # as `--fault` writes it
    place: Place


def cell_of(fault: Fault, scenario: Scenario) -> Cell:
    """The cell of a fault in a scenario of a selector that is right by contract."""
    return Cell(fault.kind, _place(fault, scenario))


def _place(fault: Any, scenario: Scenario) -> Place:
    if isinstance(fault, Linger):
        return "end"
    if isinstance(fault, get_args(CollectiveFault)):
        return _along(fault.seq - 1, len(calls_of(scenario)))
    return _along(fault.step, scenario.steps) if isinstance(fault, get_args(StepFault)) else "start"


def _along(index: int, count: int) -> Place:
    if index >= count:
        return "past"
    if index == 0:
        return "first"
    return "last" if index == count - 1 else "between"


def covered(record: RunRecord) -> list[Cell]:
    """The cells of a run's faults: those that struck, and those that were planned where nothing is to be struck."""
    scenario = record.plan.scenario
    fired = {mark.value for ledger in record.ledgers for mark in ledger.marks if mark.name == FIRED}
    cells = ((index, cell_of(fault, scenario)) for index, fault in enumerate(scenario.faults))
    return [cell for index, cell in cells if index in fired or cell.place == "past"]


def reachable(selectors: Sequence[str], world_sizes: Sequence[int], world: WorldName) -> tuple[Cell, ...]:
    """All cells that plans of these selectors and sizes can cover in a world."""
    kinds = [kind for kind in get_args(Fault) if _is_reachable(kind, selectors, world_sizes, world)]
    return tuple(Cell(_word(kind), place) for kind in kinds for place in _places(kind, max(world_sizes)))


def not_drawn() -> list[str]:
    """The kinds of faults that no search draws, each with the reason."""
    return [f"{_word(kind)}: {why}" for kind, why in UNFORESEEN.items()]


def _word(kind: Any) -> str:
    return next(str(field.default) for field in fields(kind) if field.name == "kind")


def _is_reachable(kind: Any, selectors: Sequence[str], world_sizes: Sequence[int], world: WorldName) -> bool:
    if kind in UNFORESEEN:
        return False
    if kind in get_args(ArrivalFault):
        return world != "sim"  # simulated ranks are in their group from the start
    if kind is WrongScale:
        return max(world_sizes) > 1
    return kind not in (Nudge, Spin, Unmasked) or set(selectors) != {"full-gather"}  # which never calls the top-k


def _places(kind: Any, largest: int) -> Iterator[Place]:
    if kind is Linger:
        yield "end"
    elif kind in get_args(CollectiveFault):
        yield from ("first", "between", "last") if largest > 1 else ()
        yield "past"
    elif kind in get_args(StepFault):
        yield from ("first", "between", "last")
    else:
        yield "start"
