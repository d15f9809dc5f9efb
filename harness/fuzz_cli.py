"""`tpbed fuzz`: what it is asked, what it says meanwhile, and how it tells what it has found."""

from __future__ import annotations

import os
import shlex
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from tpbed.harness.bench_cli import AsJson
from tpbed.harness.choice import UsageError
from tpbed.harness.console import WIDTH, Progress, print_json, print_table, telling, use_one_thread
from tpbed.harness.scenario import WorldName

if TYPE_CHECKING:  # torch and hypothesis are imported by the command that needs them, and not by `tpbed --help`
    from rich.table import Table

    from tpbed.harness.fuzz import Found, Report, Search, Tally

SECONDS = 60.0  # where nothing else bounds a search
EVERY_S = 2.0  # between two lines of progress


def fuzz(
    seconds: Annotated[float | None, typer.Option(help="Search for so long (60, unless --examples is given).")] = None,
    examples: Annotated[int | None, typer.Option(help="Search in so many examples; with --seconds, at most.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of all that is drawn: the same one finds the same.")] = 0,
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0: one for each core.")] = 0,
    selector: Annotated[
        str, typer.Option(metavar="NAME,...", help="Selectors to draw: package.module:function, or names of ours.")
    ] = "",
    topk: Annotated[str, typer.Option(metavar="NAME,...", help="Top-ks to draw: canonical, torch, ...")] = "",
    tp: Annotated[str, typer.Option("--tp", metavar="N,...", help="World sizes to draw.")] = "",
    world: Annotated[str, typer.Option(metavar="sim|gloo|nccl", help="Where ranks live.")] = "sim",
    faults: Annotated[
        bool, typer.Option(help="Draw runs with faults, too, where it is known what they come to.")
    ] = True,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the last search with this seed ended.")] = False,
    database: Annotated[
        Path, typer.Option(help="The folder of examples that were found; they are tried first.")
    ] = Path(".hypothesis/tpbed"),
    out: Annotated[Path, typer.Option(help="The folder for case files.")] = Path("runs/fuzz"),
    confirm: Annotated[bool, typer.Option(help="Run what is found over Ray and gloo, too.")] = True,
    coverage: Annotated[
        bool,
        typer.Option("--coverage", help="Print which faults struck where; exit status 1 if any could and did not."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Search for a run that breaks a property: ranks agree, ids are right and in order, faults are diagnosed, ...

    What is found is shrunk, told in sentences, and written to a case file that `tpbed run` and pytest replay.
    Exit status: 0 nothing found, 1 found, 2 usage.
    """
    with telling() as progress:
        progress("loading torch")
        search = _search(selector, topk, tp, world, seed, faults, database)
        if coverage and not search.reachable():
            raise UsageError("--coverage counts faults, and none are drawn: draw them, with a selector of tpbed's own.")
        report = _run(search, seconds, examples, jobs, resume, progress)
        files = {found.name: _saved(found, out) for found in report.tally.found}
        confirmed = {name: _confirmed(file, progress) for name, file in files.items()} if confirm else {}
    if as_json:
        print_json([_plain(report, files, confirmed)])
    else:
        _print(report, files, confirmed, coverage)
    raise typer.Exit(1 if report.tally.found or (coverage and report.empty_cells()) else 0)


def _search(selector: str, topk: str, tp: str, world: str, seed: int, faults: bool, database: Path) -> Search:
    from tpbed.harness.fuzz import Search

    if world not in get_args(WorldName):
        raise UsageError(f"unknown world {world!r}: give one of {', '.join(get_args(WorldName))}.")
    given: dict[str, Any] = {
        "selectors": tuple(selector.split(",")) if selector else None,
        "topks": tuple(topk.split(",")) if topk else None,
        "world_sizes": _sizes(tp) if tp else None,
    }
    chosen = {name: value for name, value in given.items() if value}
    return Search(**chosen, world=cast("WorldName", world), seed=seed, faults=faults, database=database)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise UsageError(f"--tp {text}: give whole numbers with commas between them, such as 2,4,8.") from None


def _run(
    search: Search, seconds: float | None, examples: int | None, jobs: int, resume: bool, progress: Progress
) -> Report:
    from tpbed.harness.fuzz import fuzz, resumed

    use_one_thread()
    bound = seconds if seconds is not None else SECONDS if examples is None else inf
    return fuzz(
        search,
        seconds=bound,
        examples=examples,
        jobs=jobs or (len(os.sched_getaffinity(0)) if search.world == "sim" else 1),
        first=resumed(search) if resume else 0,
        on_tally=_teller(search, progress),
    )


def _teller(search: Search, progress: Progress) -> Callable[[Tally], None]:
    """Says how it goes, now and then."""
    began, said = time.monotonic(), [0.0]

    def tell(tally: Tally) -> None:
        now = time.monotonic()
        if now - said[0] >= EVERY_S or tally.found:
            said[0] = now
            progress(f"{_counted(tally, now - began)}, {_kinds(search, tally)}")

    return tell


def _counted(tally: Tally, elapsed_s: float) -> str:
    rate = tally.examples / max(elapsed_s, 1e-9)
    return f"{tally.examples:,} examples ({tally.runs:,} runs) in {elapsed_s:.0f} s, {rate:.0f} a second"


def _kinds(search: Search, tally: Tally) -> str:
    cells = search.reachable()
    if not cells:
        return "without faults"
    kinds = len({cell.kind for cell in tally.cells})
    places = sum(cell in tally.cells for cell in cells)
    return f"{kinds} of {len({cell.kind for cell in cells})} kinds of faults in {places} of {len(cells)} places"


def _saved(found: Found, out: Path) -> Path:
    from tpbed.harness.case import save_case

    path = out / f"{found.name}.tpbed.json"
    save_case(found.case(), path)
    return path


def _confirmed(file: Path, progress: Progress) -> str:
    """What a run of the case over gloo says; Ray may be missing, or unable to start here."""
    from tpbed.harness.case import load_case
    from tpbed.harness.runner import run_plans

    plan = replace(load_case(file).plan, schedule="")
    try:
        session = run_plans([plan], world="gloo", on_progress=progress)
    except Exception as error:  # noqa: BLE001 - whatever keeps Ray from starting, what was found stays found
        return f"not tried: Ray did not start ({' '.join(str(error).split())})"
    if not session.runs:
        return f"not tried: {session.not_run[0].why}"
    status = session.runs[0].verdict.status
    return {"FAIL": "yes, it fails there, too", "PASS": "no, it passes there"}.get(status, f"it is {status} there")


def _print(report: Report, files: dict[Any, Path], confirmed: dict[Any, str], coverage: bool) -> None:
    for found in report.tally.found:
        print("\n".join(_told(found, files[found.name], confirmed.get(found.name, ""), report.search)))
    print(_summary(report))
    if report.recalled:
        print(
            f"An earlier search found it: nothing new is drawn until it holds, or after rm -r {report.search.folder()}"
        )
    if coverage and not report.recalled:
        from tpbed.harness.coverage import not_drawn

        print_table(coverage_table(report))
        print("Not drawn:", *not_drawn(), sep="\n  ")
        empty = report.empty_cells()
        if empty:
            print(f"{len(empty)} cells are empty: {', '.join(f'{cell.kind} {cell.place}' for cell in empty)}.")


def _told(found: Found, file: Path, confirmed: str, search: Search) -> Iterator[str]:
    from tpbed.harness.portrait import describe_plan

    yield f"FOUND  {found.name} does not hold. The smallest example:"
    for sentence in describe_plan(found.plan):
        yield from _wrapped("", sentence)
    yield from _wrapped("expected", found.expected)
    yield from _wrapped("came", found.text)
    yield from _wrapped("on gloo", confirmed) if confirmed else ()
    yield from _wrapped("case", str(file))
    yield from _wrapped("again", shlex.join(["tpbed", "run", str(file), "--world", search.world]))


def _wrapped(label: str, text: str) -> list[str]:
    indent = " " * 10
    return textwrap.wrap(" ".join(text.split()), WIDTH, initial_indent=f"{label:<10}", subsequent_indent=indent)


def _summary(report: Report) -> str:
    tally = report.tally
    found = f"{len(tally.found)} found" if tally.found else "nothing found"
    busy = f"{tally.examples / max(tally.busy_s, 1e-9):.0f} a second and process"
    return f"{found}: {_counted(tally, report.elapsed_s)}, {busy}; {_kinds(report.search, tally)}"


def coverage_table(report: Report) -> Table:
    """How often each kind of fault struck at each place; a dash where it cannot."""
    from rich.table import Table

    from tpbed.harness.coverage import PLACES, Cell

    sizes = ", ".join(map(str, report.search.world_sizes))
    table = Table("fault", title=f"Faults that struck, by place; world {report.search.world}, TP={sizes}")
    for heading in PLACES.values():
        table.add_column(heading, justify="right")
    cells = report.search.reachable()
    for kind in dict.fromkeys(cell.kind for cell in cells):
        row = (Cell(kind, place) for place in PLACES)
        table.add_row(kind, *(f"{report.tally.cells[cell]:,}" if cell in cells else "-" for cell in row))
    return table


def _plain(report: Report, files: dict[Any, Path], confirmed: dict[Any, str]) -> dict[str, Any]:
    from tpbed.harness.portrait import describe_plan

    tally = report.tally
    return {
        "type": "fuzz",
        "world": report.search.world,
        "seed": report.search.seed,
        "examples": tally.examples,
        "runs": tally.runs,
        "recalled": report.recalled,
        "elapsed_s": round(report.elapsed_s, 3),
        "busy_s": round(tally.busy_s, 3),
        "found": [
            {
                "property": one.name,
                "example": describe_plan(one.plan),
                "expected": one.expected,
                "came": one.text,
                "case": str(files[one.name]),
                "on_gloo": confirmed.get(one.name),
            }
            for one in tally.found
        ],
        "covered": [{"fault": cell.kind, "place": cell.place, "times": n} for cell, n in sorted(tally.cells.items())],
        "empty": [{"fault": cell.kind, "place": cell.place} for cell in report.empty_cells()],
    }
