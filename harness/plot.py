"""Plot: lines with labels, in one panel or several, written to a PNG or SVG file by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tpbed.tp.errors import TestbedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg")
PANEL_INCHES = (6.4, 4.8)
MARKERS = "osD^vP*X"  # lines differ by more than their colour


class PlotError(TestbedError):
    """A plot cannot be written: the file type, the folder, or no matplotlib."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points of one thing measured, joined from left to right."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Lines that share their axes.

    logarithmic: both axes, in powers of two across and of ten up; points that are not positive are left out.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    logarithmic: bool = False


def require_plot(path: Path) -> None:
    """Find out whether a plot could be written to `path`, before anything is measured for it.

    Raises PlotError for another file type, a folder that is not there, or where matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise PlotError(f"{path} is of no known file type: give a name that ends in {' or '.join(SUFFIXES)}.")
    if path.is_dir() or not path.parent.is_dir():
        raise PlotError(f"{path} cannot be written: give a file in a folder that exists.")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise PlotError("plots need matplotlib, which is not installed: pip install 'tpbed[plot]'") from None


def write_plot(path: Path, panels: Sequence[Panel]) -> None:
    """Draw the panels side by side and write them to `path`; the same panels give the same file.

    Raises PlotError as require_plot does.
    """
    require_plot(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # and no pyplot, whose figures would live on

    kind = path.suffix.lower()[1:]
    with rc_context({"svg.hashsalt": "tpbed"}):
        width, height = PANEL_INCHES
        figure = Figure(figsize=(width * len(panels), height), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            _draw(axes, panel)
        figure.savefig(path, format=kind, metadata={"Date": None} if kind == "svg" else None)


def _draw(axes: Axes, panel: Panel) -> None:
    if panel.logarithmic and any(_points(line, positive=True) for line in panel.lines):
        _make_logarithmic(axes)
    for number, line in enumerate(panel.lines):
        points = _points(line, positive=panel.logarithmic)
        xs, ys = [x for x, _ in points], [y for _, y in points]
        axes.plot(xs, ys, marker=MARKERS[number % len(MARKERS)], label=line.label)
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    axes.grid(alpha=0.3)
    axes.legend()


def _points(line: Line, *, positive: bool) -> list[tuple[float, float]]:
    return [point for point in zip(line.xs, line.ys, strict=True) if min(point) > 0 or not positive]


def _make_logarithmic(axes: Axes) -> None:
    """With plain numbers at the ticks."""
    from matplotlib.ticker import LogFormatter

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(LogFormatter())
