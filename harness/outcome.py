"""simulate: any program of torch.distributed in one call - on simulated ranks of this process, with its verdict."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tpbed.harness.diagnose import diagnose
from tpbed.harness.findings import Finding
from tpbed.harness.report import explain
from tpbed.tp.schedule import Schedule
from tpbed.tp.simulated import SimulatedWorld
from tpbed.tp.world import RankProgram, WorldRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the ranks did and what is wrong with it; as text, the explanation that the command line prints."""

    findings: tuple[Finding, ...]
    run: WorldRun
    choices: tuple[int, ...]  # of the schedule: Replayed(choices) repeats this run

    @property
    def ok(self) -> bool:
        """No rank raised, died, hung, or met its peers in another collective than they."""
        return not self.findings

    def __str__(self) -> str:
        return explain(self.findings, self.run) if self.findings else f"ok: {len(self.run.ledgers)} ranks returned"


def simulate(
    program: RankProgram, *, world_size: int = 4, schedule: Schedule | None = None, device: str | torch.device = "cpu"
) -> Outcome:
    """Run `program(rank)` on `world_size` simulated ranks and say what it came to; errors of ranks are in the outcome.

    schedule, device: as SimulatedWorld takes them. Raises what SimulatedWorld.run raises.
    """
    with SimulatedWorld(world_size, schedule, device) as world:
        run = world.run(program)
    return Outcome(findings=diagnose(run.ledgers, run.liveness), run=run, choices=world.choices)
