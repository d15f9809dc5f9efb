"""Ranks: warm worlds for tests and scripts - a program in; its results, or the explanation of its end, out."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Self

from tpbed.harness.diagnose import diagnose
from tpbed.harness.findings import Finding
from tpbed.harness.report import explain, headline
from tpbed.harness.worlds import open_world
from tpbed.tp.world import RankProgram, World, WorldRun


class RanksFailed(AssertionError):
    """A program did not end well on every rank; the message is a headline and the explanation."""

    def __init__(self, message: str, findings: tuple[Finding, ...], run: WorldRun) -> None:
        super().__init__(message)
        self.findings, self.run = findings, run


class Ranks:
    """Worlds by kind and size, each opened at first use and kept warm until `close`."""

    def __init__(self, *, default_world: str = "sim") -> None:
        self._default, self._stack = default_world, ExitStack()
        self._worlds: dict[tuple[str, int], World] = {}

    def __call__(
        self, program: RankProgram, *, world_size: int, world: str | None = None, stall_after_s: float = 10.0
    ) -> tuple[Any, ...]:
        """Run `program` on every rank. Returns its results, by rank.

        Raises RanksFailed if a rank raised, died, hung, stalled, or met its peers in another collective than they.
        """
        run = self._world(world or self._default, world_size).run(program, stall_after_s=stall_after_s)
        findings = diagnose(run.ledgers, run.liveness)
        if findings:
            raise RanksFailed(f"{headline(findings)}\n{explain(findings, run)}", findings, run)
        return run.results

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all ranks; idempotent."""
        self._worlds.clear()
        self._stack.close()

    def _world(self, kind: str, world_size: int) -> World:
        if (kind, world_size) not in self._worlds:
            self._worlds[kind, world_size] = self._stack.enter_context(open_world(kind, world_size))
        return self._worlds[kind, world_size]
