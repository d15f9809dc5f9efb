"""`tpbed bench`: its subcommands, and how they print what they measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from tpbed.harness.console import print_json, print_table, telling, use_one_thread
from tpbed.tp.errors import TestbedError

if TYPE_CHECKING:  # torch is imported by the commands that need it, and not by `tpbed --help`
    from rich.table import Table

    from tpbed.harness.bench import Ratio
    from tpbed.harness.bench_gpu import Figure, GpuReport
    from tpbed.harness.gathers import GatherPoint
    from tpbed.harness.plot import Panel
    from tpbed.harness.scale import ScalePoint
    from tpbed.harness.soak import RanksReport

LARGEST = 1024  # ranks


class BenchUsageError(TestbedError):
    """The command line asks for a measurement that there is not."""


app = typer.Typer(
    help="Measure on this machine, as ratios within one run: worlds, by number of ranks, hangs; the selector on a GPU.",
    rich_markup_mode=None,
)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one value a line.")]
UpTo = Annotated[int, typer.Option(help="The largest world size: measured are 2, 4, 8, ... up to it.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw it, too: FILE.png or FILE.svg.")]


@app.callback(invoke_without_command=True)
def everything(context: typer.Context, as_json: AsJson = False) -> None:
    """Measure the simulated world on this machine; without a subcommand, all that there is."""
    context.obj = as_json
    if context.invoked_subcommand is None:
        speed(context)
        hang(context)
        scale(context)


@app.command()
def speed(context: typer.Context, as_json: AsJson = False) -> None:
    """A selector step: bare tensor maths over the same step on simulated ranks; 1.0 would cost nothing."""
    from tpbed.harness.bench import EXAMPLES, bench_speed

    for rows, tokens in EXAMPLES:
        _print_ratio("speed", partial(bench_speed, rows=rows, tokens=tokens), as_json or context.obj)


@app.command()
def hang(context: typer.Context, as_json: AsJson = False) -> None:
    """A run that ends in a proved hang, over a healthy run of the same program."""
    from tpbed.harness.bench import bench_hang

    _print_ratio("hang", bench_hang, as_json or context.obj)


@app.command()
def scale(context: typer.Context, up_to: UpTo = LARGEST, plot: PlotFile = None, as_json: AsJson = False) -> None:
    """What a start, a small collective and a proved hang cost for each rank of 2, 4, 8, ... ranks; and the memory."""
    with telling() as progress:
        progress("loading torch")
        from tpbed.harness.plot import require_plot, write_plot
        from tpbed.harness.scale import bench_scale, growths, sizes_up_to

        sizes = sizes_up_to(up_to)
        if plot:
            require_plot(plot)
        use_one_thread()
        points = list(bench_scale(sizes, on_progress=progress))
    found = growths(points)
    if as_json or context.obj:
        print_json([{"type": "point", **asdict(point)} for point in points])
        print_json([{"type": "growth", **asdict(growth)} for growth in found])
    else:
        print_table(_table(points))
        print(*found, "A slope of 0 is a world whose cost is linear in its ranks.", sep="\n")
    if plot:
        write_plot(plot, _panels(points))


@app.command()
def ranks(
    context: typer.Context,
    world_size: Annotated[int, typer.Option("--tp", min=2, help="Ranks.")] = 4,
    world: Annotated[str, typer.Option(help="gloo or nccl.")] = "gloo",
    hangs: Annotated[
        int, typer.Option(min=1, help="Hangs, of every kind in turn, each with a healthy run after it.")
    ] = 100,
    hogs: Annotated[int, typer.Option(min=0, help="Processes that keep a processor busy meanwhile.")] = 0,
    seed: Annotated[int, typer.Option(help="Of which rank is at fault.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Real ranks: how soon a hang of each kind is found, what recovery costs, what leaks, and runs a second."""
    with telling() as progress:
        progress("starting ranks")
        from tpbed.harness.soak import measure_ranks

        report = measure_ranks(world, world_size, hangs, hogs=hogs, seed=seed, on_progress=progress)
    if as_json or context.obj:
        print_json([{"type": "ranks", **asdict(report)}])
    else:
        print_table(_table_of_hangs(report))
        print(report)


@app.command()
def gpu(
    context: typer.Context,
    part: Annotated[
        str,
        typer.Option(
            metavar="PART,...",
            help="head, topk, fp8, nvfp4, merge, draft, sweep, tilings; default: all but the last two.",
        ),
    ] = "",
    tp: Annotated[
        str, typer.Option("--tp", metavar="N,...", help="World sizes whose shards are measured.")
    ] = "1,2,4,8",
    rows: Annotated[str, typer.Option(metavar="N,...", help="Rows of a step.")] = "7,56,448",
    mode: Annotated[str, typer.Option(metavar="MODE,...", help="graph, eager.")] = "graph,eager",
    rounds: Annotated[int, typer.Option(min=1, help="Turns of all that is compared.")] = 15,
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write all figures there, too.")] = None,
    as_json: AsJson = False,
) -> None:
    """The selector on this GPU: heads, top-k, FP8, merge, lattice and walk, each as a ratio within the run."""
    with telling() as progress:
        progress("loading torch")
        from tpbed.harness.bench_gpu import Asked, Mode, Part, bench_gpu

        asked = Asked(
            parts=_chosen("--part", part, get_args(Part)) if part else Asked().parts,
            tps=_numbers("--tp", tp),
            rows=_numbers("--rows", rows),
            modes=_chosen("--mode", mode, get_args(Mode)),
            rounds=rounds,
        )
        report = bench_gpu(asked, on_progress=progress)
    told = {"type": "gpu", **asdict(report)}
    if out:
        out.write_text(json.dumps(told, allow_nan=False, indent=1) + "\n", encoding="utf-8")
    if as_json or context.obj:
        print_json([told])
    else:
        _print_gpu(report)


def _chosen(option: str, text: str, allowed: Sequence[Any]) -> tuple[Any, ...]:
    names = tuple(text.split(","))
    if wrong := [name for name in names if name not in allowed]:
        raise BenchUsageError(f"{option} {','.join(wrong)} is none of {', '.join(allowed)}: give some of these.")
    return names


def _numbers(option: str, text: str) -> tuple[int, ...]:
    if not all(part.isdecimal() and int(part) > 0 for part in text.split(",")):
        raise BenchUsageError(f"{option} {text!r} is no list of numbers: give some like 1,8.")
    return tuple(int(part) for part in text.split(","))


def _print_gpu(report: GpuReport) -> None:
    from rich.table import Table

    from tpbed.harness.bench_gpu import by_case

    table = Table(title="Microseconds of a call, and the ratio to what it is measured against; medians")
    for heading in ("what", "against", "TP", "rows", "graph us", "ratio", "eager us", "ratio"):
        table.add_column(heading, justify="left" if heading in ("what", "against") else "right")
    before = None
    for (part, name, tp, rows), modes in by_case(report.figures).items():
        if (part, tp, rows) != before:
            table.add_section()
        before = part, tp, rows
        figures = [text for mode in ("graph", "eager") for text in _texts(modes.get(mode))]
        table.add_row(name, next(iter(modes.values())).against, str(tp), str(rows), *figures)
    print_table(table, width=150)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    print(f"{report.card}; {versions}", f"copy bandwidth {report.copy_tb_per_s:.2f} TB/s", *report.notes, sep="\n")
    print(f"again     {report.command}")


def _texts(figure: Figure | None) -> list[str]:
    if figure is None:
        return ["", ""]
    return [f"{figure.us:,.1f}", "" if figure.ratio is None else f"{figure.ratio:.2f}"]


@app.command()
def gathers(
    context: typer.Context,
    tp: Annotated[
        str, typer.Option("--tp", metavar="N,...", help="Ranks; default: of 2, 4 and 8 those that have a GPU each.")
    ] = "",
    world: Annotated[str, typer.Option(help="nccl or gloo.")] = "nccl",
    rows: Annotated[str, typer.Option(metavar="N,...", help="Rows of a step.")] = "8,32,128",
    tokens: Annotated[int, typer.Option(min=16, help="Of the whole vocabulary.")] = 128_256,
    rounds: Annotated[int, typer.Option(min=1, help="In each of which every merge is timed once.")] = 30,
    as_json: AsJson = False,
) -> None:
    """One packed gather beside two gathers and the gather of all logits, eager and (NCCL) in a CUDA graph."""
    with telling() as progress:
        progress("loading torch")
        from tpbed.harness.gathers import GatherPlan, largest_sizes, measure_gathers, require_ranks

        sizes = _numbers("--tp", tp) if tp else largest_sizes(world)
        backend, counts = require_ranks(world, sizes), _numbers("--rows", rows)
        plans = [
            GatherPlan(backend=backend, world_size=size, rows=counts, tokens=tokens, rounds=rounds) for size in sizes
        ]
        points = [point for plan in plans for point in measure_gathers(plan, progress)]
    if as_json or context.obj:
        print_json([{"type": "gather", **asdict(point)} for point in points])
    else:
        print_table(_table_of_gathers(points))


def _table_of_gathers(points: Sequence[GatherPoint]) -> Table:
    from rich.table import Table

    table = Table("", title="Microseconds a call, of the slowest rank; ratios to packed, medians (least to greatest)")
    for heading in ("merge", "KiB a rank", "least", "median", "greatest", "ratio"):
        table.add_column(heading, justify="left" if heading == "merge" else "right")
    case = ""
    for point in points:
        label = f"{point.backend}, TP={point.world_size}, {point.rows} rows, {point.mode} {point.part}"
        if label != case:
            table.add_section()
        times = (f"{us:,.0f}" for us in (point.least_us, point.median_us, point.greatest_us))
        ratio = f"{point.ratio:.2f} ({point.ratio_least:.2f} to {point.ratio_greatest:.2f})"
        table.add_row("" if label == case else label, point.merge, f"{point.bytes_per_rank / 1024:,.0f}", *times, ratio)
        case = label
    return table


def _table_of_hangs(report: RanksReport) -> Table:
    from rich.table import Table

    table = Table(
        "the culprit", title="From a rank's last event to the finding that names the culprit, in milliseconds"
    )
    for heading in ("hangs", "median", "99 %", "worst"):
        table.add_column(heading, justify="right")
    rows = {**report.verdict_ms, "recovery, all kinds": report.recovery_ms}
    for label, spread in rows.items():
        table.add_row(label, str(spread.count), *(f"{ms:,.1f}" for ms in (spread.median, spread.p99, spread.worst)))
    return table


def _print_ratio(name: str, measure: Callable[[], Ratio], as_json: bool) -> None:
    use_one_thread()
    with telling() as progress:
        progress(f"measuring {name}")
        ratio = measure()
    if as_json:
        print_json([{"type": "ratio", **asdict(ratio)}])
        return
    told = f"{ratio.median:.2f} ({ratio.least:.2f} to {ratio.greatest:.2f})"
    print(f"{ratio.name:<58} {told:<22} {ratio.numerator_ms:.2f} ms / {ratio.denominator_ms:.2f} ms, medians")


def _table(points: Sequence[ScalePoint]) -> Table:
    """A block of lines for each case."""
    from rich.table import Table

    from tpbed.harness.scale import UNITS

    table = Table("", title="Real time for each rank, and memory, of a simulated world")
    for heading in ("ranks", "least us", "median us", "ratio", "peak MiB", "KiB a rank"):
        table.add_column(heading, justify="right")
    case = ""
    for point in _by_case(points):
        if point.case != case:
            table.add_section()
        label = "" if point.case == case else f"{point.case}, a {UNITS[point.case]}"
        case = point.case
        table.add_row(label, f"{point.world_size:,}", *_figures(point))
    return table


def _by_case(points: Sequence[ScalePoint]) -> list[ScalePoint]:
    """In the order in which cases, and within them sizes, were measured first."""
    cases = list(dict.fromkeys(point.case for point in points))
    return sorted(points, key=lambda point: cases.index(point.case))


def _figures(point: ScalePoint) -> list[str]:
    times = [f"{point.least_us:,.1f}", f"{point.median_us:,.1f}", f"{point.ratio:.2f}"]
    return [*times, f"{point.peak_mib:,.1f}", f"{point.peak_kib_per_rank:,.1f}"]


def _panels(points: Sequence[ScalePoint]) -> list[Panel]:
    from tpbed.harness.plot import Line, Panel
    from tpbed.harness.scale import UNITS

    def panel(title: str, y_label: str, figure: str) -> Panel:
        lines = [
            Line(
                label=f"{case}, a {unit}",
                xs=[p.world_size for p in points if p.case == case],
                ys=[getattr(p, figure) for p in points if p.case == case],
            )
            for case, unit in UNITS.items()
        ]
        return Panel(title=title, x_label="ranks", y_label=y_label, lines=lines, logarithmic=True)

    return [
        panel("Real time for each rank, least of the repeats", "microseconds", "least_us"),
        panel("Resident memory at its highest, of all ranks", "MiB", "peak_mib"),
    ]
