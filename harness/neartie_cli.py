"""`tpbed neartie`: how it prints what it measured, and what that says about a score."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import accumulate, count
from math import log10, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpbed.harness.bench_cli import AsJson, PlotFile
from tpbed.harness.console import print_json, print_table, telling, use_one_thread

if TYPE_CHECKING:  # torch is imported by the command that needs it, and not by `tpbed --help`
    from rich.table import Table

    from tpbed.harness.flips import Bin
    from tpbed.harness.neartie import Figures, Paired, Report
    from tpbed.harness.plot import Line, Panel

CHAINS = (32, 256)  # tokens
SCORES = (0.955, 0.98)
LEGEND = """\
flips: the best token is not the reference's; %: of rows; widest: the largest margin that flipped; sigma: of an error
that would flip so; best in 16, 16 in 16: the reference's, recalled; ties: the 16th equals the 17th; best, set: rows
that differ from the plain line, which is TP=1, 56 rows at a time (M), bf16 logits, canonical ties. Last come controls,
in which nothing may differ: best tokens under flips, rows with any other candidate under set.
Drafted tokens change against a draft of the reference with the same noise; path: slots from the first on whose best
token is the reference's; oracle: whose 16 hold it. fp8-w8a8 and nvfp4-w4a4 round hidden states too, as kernels do."""
CHANCE = 0.05  # a p from here on is called chance
HEADINGS = ("flips", "%", "widest", "sigma", "best in 16", "16 in 16", "ties", "best", "set")


def neartie(
    rows: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of each kind; there are 229 real ones, and as many planted unless said."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the planted margins.")] = 0,
    formats: Annotated[
        str, typer.Option(metavar="NAME,...", help="Head formats, the plain one first: bf16,int8,...")
    ] = "",
    tp: Annotated[str, typer.Option("--tp", metavar="N,...", help="World sizes.")] = "1,2,4,8",
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure how often near ties change the best token: by the selector, the head's format, or rounding.

    Runs the trained head of SmolLM2 on its own hidden states and on rows with planted margins, on simulated ranks.
    """
    with telling() as progress:
        progress("loading torch and SmolLM2")
        reports = _measure(rows, seed, formats, tp, plot, progress)
    if as_json:
        print_json(list(to_json(reports)))
    else:
        _print(reports)
    if plot:
        from tpbed.harness.plot import write_plot

        write_plot(plot, panels(reports))


def _measure(rows: int | None, seed: int, formats: str, tp: str, plot: Path | None, progress: Any) -> list[Report]:
    import torch

    from tpbed.harness.neartie import FORMATS, Rows, check_request, measure, planted
    from tpbed.harness.plot import require_plot
    from tpbed.harness.smollm2 import head_weight, hidden_states, passage_lengths

    if plot:
        require_plot(plot)
    names, sizes = formats.split(",") if formats else list(FORMATS), _numbers(tp)
    use_one_thread()
    states = hidden_states()
    weight = head_weight(torch.bfloat16)
    check_request(names, sizes, len(weight))
    real = Rows(
        name="smollm2",
        about="hidden states of SmolLM2-135M-Instruct in short passages",
        hidden=states[:rows],
        passages=_first(passage_lengths(), rows or len(states)),
    )
    progress("planting margins")
    drawn = planted(states, weight, rows or len(states), seed)
    return list(measure([real, drawn], weight, names, sizes, on_progress=progress))


def _first(passages: Sequence[int], rows: int) -> tuple[int, ...]:
    """The passages of the first rows."""
    ends = [min(end, rows) for end in accumulate(passages)]
    return tuple(length for start, end in zip([0, *ends], ends, strict=False) if (length := end - start))


def _numbers(text: str) -> list[int]:
    from tpbed.harness.neartie import NearTieError

    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise NearTieError(f"--tp {text}: give whole numbers with commas between them, such as 1,2,4,8.") from None


def to_json(reports: Sequence[Report]) -> Iterator[dict[str, Any]]:
    """All that was measured, one value for each line of a table, and the answer."""
    for report in reports:
        told = {
            name: getattr(report, name) for name in ("source", "about", "rows", "tps", "near_ties", "near_ties_ulps")
        }
        yield {"type": "rows", **told}
        yield from ({"type": "figures", **asdict(one)} for one in report.figures)
        for head, curve in report.curves.items():
            yield from ({"type": "bin", "source": report.source, "head": head, **asdict(one)} for one in curve)
        yield from ({"type": "control", **asdict(one)} for one in report.controls)
        yield from ({"type": "drafts", **asdict(one)} for one in report.drafts)
        yield from ({"type": "paired", **asdict(one)} for one in report.paired)
    yield {"type": "answer", "lines": list(answer(reports))}


def _print(reports: Sequence[Report]) -> None:
    for report in reports:
        print(f"{report.source}: {report.rows} rows, {report.about}")
        print("near ties  " + ", ".join(_rates(report.near_ties, "")))
        print("           " + ", ".join(_rates(report.near_ties_ulps, " bf16 ulps")))
        print_table(table(report))
        print_table(curve_table(report))
        print_table(draft_table(report))
    print(LEGEND)
    print(*answer(reports), sep="\n")


def _rates(rates: dict[str, float], unit: str) -> Iterator[str]:
    return (f"{rate:.1%} up to {tau}{unit}" for tau, rate in rates.items())


def table(report: Report) -> Table:
    """A line for each head and setting, a block for each head, and the controls."""
    from rich.table import Table

    found = Table("head", "setting", title=f"{report.source}: against the float32 reference")
    for heading in ("rows", *HEADINGS):
        found.add_column(heading, justify="right")
    head = ""
    for one in report.figures:
        if one.head != head:
            found.add_section()
        found.add_row("" if one.head == head else one.head, one.setting, str(one.rows), *_cells(one))
        head = one.head
    found.add_section()
    for control in report.controls:
        found.add_row(
            control.head, control.name, str(control.rows), str(control.flips), *[""] * 6, "", str(control.changed)
        )
    return found


def _cells(one: Figures) -> list[str]:
    widest = "" if one.largest_flipped is None else f"{one.largest_flipped:.3f}"
    shares = [f"{share:.1%}" for share in (one.best_recalled, one.set_recalled, one.boundary_ties)]
    changed = [str(one.changed_best), str(one.changed_sets)]
    return [str(one.flips), f"{one.flip_rate:.1%}", widest, f"{one.sigma:.3f}", *shares, *changed]


def curve_table(report: Report) -> Table:
    """Flips of rows by margin, a line for each head in its plain setting."""
    from rich.table import Table

    found = Table("head", title="flips / rows, by the margin of the reference")
    for one in next(iter(report.curves.values())):
        found.add_column(f"{one.low:g} to {one.high:g}" if one.high else f"{one.low:g} and up", justify="right")
    for head, curve in report.curves.items():
        found.add_row(head, *(f"{one.flips} / {one.rows}" for one in curve))
    return found


def draft_table(report: Report) -> Table:
    """What drafts of each head are worth, in its plain setting."""
    from rich.table import Table

    found = Table("head", title="drafted tokens that change, and slots of a block of 7 accepted")
    for heading in ("greedy", "keyed Gumbel", "inverse CDF", "path", "oracle", "blocks"):
        found.add_column(heading, justify="right")
    for one in report.drafts:
        changed = (one.changed_greedy, one.changed_gumbel, one.changed_inverse_cdf)
        lengths = ("" if n is None else f"{n:.2f}" for n in (one.path_length, one.oracle_length))
        found.add_row(one.head, *(f"{share:.1%}" for share in changed), *lengths, str(one.blocks))
    return found


def answer(reports: Sequence[Report]) -> Iterator[str]:
    """What the figures say to who asks whether a lower score is the selector, the head, or noise.

    A row is right here if its best token is the reference's, which says nothing of whether that is a good one.
    """
    low, high = SCORES
    yield f"A quantized head scores {low:.1%} where bf16 scores {high:.1%}: is that the selector, the head, or noise?"
    yield from _of_selector(reports)
    for report in reports:
        yield from _of_heads(report)
    yield from _of_noise(high - low)
    yield _verdict(reports)


def _of_selector(reports: Sequence[Report]) -> Iterator[str]:
    from tpbed.harness.flips import most_likely_below

    controls = [one for report in reports for one in report.controls]
    total, tps = sum(one.rows for one in controls), ", ".join(map(str, reports[0].tps))
    yield (
        f"selector  {_selector_changes(reports)} of {total:,} rows in {len(controls)} controls change a candidate: "
        f"TP={tps} on the same logits, and run twice."
    )
    others = [one for report in reports for one in report.figures if one.setting.startswith(("TP=", "M="))]
    changed, rows = sum(one.changed_best for one in others), sum(report.rows for report in reports)
    bound = "" if changed else f"; 0 of {rows} rows leaves at most {most_likely_below(rows):.2%} possible"
    yield (
        f"sums      {changed} of {sum(one.rows for one in others):,} best tokens change where heads multiply by "
        f"shards or batches{bound}."
    )


def _of_heads(report: Report) -> Iterator[str]:
    from tpbed.harness.flips import fork_chance

    for head in report.curves:
        mine = [one for one in report.figures if one.head == head]
        plain, wide = mine[0], next(one for one in mine if one.setting == "fp32 logits")
        where = f", none at a margin above {plain.largest_flipped:.3f}" if plain.flips else ""
        forks = ", ".join(f"of {tokens} tokens {fork_chance(plain.flip_rate, tokens):.1%}" for tokens in CHAINS)
        yield (
            f"{head:<9} {plain.flips} of {report.rows} {report.source} rows flip ({plain.flip_rate:.1%}){where}; "
            f"{wide.flips} do with fp32 logits, which leaves what its weights do."
        )
        yield f"{'':<9} At that rate greedy chains fork: {forks}."
        yield from (_told(one) for one in report.paired if one.head == head)


def _told(one: Paired) -> str:
    means = "beyond chance" if one.p < CHANCE else "which chance explains"
    return (
        f"{'':<9} Paired with {one.against}, n={one.rows}: alone right in {one.only_head} rows, {one.against} in "
        f"{one.only_against}: McNemar p={one.p:.2g}, {means}."
    )


def _of_noise(points: float) -> Iterator[str]:
    from tpbed.harness.flips import mcnemar

    needed = next(differing for differing in count(1) if mcnemar(0, differing) < CHANCE)
    few = round(points * 200)
    yield (
        f"noise     {points:.1%} of 200 answers are {few}: if only these differ, McNemar p={mcnemar(0, few):.2g}. "
        f"To tell, it takes {needed} of {needed / points:.0f}, all one way; and more if some differ the other way."
    )


def _selector_changes(reports: Sequence[Report]) -> int:
    return sum(control.changed for report in reports for control in report.controls)


def _verdict(reports: Sequence[Report]) -> str:
    if _selector_changes(reports):
        return "So: the selector is at fault; mend it before anything is said of heads."
    paired = [one for report in reports for one in report.paired]
    losing = {one.head for one in paired if one.p < CHANCE and one.only_against > one.only_head}
    even = {one.head for one in paired} - losing
    found = [f"the head format makes {', '.join(sorted(losing))} worse beyond chance"] if losing else []
    found += [f"{', '.join(sorted(even))} cannot be told from chance on these rows"] if even else []
    told = "; ".join(["So: not the selector", *found])
    return f"{told}. Right is what the reference says: whether a score shows it, only paired answers tell."


def panels(reports: Sequence[Report]) -> list[Panel]:
    """Flips by margin for each kind of rows, with what the fitted sigma says; and near ties by ulps."""
    from tpbed.harness.plot import Line, Panel

    curves = [
        Panel(
            title=f"{report.source}: {report.rows} rows",
            x_label="log10 of the margin",
            y_label="share of rows that flip",
            lines=[line for head in report.curves for line in _lines(report, head)],
        )
        for report in reports
    ]
    near = [
        Line(
            label=report.source,
            xs=[float(tau) for tau in report.near_ties_ulps],
            ys=list(report.near_ties_ulps.values()),
        )
        for report in reports
    ]
    title = "Rows with a margin of at most so many bf16 ulps"
    return [*curves, Panel(title=title, x_label="bf16 ulps", y_label="share of rows", lines=near, logarithmic=True)]


def _lines(report: Report, head: str) -> Iterator[Line]:
    from tpbed.harness.flips import flip_chance
    from tpbed.harness.plot import Line

    bins = [one for one in report.curves[head] if one.rows]
    yield Line(label=head, xs=[log10(_middle(one)) for one in bins], ys=[one.flips / one.rows for one in bins])
    sigma = next(one.sigma for one in report.figures if one.head == head)
    xs = [-2 + step / 8 for step in range(21)]
    yield Line(label=f"{head}, sigma {sigma:.3f}", xs=xs, ys=[flip_chance(10**x, sigma) for x in xs])


def _middle(one: Bin) -> float:
    """Where a bin is drawn: at the geometric mean of its ends, or at half of the first, or beside the last."""
    if one.high is None:
        return one.low * 2
    return sqrt(one.low * one.high) if one.low else one.high / 2
