"""`tpbed mutants`: the kill matrix, line by line as it is there, and what it says of the checks."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpbed.harness.bench_cli import AsJson
from tpbed.harness.choice import UsageError, matches
from tpbed.harness.console import Progress, print_json, telling, use_one_thread

if TYPE_CHECKING:  # torch is imported by the command that needs it, and not by `tpbed --help`
    from tpbed.harness.kills import Matrix, Row
    from tpbed.harness.real_kills import Confirmation

WORLDS = ("sim", "gloo")
NAME_WIDTH = 44


def mutants(
    patterns: Annotated[
        list[str] | None,
        typer.Argument(metavar="[GLOB]...", help="Names: head/scale-stale, 'topk/*', or topk for all top-ks."),
    ] = None,
    examples: Annotated[int, typer.Option(min=1, help="Drawn cases in which each mutant is planted.")] = 60,
    seed: Annotated[int, typer.Option(help="Of the examples.")] = 0,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes, which change nothing but the time; else one for each core.")
    ] = None,
    world: Annotated[
        str,
        typer.Option(metavar="sim|gloo", help="Where mutants must die; gloo: one example of each, after sim."),
    ] = "sim",
    as_json: AsJson = False,
) -> None:
    """Plant what is wrong on purpose in drawn cases, and say which check kills it: does every check see something?

    Mutants are selectors, top-ks, heads, rank programs, and diagnoses; each is wrong by one change.

    Exit status: 1 if a mutant survives, what is right is killed, or, of all mutants, a check kills none.
    """
    if world not in WORLDS:
        raise UsageError(f"unknown world {world!r}: give one of {', '.join(WORLDS)}.")
    began = time.monotonic()
    with telling() as progress:
        progress("loading torch")
        names = _chosen(patterns or [])
        matrix = _build(names, examples, seed, jobs or os.cpu_count() or 1, progress, as_json=as_json)
        confirmed = _confirm(matrix, world, examples, seed, progress)
    problems = list(_problems(matrix, confirmed, whole=not patterns))
    elapsed_s = round(time.monotonic() - began, 1)
    if as_json:
        print_json([*_json(matrix, confirmed), _summary(matrix, problems, elapsed_s)])
    else:
        print(*_lines(matrix, confirmed), *problems, _totals(matrix, elapsed_s), sep="\n")
    raise typer.Exit(1 if problems else 0)


def _chosen(patterns: Sequence[str]) -> list[str]:
    from tpbed.harness.kill_matrix import all_mutants

    known = all_mutants()
    for pattern in patterns:
        if not any(matches(name, pattern) for name in known):
            families = dict.fromkeys(name.partition("/")[0] for name in known)
            raise UsageError(f"no mutant matches {pattern!r}: give a name, a glob, or one of {', '.join(families)}.")
    return [name for name in known if not patterns or any(matches(name, pattern) for pattern in patterns)]


def _build(names: Sequence[str], examples: int, seed: int, jobs: int, progress: Progress, *, as_json: bool) -> Matrix:
    from tpbed.harness.kill_matrix import ALL_RIGHT, build_matrix

    use_one_thread()
    following = iter([*ALL_RIGHT[1:], *names])

    def show(row: Row) -> None:
        if as_json:
            print_json([{"type": "right" if row.name in ALL_RIGHT else "mutant", "world": "sim", **asdict(row)}])
        else:
            print(_line(row), flush=True)
        if name := next(following, ""):
            progress(f"trying {name}")

    progress(f"drawing {examples} examples, for {len(names)} mutants and {len(ALL_RIGHT)} controls")
    return build_matrix(names, examples=examples, seed=seed, jobs=jobs, on_row=show)


def _line(row: Row) -> str:
    share = f"{len(row.killed_in)}/{row.examples}"
    told = ", ".join(f"{check} {count}" for check, count in row.kills.items()) or "no check"
    return f"{row.name:<{NAME_WIDTH}} {share:>8}  {told}"


def _confirm(matrix: Matrix, world: str, examples: int, seed: int, progress: Progress) -> list[Confirmation]:
    if world == "sim":
        return []
    from tpbed.harness.real_kills import confirm

    return confirm(matrix.rows, world, examples=examples, seed=seed, on_progress=progress)


def _problems(matrix: Matrix, confirmed: Sequence[Confirmation], *, whole: bool) -> Iterator[str]:
    """What must not be, a line each: that a check kills nothing counts where all mutants were tried."""
    yield from (f"SURVIVES     {name}" for name in matrix.survivors)
    yield from (f"FALSE ALARM  {name} is right, and was killed" for name in matrix.false_alarms)
    yield from (f"IDLE         {check} kills no mutant" for check in matrix.idle_checks if whole)
    yield from (f"UNCONFIRMED  {_told(one)}" for one in confirmed if not one.confirmed)


def _told(one: Confirmation) -> str:
    here, there = (", ".join(kinds) or "no check" for kinds in (one.simulated, one.real))
    return f"{one.name}, example {one.example} at TP={one.world_size}: sim {here}; {one.world} {there}"


def _lines(matrix: Matrix, confirmed: Sequence[Confirmation]) -> Iterator[str]:
    yield "\nEach check, the mutants that it kills, and those that no other check kills"
    alone = matrix.killed_by_one
    for check, killed in matrix.by_check.items():
        only = [name for name, by in alone.items() if by == check]
        yield f"{check:<26} {len(killed):>4} {len(only):>4}  {', '.join(only)}".rstrip()
    if confirmed:
        yield f"\nOn real ranks, one example each: {sum(one.confirmed for one in confirmed)} of {len(confirmed)} killed"
        yield from (_told(one) for one in confirmed if one.confirmed)


def _totals(matrix: Matrix, elapsed_s: float) -> str:
    killed = len(matrix.rows) - len(matrix.survivors)
    return (
        f"{len(matrix.rows)} mutants: {killed} killed, {len(matrix.killed_by_one)} by one check only; "
        f"of {len(matrix.controls)} right things {len(matrix.false_alarms)} killed  ({elapsed_s:.1f} s)"
    )


def _json(matrix: Matrix, confirmed: Sequence[Confirmation]) -> Iterator[dict[str, Any]]:
    alone = matrix.killed_by_one
    for check, killed in matrix.by_check.items():
        only = [name for name, by in alone.items() if by == check]
        yield {"type": "check", "check": check, "kills": list(killed), "alone": only}
    yield from ({"type": "confirmation", "confirmed": one.confirmed, **asdict(one)} for one in confirmed)


def _summary(matrix: Matrix, problems: Sequence[str], elapsed_s: float) -> dict[str, Any]:
    return {
        "type": "summary",
        "mutants": len(matrix.rows),
        "survivors": list(matrix.survivors),
        "killed_by_one": len(matrix.killed_by_one),
        "false_alarms": list(matrix.false_alarms),
        "idle_checks": list(matrix.idle_checks),
        "problems": len(problems),
        "elapsed_s": elapsed_s,
    }
