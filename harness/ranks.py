"""Ranks: warm worlds for tests and scripts - a program in; its results, or the explanation of its end, out."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Literal, Self

from tpbed.harness.diagnose import diagnose
from tpbed.harness.explore import explore_schedules
from tpbed.harness.findings import Finding
from tpbed.harness.report import explain, headline
from tpbed.harness.schedules import ScheduleTextError, following
from tpbed.harness.worlds import open_world
from tpbed.tp.world import RankProgram, World, WorldRun

Schedules = int | Literal["all"]


class RanksFailed(AssertionError):
    """A program did not end well on every rank; the message is a headline and the explanation."""

    def __init__(self, message: str, findings: tuple[Finding, ...], run: WorldRun, schedule: str = "") -> None:
        super().__init__(message)
        self.findings, self.run = findings, run
        self.schedule = schedule  # under which a search found it


class UndecidedError(AssertionError):
    """A search of schedules came to no answer."""


class Ranks:
    """Worlds by kind and size, each opened at first use and kept warm until `close`."""

    def __init__(self, *, default_world: str = "sim") -> None:
        self._default, self._stack = default_world, ExitStack()
        self._worlds: dict[tuple[str, int], World] = {}

    def __call__(
        self,
        program: RankProgram,
        *,
        world_size: int,
        world: str | None = None,
        stall_after_s: float = 10.0,
        schedule: str = "",
        schedules: Schedules | None = None,
    ) -> tuple[Any, ...]:
        """Run `program` on every rank. Returns its results, by rank.

        schedule: who runs when, of simulated ranks: "0,1,1,0", "seed:17" or "round-robin".
        schedules: "all": simulated ranks take turns in every order first, by as few runs as that takes; a number: in
            so many seeded ones.
        Raises RanksFailed if a rank raised, died, hung, stalled, or met its peers in another collective than they: in
        any of these schedules, and then in the shortest such one. Raises UndecidedError if "all" are too many.
        """
        if schedules is not None:
            self._search(program, world_size, world, schedules)
        opened = self.world(world or self._default_for(schedule, schedules), world_size)
        with following(opened, schedule):
            run = opened.run(program, stall_after_s=stall_after_s)
        findings = diagnose(run.ledgers, run.liveness)
        if findings:
            raise RanksFailed(f"{headline(findings)}\n{explain(findings, run)}", findings, run)
        return run.results

    def _search(self, program: RankProgram, world_size: int, world: str | None, schedules: Schedules) -> None:
        if world not in (None, "sim"):
            raise ScheduleTextError(f"schedules={schedules!r} are searched in world='sim', not in {world!r}.")
        if schedules != "all" and (not isinstance(schedules, int) or schedules < 1):
            raise ScheduleTextError(f'schedules={schedules!r}: give "all", or how many seeded ones.')
        samples = None if schedules == "all" else schedules
        explored = explore_schedules(program, world_size, samples=samples)
        if explored.answer == "undecided":
            raise UndecidedError(explored.headline())
        if explored.run is not None:
            told = explored.told(f'schedule="{explored.schedule}" instead of schedules={schedules!r}')
            raise RanksFailed(told, explored.findings, explored.run, explored.schedule)

    def _default_for(self, *schedules: object) -> str:
        return "sim" if any(schedules) else self._default

    def world(self, kind: str, world_size: int) -> World:
        """The warm world of this kind and size."""
        if (kind, world_size) not in self._worlds:
            self._worlds[kind, world_size] = self._stack.enter_context(open_world(kind, world_size))
        return self._worlds[kind, world_size]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all ranks; idempotent."""
        self._worlds.clear()
        self._stack.close()
