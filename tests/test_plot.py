"""Plots: the lines that were given are in the file, and what stands in the way of one is said before the work."""

import sys
from xml.etree import ElementTree

import pytest

from tpbed.harness.plot import Line, Panel, PlotError, require_plot, write_plot

PANELS = [
    Panel(
        title="Time",
        x_label="ranks",
        y_label="microseconds",
        lines=[Line(label="all_reduce", xs=[2, 4, 8], ys=[1.0, 10.0, 100.0]), Line(label="hang", xs=[2, 8], ys=[3, 3])],
        logarithmic=True,
    ),
    Panel(title="Memory", x_label="rows", y_label="KiB", lines=[Line(label="peak", xs=[0, 1], ys=[0, 1])]),
]
SVG = "{http://www.w3.org/2000/svg}"


def heights(path, marker_count):
    """Of the markers of the line in an SVG that has so many."""
    groups = [g for g in ElementTree.parse(path).iter(f"{SVG}g") if g.get("id", "").startswith("line2d")]
    uses = [[float(use.get("y")) for use in g.iter(f"{SVG}use")] for g in groups]
    return next(found for found in uses if len(found) == marker_count)


def test_an_svg_has_the_points_where_logarithmic_axes_put_them(tmp_path):
    write_plot(tmp_path / "plot.svg", PANELS)
    low, middle, high = heights(tmp_path / "plot.svg", 3)
    assert low - middle == pytest.approx(middle - high)
    assert low > high


def test_points_without_a_place_on_logarithmic_axes_are_left_out(tmp_path):
    lines = [Line(label="some", xs=[1, 2, 4, 8, 16], ys=[0.0, 1.0, 2.0, -3.0, 4.0])]
    write_plot(tmp_path / "some.svg", [Panel(title="", x_label="", y_label="", lines=lines, logarithmic=True)])
    assert len(heights(tmp_path / "some.svg", 3)) == 3
    lines = [Line(label="none", xs=[1, 2], ys=[0.0, 0.0])]
    write_plot(tmp_path / "none.svg", [Panel(title="", x_label="", y_label="", lines=lines, logarithmic=True)])


def test_titles_labels_and_legends_are_there(tmp_path):
    write_plot(tmp_path / "plot.svg", PANELS)
    text = (tmp_path / "plot.svg").read_text()
    for word in ("Time", "ranks", "microseconds", "all_reduce", "hang", "Memory", "rows", "KiB", "peak"):
        assert f"<!-- {word} -->" in text


def test_the_suffix_chooses_the_file_type_in_capitals_too(tmp_path):
    write_plot(tmp_path / "plot.PNG", PANELS)
    assert (tmp_path / "plot.PNG").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["one.svg", "one.png"])
def test_the_same_panels_give_the_same_file(tmp_path, name):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_plot(tmp_path / folder / name, PANELS)
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("name", ["plot.gif", "plot", "png"])
def test_another_file_type_is_refused_with_those_there_are(tmp_path, name):
    with pytest.raises(PlotError, match=r"no known file type: give a name that ends in \.png or \.svg"):
        require_plot(tmp_path / name)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(PlotError, match="give a file in a folder that exists"):
        require_plot(tmp_path / "none" / "plot.svg")


def test_without_matplotlib_it_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotError, match=r"pip install 'tpbed\[plot\]'"):
        write_plot(tmp_path / "plot.svg", PANELS)
    assert list(tmp_path.iterdir()) == []
