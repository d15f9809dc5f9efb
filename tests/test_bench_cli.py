"""`tpbed bench`: its subcommands measure what they are asked for, and print the same figures to people and machines."""

import json

import pytest

from tpbed.harness import bench, cli, scale

RATIO = bench.Ratio(name="a / b", numerator_ms=1.0, denominator_ms=2.0, median=0.5, least=0.4, greatest=0.6)


@pytest.fixture
def tpbed(capsys, tmp_path, monkeypatch):
    """Runs a command line in an empty folder, with measurements that take no time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "bench_speed", lambda rows, tokens: RATIO)
    monkeypatch.setattr(bench, "bench_hang", lambda: RATIO)
    real = scale.bench_scale
    monkeypatch.setattr(
        scale, "bench_scale", lambda sizes, **how: real([s for s in sizes if s < 8], at_least_s=0, **how)
    )

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            cli.main([str(argument) for argument in arguments])
        return end.value.code, *capsys.readouterr()

    return run


def types(out):
    return [json.loads(line)["type"] for line in out.splitlines()]


@pytest.mark.parametrize("arguments", [("--json", "scale"), ("scale", "--json")])
def test_json_is_taken_before_and_after_the_subcommand(tpbed, arguments):
    status, out, _ = tpbed("bench", *arguments)
    assert (status, types(out)) == (0, ["point"] * 8 + ["growth"] * 4)


def test_without_a_subcommand_everything_is_measured(tpbed):
    status, out, _ = tpbed("bench", "--json")
    assert (status, types(out)) == (0, ["ratio"] * 5 + ["point"] * 8 + ["growth"] * 4)


@pytest.mark.parametrize(("name", "count"), [("speed", 4), ("hang", 1)])
def test_a_ratio_is_one_line_with_its_range(tpbed, name, count):
    status, out, err = tpbed("bench", name)
    assert (status, out.count("\n"), err) == (0, count, f"measuring {name} ...\n" * count)
    assert "0.50 (0.40 to 0.60)" in out


def test_scale_is_a_table_of_every_case_and_size_and_says_how_cost_grows(tpbed):
    _, out, err = tpbed("bench", "scale")
    for heading in ("all_reduce, a call", "hang, a run", "least us", "KiB a rank"):
        assert heading in out
    assert [line.split("│")[2].strip() for line in out.splitlines() if "│" in line] == ["2", "4"] * 4
    assert out.count("cost per rank grows by x") == 4
    assert "measuring 4 ranks ...\n" in err


def test_up_to_chooses_the_sizes(tpbed, monkeypatch):
    asked = []
    monkeypatch.setattr(scale, "bench_scale", lambda sizes, **how: asked.append(sizes) or [])
    tpbed("bench", "scale", "--up-to", 16, "--json")
    tpbed("bench", "scale", "--json")
    assert asked == [(2, 4, 8, 16), (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)]


def test_plot_writes_time_and_memory_by_case(tpbed, tmp_path):
    status, _, _ = tpbed("bench", "scale", "--plot", "scale.svg")
    text = (tmp_path / "scale.svg").read_text()
    assert status == 0
    for word in ("start, a run", "all_gather, a call", "microseconds", "MiB"):
        assert f"<!-- {word} -->" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--plot", "scale.gif"), "no known file type"),
        (("--up-to", "1"), "up to 1 ranks"),
        (("--plot", "a/b.png"), "a/b"),
    ],
)
def test_what_was_asked_for_wrongly_is_said_before_anything_is_measured(tpbed, monkeypatch, arguments, said):
    monkeypatch.setattr(scale, "bench_scale", None)
    status, out, err = tpbed("bench", "scale", *arguments)
    assert (status, out) == (2, "")
    assert said in err.splitlines()[-1]


def test_on_a_terminal_progress_is_one_live_line(tpbed, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    assert "..." not in tpbed("bench", "speed")[2]
