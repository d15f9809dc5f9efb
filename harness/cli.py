"""The command line: arguments in, exit status out; all that prints but the other *_cli.py files."""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from importlib import metadata
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Self, cast, get_args

import typer

from tpbed.harness import bench_cli, fuzz_cli, mutants_cli, neartie_cli, repro_cli
from tpbed.harness.choice import (
    Changes,
    UsageError,
    choose_plans,
    is_case_file,
    of_world_size,
    read_case,
    read_faults,
    select,
)
from tpbed.harness.console import print_json
from tpbed.harness.faults import describe
from tpbed.harness.scenario import KINDS, Kind, Scenario, WorldName
from tpbed.tp.errors import TestbedError

if TYPE_CHECKING:  # torch and Ray are imported by the commands that need them, and not by `tpbed list`
    from rich.console import Console
    from rich.status import Status as LiveLine

    from tpbed.harness.explore import Find
    from tpbed.harness.runner import Choice, Run, Session, WorldChoice
    from tpbed.harness.verdict import Status
    from tpbed.harness.worlds import Placement
    from tpbed.tp.world import RankProgram

_STARTED = time.monotonic()
USAGE, UNDECIDED, CLOSED_PIPE = 2, 3, 141
STATUSES: dict[str, Status] = {"passed": "PASS", "failed": "FAIL", "undecided": "UNDECIDED"}
WORLD_CHOICES = ("auto", *get_args(WorldName))
PLACEMENTS = ("pack", "spread")
COLOURS = {"PASS": "green", "FAIL": "bold red", "UNDECIDED": "bold yellow"}
NAME_WIDTH = 16
MAX_NAMES = 8  # of scenarios that were not run for the same reason

app = typer.Typer(
    name="tpbed",
    help="Runs tensor-parallel rank programs under faults and says which hang, which rank caused it, where and why.",
    epilog="Exit status: 0 all passed, 1 some failed, 2 usage, 3 some undecided and none failed, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(bench_cli.app, name="bench")
app.command()(neartie_cli.neartie)
app.command()(mutants_cli.mutants)
app.command()(repro_cli.repro)
app.command()(fuzz_cli.fuzz)


def main(arguments: list[str] | None = None) -> None:
    """The entry point; always raises SystemExit: 2 with one line on stderr for what was asked for wrongly.

    arguments: None for those of the process.
    """
    try:
        _run_app(arguments)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # which typer makes a status 1 of
            _hang_up()
        raise
    except BrokenPipeError:
        _hang_up()
    except TestbedError as error:
        print(f"tpbed: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(USAGE)
    except Exception:  # noqa: BLE001 - a bug of tpbed: Python's own status 1 would read as FAIL
        traceback.print_exc()
        sys.exit(UNDECIDED)


def _run_app(arguments: list[str] | None) -> None:
    try:
        app(arguments, prog_name="tpbed")
    finally:
        sys.stdout.flush()


def _hang_up() -> NoReturn:
    """Who read our output has gone, as `head` does: end without a word, like a program that SIGPIPE has killed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python flushes when it ends
    sys.exit(CLOSED_PIPE)


Patterns = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[GLOB]...", help="Names of scenarios: hang/one-rank-raises, 'hang/*', or hang for all of hang/."
    ),
]
Targets = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[GLOB|FILE]...", help="Names of scenarios, as for `tpbed list`, and case files, which end in .json."
    ),
]
FaultTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--fault",
        metavar="KIND@FIELD=VALUE,...",
        help="Add a fault, as reports write it: raise@rank=2,seq=3 or delay@rank=0,seq=1,ms=50. Repeat it for more. "
        "Nothing is expected then: what is found is told, and exit status 1. Without a name: on a healthy run of --tp; "
        "of those that a name means, on those that have the rank.",
    ),
]
SelectorName = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION",
        help="The selector to run instead of the scenarios' own: package.module:function, or the name of one of ours. "
        "Nothing is expected then. Without a name: in all scenarios that a right selector passes.",
    ),
]
ScheduleText = Annotated[
    str, typer.Option(metavar="WORD", help="Who runs when, of simulated ranks: 0,1,1,0, seed:17 or round-robin.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one value a line.")]


@app.command("list")
def list_scenarios(
    patterns: Patterns = None,
    kind: Annotated[
        str | None,
        typer.Option(
            help="Only those that expect this finding (hang, mismatch, ...; none), or this kind of trouble (0-10)."
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(help="Only those that show a public report with this in its name: sglang, sglang#35496."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the scenarios: name, world size, expected findings, worlds, claim."""
    scenarios = _of_source(_of_kind(select(load_catalogue(), patterns or []), kind), source)
    if as_json:
        print_json([_told(scenario) for scenario in scenarios])
        return
    cells = [_cells(scenario) for scenario in scenarios]
    widths = [max(len(cell[column]) for cell in cells) for column in range(4)]
    for cell in cells:
        line = "  ".join([*(text.ljust(width) for text, width in zip(cell, widths, strict=False)), cell[4]])
        print(line if not sys.stdout.isatty() else line[: shutil.get_terminal_size().columns])


@app.command()
def show(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="GLOB|FILE...", help="Names of scenarios, as for `tpbed list`, and case files, which end in .json."
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Show all that scenarios and cases say: what is run, which faults strike, and what must be found."""
    told = [_told_case(name) for name in names if is_case_file(name)]
    patterns = [name for name in names if not is_case_file(name)]
    told += [_told(scenario) for scenario in (select(load_catalogue(), patterns) if patterns else [])]
    if as_json:
        print_json(told)
        return
    print("\n\n".join("\n".join(_lines_of(one)) for one in told))


def _told_case(name: str) -> dict[str, Any]:
    case = read_case(name)
    plan = case.plan
    return {"about": case.about, "seed": plan.seed, **_told(plan.scenario), "schedule": plan.schedule}


def _lines_of(told: dict[str, Any]) -> Iterator[str]:
    for key, value in told.items():
        entries = value if isinstance(value, list) else [value]
        for number, entry in enumerate(["none"] if value in (None, "", []) else entries):
            yield f"{key if number == 0 else '':<{NAME_WIDTH}}  {entry}"


@app.command()
def run(
    targets: Targets = None,
    fault: FaultTexts = None,
    selector: SelectorName = None,
    world: Annotated[
        str,
        typer.Option(metavar="auto|sim|gloo|nccl", help="Where ranks live; auto: nccl if it has the GPUs, else gloo."),
    ] = "auto",
    tp: Annotated[int | None, typer.Option("--tp", help="Only the scenarios with this world size.")] = None,
    seed: Annotated[int, typer.Option(help="Of every random choice in a run.")] = 0,
    as_json: AsJson = False,
    junit: Annotated[Path | None, typer.Option(help="Write the verdicts as JUnit XML to this file.")] = None,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="Save every record, not only of runs that did not pass; stuck ranks with native stacks (py-spy).",
        ),
    ] = False,
    out: Annotated[Path, typer.Option(help="The folder where records are saved.")] = Path("runs"),
    ray_address: Annotated[
        str | None, typer.Option(help="The Ray cluster to use; else that of RAY_ADDRESS, else one is started here.")
    ] = None,
    placement: Annotated[
        str, typer.Option(metavar="pack|spread", help="On a cluster: ranks on as few nodes as can be, or over as many.")
    ] = "pack",
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="Stop after the first run that does not pass.")
    ] = False,
    schedule: ScheduleText = "",
) -> None:
    """Run scenarios and cases, and judge what the ranks did."""
    if world not in WORLD_CHOICES:
        raise UsageError(f"unknown world {world!r}: give one of {', '.join(WORLD_CHOICES)}.")
    if schedule and world not in ("auto", "sim"):
        raise UsageError(f"nobody decides who runs next in --world {world}: --schedule needs --world sim.")
    if placement not in PLACEMENTS:
        raise UsageError(f"unknown placement {placement!r}: give one of {', '.join(PLACEMENTS)}.")
    if selector == "":
        raise UsageError("--selector names nothing: give package.module:function, or leave it out.")
    changes = Changes(faults=read_faults(fault or []), selector=selector or "")
    plans = choose_plans(targets or [], load_catalogue(), seed=seed, schedule=schedule, tp=tp, changes=changes)
    _check_paths(junit, out)
    with _Screen(as_json=as_json) as screen:
        screen.progress("loading torch")
        from tpbed.harness.inject import check_topks
        from tpbed.harness.runner import Evidence, choose_world, run_plans
        from tpbed.harness.selectors import check_selectors

        check_selectors(plan.scenario.selector for plan in plans)
        for plan in plans:
            check_topks(plan.scenario)
        _check_schedule(schedule, [plan.scenario.world_size for plan in plans])
        choice = choose_world(cast("WorldChoice", world), plans)
        screen.progress(f"world {choice.world}: {choice.why}", stays=True)
        session = run_plans(
            plans,
            world=choice.world,
            ray_address=ray_address,
            placement=cast("Placement", placement),
            evidence=Evidence(out=out, keep=keep),
            fail_fast=fail_fast,
            on_progress=screen.progress,
            on_run=screen.result,
        )
    screen.summary(session, choice)
    if junit:
        junit.write_text(_junit(session), encoding="utf-8")
    raise typer.Exit(session.exit_status)


@app.command()
def explore(
    targets: Annotated[
        list[str],
        typer.Argument(metavar="TARGET...", help="Scenarios, as `run` takes them; or package.module:function."),
    ],
    tp: Annotated[int | None, typer.Option("--tp", help="World size: 2 for a function; else only these.")] = None,
    max_runs: Annotated[int, typer.Option(help="Give up after so many runs.")] = 10_000,
    draw: Annotated[
        int | None, typer.Option("--random", metavar="N", help="Run N seeded schedules instead of searching all.")
    ] = None,
    patience: Annotated[int, typer.Option(help="Questions in vain before a rank lets the others go first.")] = 2,
    seed: Annotated[int, typer.Option(help="Of what scenarios draw; not of the schedules.")] = 0,
    schedule: ScheduleText = "",
    as_json: AsJson = False,
) -> None:
    """Search every order in which simulated ranks can take turns for a hang or another finding; else say that none is.

    Exit status: 0 none has one, 1 the shortest that has one is told, 3 there are more than --max-runs can tell.
    """
    programs = [program for target in targets for program in _programs(target, tp, seed)]
    _check_schedule(schedule, [size for _, size, _, _ in programs])
    import torch

    from tpbed.harness.explore import EXIT_STATUS, explore_schedules, replay

    torch.set_num_threads(1)
    answers = []
    for target, size, (program, find), again in programs:
        explored = (
            replay(program, size, schedule, target=target, find=find)
            if schedule
            else explore_schedules(
                program, size, target=target, find=find, max_runs=max_runs, patience=patience, samples=draw
            )
        )
        answers.append(explored.answer)
        line = f"{again} --schedule {explored.schedule}" if explored.schedule else ""
        print_json([explored.to_json(line)]) if as_json else print(explored.told(line), flush=True)
    raise typer.Exit(next((EXIT_STATUS[each] for each in ("found", "undecided") if each in answers), 0))


@app.command()
def judge(
    path: Annotated[
        Path, typer.Argument(metavar="RECORD", help="The record.json of a run, or the folder that holds it.")
    ],
    as_json: AsJson = False,
) -> None:
    """Judge the stored record of a run again, without ranks."""
    from tpbed.harness.record import load_record
    from tpbed.harness.report import render, to_json
    from tpbed.harness.runner import Run, Session, judge_safely

    path = path / "record.json" if path.is_dir() else path
    verdict = judge_safely(load_record(path))
    if as_json:
        print_json([to_json(verdict, evidence=path)])
    else:
        print(render(verdict, evidence=path, full=True))
    raise typer.Exit(Session(runs=(Run(verdict=verdict),), not_run=()).exit_status)


@app.command()
def flight(
    dumps: Annotated[
        list[Path],
        typer.Argument(
            metavar="DUMP...",
            help="Flight Recorder dumps of a run, pickles or JSON, one a rank, whose names end with its number "
            "(nccl_trace_rank_3); or the folder that holds them.",
        ),
    ],
    tp: Annotated[
        int | None, typer.Option("--tp", min=1, help="Ranks of the run: what the dumps name, if not given.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Diagnose the Flight Recorder dumps that PyTorch wrote of a run, NCCL or gloo, without ranks.

    Exit status: 0 nothing is wrong, 1 found, 3 the dumps cannot tell.
    """
    from tpbed.harness.flight import EXIT_STATUS, read_report

    report = read_report(dumps, tp)
    print_json([report.to_json()]) if as_json else print(report)
    raise typer.Exit(EXIT_STATUS[report.answer])


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Say what this machine can run, what is missing, and what to do; exit status 1 if sim or gloo cannot run."""
    from tpbed.harness.doctor import examine, largest_worlds, to_json

    facts = examine()
    largest = largest_worlds(facts)
    if as_json:
        print_json([to_json(facts)])
    else:
        for fact in facts:
            print(f"{fact.state:<5} {fact.name:<{NAME_WIDTH}} {fact.found}")
            if fact.remedy:
                print(f"{'':<6}{'':<{NAME_WIDTH}} {fact.remedy}")
        print("worlds " + ", ".join(f"{name}: {f'up to {n} ranks' if n else 'no'}" for name, n in largest.items()))
    raise typer.Exit(0 if largest["sim"] and largest["gloo"] else 1)


@app.command()
def version(as_json: AsJson = False) -> None:
    """Print the versions of tpbed and of what it runs on."""
    versions = {package: _version_of(package) for package in ("tpbed", "torch", "ray", "greenlet")}
    versions["Python"] = sys.version.split()[0]
    if as_json:
        print_json([versions])
        return
    for name, number in versions.items():
        print(f"{name} {number}")


def load_catalogue() -> dict[str, Scenario]:
    """The catalogue, by name."""
    from tpbed.scenarios import CATALOGUE

    return dict(CATALOGUE)


def _of_kind(scenarios: list[Scenario], kind: str | None) -> list[Scenario]:
    if kind is None:
        return scenarios
    allowed = ("none", *get_args(Kind), *map(str, KINDS))
    if kind not in allowed:
        raise UsageError(f"unknown kind {kind!r}: give one of {', '.join(allowed)}.")
    found = [scenario for scenario in scenarios if kind == str(scenario.kind) or kind in _expected_kinds(scenario)]
    if not found:
        has = {name for scenario in scenarios for name in [str(scenario.kind), *_expected_kinds(scenario)]}
        there = [name for name in allowed if name in has]
        raise UsageError(f"no selected scenario is of kind {kind!r}: there are {', '.join(there)}.")
    return found


def _of_source(scenarios: list[Scenario], source: str | None) -> list[Scenario]:
    found = [scenario for scenario in scenarios if source is None or source in scenario.source]
    if not found:
        from tpbed.scenarios.field import OUTSIDE

        why = [f"{report} is outside: {reason}" for report, reason in OUTSIDE.items() if source and source in report]
        raise UsageError(" ".join([f"no selected scenario shows a report like {source!r}.", *why]))
    return found


def _check_paths(junit: Path | None, out: Path) -> None:
    """Before anything is run: what is written at the end must have a place."""
    if junit and (junit.is_dir() or not junit.parent.is_dir()):
        raise UsageError(f"--junit {junit} cannot be written: give a file in a folder that exists.")
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file: give a folder, which is made if need be.")


def _check_schedule(text: str, world_sizes: Iterable[int]) -> None:
    from tpbed.harness.schedules import check_schedule

    for world_size in world_sizes:
        check_schedule(text, world_size)


def _programs(target: str, tp: int | None, seed: int) -> Iterator[tuple[str, int, tuple[RankProgram, Find], str]]:
    """What a target names: its name, world size, program with what to look for, and the command that replays it."""
    from tpbed.harness.explore import find_in_ledgers, scenario_program

    if ":" in target:
        size = 2 if tp is None else tp
        yield target, size, (_function(target), find_in_ledgers), f"tpbed explore {target} --tp {size}"
        return
    seeded = f" --seed {seed}" if seed else ""
    for scenario in of_world_size(select(load_catalogue(), [target]), tp):
        found = scenario_program(scenario, seed=seed)
        yield scenario.name, scenario.world_size, found, f"tpbed run {scenario.name}{seeded}"


def _function(target: str) -> RankProgram:
    """A rank program by `package.module:function`."""
    from tpbed.harness.functions import find_function

    function = find_function(target, is_no="is no function of a rank")
    try:
        inspect.signature(function).bind(0)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{target} is no function of a rank ({error}): give one that takes the rank.") from error
    return cast("RankProgram", function)


def _expected_kinds(scenario: Scenario) -> list[str]:
    return list(dict.fromkeys(one.kind for one in scenario.expect)) or ["none"]


def _cells(scenario: Scenario) -> tuple[str, ...]:
    kinds, worlds = ",".join(_expected_kinds(scenario)), ",".join(scenario.worlds)
    return scenario.name, str(scenario.world_size), kinds, worlds, scenario.claim


def _told(scenario: Scenario) -> dict[str, Any]:
    """All fields of a scenario as text, numbers and lists of them."""
    from tpbed.harness.report import describe_expected

    told = {name: getattr(scenario, name) for name in scenario.__dataclass_fields__}
    listed = {name: list(value) for name, value in told.items() if isinstance(value, tuple)}
    told_otherwise = {
        "pad_fill": scenario.pad_fill if isfinite(scenario.pad_fill) else str(scenario.pad_fill),
        "kind": f"{scenario.kind}: {KINDS.get(scenario.kind, 'not named')}",
        "overwrites": [f"row {one.row}, token {one.token_id}: {one.value}" for one in scenario.overwrites],
        "faults": [describe(fault) for fault in scenario.faults],
        "expect": [describe_expected(one) for one in scenario.expect],
    }
    return {**told, **listed, **told_otherwise}


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _junit(session: Session) -> str:
    from tpbed.harness.report import to_junit

    return to_junit([run.verdict for run in session.runs], [(one.scenario.name, one.why) for one in session.not_run])


class _Screen:
    """What is seen while scenarios run: results on stdout, progress on stderr, or on a terminal as one live line."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._console: Console | None = None
        self._status: LiveLine | None = None
        self._first_s: float | None = None
        if sys.stdout.isatty() and sys.stderr.isatty() and not as_json:
            from rich.console import Console

            self._console = Console()
            self._status = self._console.status("")

    def __enter__(self) -> Self:
        if self._status:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status:
            self._status.stop()

    def progress(self, message: str, *, stays: bool = False) -> None:
        """Something begins; or, where it stays, a word on what is done."""
        if not self._console or not self._status:
            print(message if stays else f"{message} ...", file=sys.stderr, flush=True)
            return
        from rich.text import Text

        if stays:
            self._console.print(Text(message), soft_wrap=True)
        else:
            self._status.update(Text(message))

    def result(self, run: Run) -> None:
        """A scenario has its verdict."""
        from tpbed.harness.report import render, to_json

        if self._first_s is None:
            self._first_s = time.monotonic() - _STARTED
        if self._as_json:
            print_json([to_json(run.verdict, evidence=run.evidence)])
        else:
            self._print(render(run.verdict, evidence=run.evidence), run.verdict.status)

    def _print(self, text: str, status: str) -> None:
        if not self._console:
            print(text, flush=True)
            return
        from rich.text import Text

        coloured = Text(text)
        coloured.stylize(COLOURS[status], 0, len(status))
        self._console.print(coloured, soft_wrap=True)

    def summary(self, session: Session, choice: Choice) -> None:
        """All is over: what was not run, what did not pass, and the counts as the last line."""
        from tpbed.harness.runner import WORLD_NAMES

        world, elapsed_s = WORLD_NAMES[choice.world], time.monotonic() - _STARTED
        if self._as_json:
            print_json([self._summary_json(session, world, elapsed_s)])
            return
        for line in _recap(session):
            print(line)
        first = f", first verdict after {self._first_s:.1f} s" if self._first_s is not None else ""
        print(f"{_counts(session)}  ({world}, {elapsed_s:.1f} s{first})")

    def _summary_json(self, session: Session, world: str, elapsed_s: float) -> dict[str, Any]:
        return {
            "type": "summary",
            "scenarios": len(session.runs),
            **{name: session.count(status) for name, status in STATUSES.items()},
            "not_run": [{"scenario": one.scenario.name, "why": one.why} for one in session.not_run],
            "troubles": list(session.troubles),
            "interrupted": session.interrupted,
            "world": world,
            "elapsed_s": round(elapsed_s, 3),
            "first_verdict_s": None if self._first_s is None else round(self._first_s, 3),
            "exit_status": session.exit_status,
        }


def _recap(session: Session) -> Iterator[str]:
    """What needs an eye, in one line each, since reports may have scrolled away."""
    from tpbed.harness.report import row

    by_reason: dict[str, list[str]] = {}
    for one in session.not_run:
        by_reason.setdefault(one.why, []).append(one.scenario.name)
    for why, names in by_reason.items():
        if len(names) > MAX_NAMES:
            names = [f"{len(names)} scenarios, {names[0]} to {names[-1]}"]
        yield from (f"NOT RUN  {name}  {why}" for name in names)
    if len(session.runs) > 1:
        yield from (row(run.verdict) for run in session.runs if run.verdict.status != "PASS")
    yield from (f"TROUBLE  {trouble}" for trouble in session.troubles)


def _counts(session: Session) -> str:
    total = len(session.runs)
    told = [f"{session.count(status)} {name}" for name, status in STATUSES.items()]
    told.append(f"{len(session.not_run)} not run here")
    start = "interrupted: " if session.interrupted else ""
    return f"{start}{total} scenario{'s' * (total != 1)}: {', '.join(told)}"
