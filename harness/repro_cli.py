"""`tpbed repro`: one file of plain torch that shows a case or a scenario under torchrun."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpbed.harness.choice import Changes, UsageError, choose_plans, read_faults

if TYPE_CHECKING:
    from tpbed.harness.plan import Plan


def repro(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE|NAME", help="A case file or the name of a scenario; with --fault, none: a healthy run."
        ),
    ] = None,
    fault: Annotated[
        list[str] | None, typer.Option("--fault", metavar="KIND@FIELD=VALUE,...", help="Add a fault, as for `run`.")
    ] = None,
    selector: Annotated[
        str, typer.Option(metavar="MODULE:FUNCTION", help="Copy this selector instead of the scenario's own.")
    ] = "",
    tp: Annotated[int | None, typer.Option("--tp", help="The ranks of a run that is only its faults.")] = None,
    seed: Annotated[int, typer.Option(help="Of every random choice of a scenario; a case has its own.")] = 0,
    out: Annotated[Path | None, typer.Option(help="The file to write; without it the text goes to stdout.")] = None,
) -> None:
    """Write one Python file that shows the same with torchrun and torch alone, for a report to others."""
    from tpbed.scenarios import CATALOGUE

    changes = Changes(faults=read_faults(fault or []), selector=selector)
    words = [] if target is None else [target]
    if not words and not changes.faults:
        raise UsageError("nothing to write: give a case file, the name of a scenario, or --fault.")
    plans = choose_plans(words, dict(CATALOGUE), seed=seed, tp=tp, changes=changes)
    if len(plans) > 1:
        raise UsageError(f"{target} names {len(plans)} scenarios, {plans[0].scenario.name} first: give one of them.")
    text = _text(plans[0], out)
    if out is None:
        print(text, end="")
        return
    _write(out, text)
    print(f"torchrun --nproc-per-node {plans[0].scenario.world_size} {out}", file=sys.stderr)


def _text(plan: Plan, out: Path | None) -> str:
    from tpbed.harness.repro import check_expressible, write_repro

    check_expressible(plan)
    return write_repro(plan, shows=_seen(plan), name=out.name if out else "FILE")


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written: {error.strerror}.") from error


def _seen(plan: Plan) -> str:
    """What the case shows on simulated ranks, if they can express it."""
    from tpbed.harness.report import render
    from tpbed.harness.runner import run_plan, worlds_of
    from tpbed.harness.worlds import open_world

    if "sim" not in worlds_of(plan):
        return ""
    with open_world("sim", plan.scenario.world_size) as world:
        verdict = run_plan(world, plan)
    lines = render(verdict, full=False).splitlines()[1:]
    return "\n".join(lines) or "no finding"
