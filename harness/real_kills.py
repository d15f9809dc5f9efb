"""confirm: mutants that were killed on simulated ranks, one example each, once more on real ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from tpbed.harness.kill_matrix import draw_plans, find_killers, planted
from tpbed.harness.kills import Row
from tpbed.harness.mutants import MUTANTS
from tpbed.harness.plan import Plan
from tpbed.harness.program import rank_program
from tpbed.harness.properties import Simulator
from tpbed.harness.record import RunRecord
from tpbed.harness.worlds import Progress, open_world
from tpbed.tp.world import World

LARGEST = 4  # ranks of a real world, where an example with so few is there


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """One example of a mutant on real ranks: the checks that killed it when simulated, and those that do there."""

    name: str
    world: str
    example: int  # its number, from 1
    world_size: int
    simulated: tuple[str, ...]
    real: tuple[str, ...]

    @property
    def confirmed(self) -> bool:
        """A check that killed it there kills it here."""
        return bool(set(self.simulated) & set(self.real))


def confirm(rows: Sequence[Row], world: str, *, examples: int, seed: int, on_progress: Progress) -> list[Confirmation]:
    """The first killing example of each mutant on real ranks, of those with few ranks if there are any."""
    drawn, simulator = draw_plans(examples, seed), Simulator()
    cases = [(row.name, number, _real(drawn[number - 1], row.name)) for row in rows if (number := _sample(row, drawn))]
    found = []
    with _RealRanks(world) as run:
        for name, number, plan in sorted(cases, key=lambda case: case[2].scenario.world_size):
            on_progress(f"{name}, example {number}, on {plan.scenario.world_size} ranks")
            here, there = (tuple(sorted(find_killers(plan, each))) for each in (simulator, run))
            size = plan.scenario.world_size
            found.append(
                Confirmation(name=name, world=world, example=number, world_size=size, simulated=here, real=there)
            )
    return found


def _sample(row: Row, drawn: Sequence[Plan]) -> int | None:
    """Not of a diagnosis, which runs nothing, nor of what only an order of turns can show."""
    if row.name not in MUTANTS or "gloo" not in MUTANTS[row.name].worlds:
        return None
    sizes = {number: planted(drawn[number - 1], MUTANTS[row.name]).scenario.world_size for number in row.killed_in}
    return min(sizes, key=lambda number: (sizes[number] > LARGEST, number), default=None)


def _real(plan: Plan, name: str) -> Plan:
    """As real ranks can run it: nobody decides who runs next."""
    return replace(planted(plan, MUTANTS[name]), schedule="")


class _RealRanks:
    """Runs plans on real ranks; one world is open at a time."""

    def __init__(self, world: str) -> None:
        self._kind = world
        self._world: World | None = None

    def __call__(self, plan: Plan) -> RunRecord:
        size = plan.scenario.world_size
        if self._world is None or self._world.world_size != size:
            self.close()
            self._world = open_world(self._kind, size)
        run = self._world.run(rank_program(plan), stall_after_s=plan.scenario.stall_after_s)
        return RunRecord.of(plan, run, elapsed_s=0.0)

    def close(self) -> None:
        world, self._world = self._world, None
        if world is not None:
            world.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
