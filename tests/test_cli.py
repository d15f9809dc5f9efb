"""The command line: exit statuses, one line for what was asked for wrongly, and the counts at the end."""

import io
import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from records import ONE_RAISES, one_raises, unlike
from rich.text import Text

from tpbed.harness import cli, runner
from tpbed.harness.record import save_record
from tpbed.harness.scenario import ScenarioError
from tpbed.tp.errors import TestbedError
from tpbed.tp.world import WorldRun

PASSES = ONE_RAISES
FAILS = unlike(ONE_RAISES, name="hang/unexpected", expect=())
UNDECIDED = unlike(ONE_RAISES, name="doubt/never-fires", faults=ONE_RAISES.faults * 2, kind=10)
SMALL = unlike(ONE_RAISES, name="healthy/one-rank", world_size=1, faults=(), expect=(), kind=0)
ONLY_SIM = unlike(ONE_RAISES, name="large/a-thousand", worlds=("sim",), source="sgl-project/sglang#1")
LIGHT = """
import sys
from tpbed.harness.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert end.code == 0, end
assert not {"torch", "ray", "rich"} & set(sys.modules), sorted(sys.modules)
"""


class World:
    """Sees what ONE_RAISES does, whatever it runs."""

    name = "ray+gloo"

    def __init__(self, world_size):
        self.world_size = world_size

    def run(self, program, *, stall_after_s):
        if "interrupt" in program.args[0].scenario.name:
            raise KeyboardInterrupt
        seen = one_raises()
        return WorldRun(world=self.name, results=(), ledgers=seen.ledgers, liveness=seen.liveness, proof_ms=12.3)

    def close(self):
        pass


@pytest.fixture(autouse=True)
def catalogue(monkeypatch):
    """A small catalogue, and worlds that cost nothing."""
    names = {scenario.name: scenario for scenario in (PASSES, FAILS, UNDECIDED, SMALL, ONLY_SIM)}
    monkeypatch.setattr(cli, "load_catalogue", lambda: names)
    monkeypatch.setattr(runner, "open_world", lambda choice, world_size, **options: World(world_size))
    return names


@pytest.fixture
def tpbed(capsys, tmp_path, monkeypatch):
    """Runs a command line in an empty folder; returns exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            cli.main([str(argument) for argument in arguments])
        return end.value.code, *capsys.readouterr()

    return run


def last(out):
    return out.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments", [["--help"], ["bench", "--help"], ["list"], ["list", "hang", "--kind", "hang"], ["list", "--json"]]
)
def test_help_and_list_import_neither_torch_nor_ray_nor_rich(arguments):
    subprocess.run([sys.executable, "-c", LIGHT, *arguments], check=True, capture_output=True, timeout=60)


def test_show_imports_no_torch(catalogue):
    from tpbed.scenarios import CATALOGUE

    subprocess.run([sys.executable, "-c", LIGHT, "show", next(iter(CATALOGUE))], check=True, timeout=60)


def test_list_tells_name_size_findings_worlds_and_claim(tpbed):
    status, out, _ = tpbed("list", "healthy")
    assert (status, out) == (0, f"healthy/one-rank  1  none  sim,gloo,nccl  {SMALL.claim}\n")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], ["hang/one-rank-raises", "hang/unexpected", "doubt/never-fires", "healthy/one-rank", "large/a-thousand"]),
        (["hang/*"], ["hang/one-rank-raises", "hang/unexpected"]),
        (["hang"], ["hang/one-rank-raises", "hang/unexpected"]),
        (["hang/"], ["hang/one-rank-raises", "hang/unexpected"]),
        (["*one-rank*"], ["hang/one-rank-raises", "healthy/one-rank"]),
        (["healthy", "hang/un*"], ["hang/unexpected", "healthy/one-rank"]),
        (["--kind", "none"], ["hang/unexpected", "healthy/one-rank"]),
        (["--kind", "10"], ["doubt/never-fires"]),
        (["hang", "--kind", "hang"], ["hang/one-rank-raises"]),
        (["--source", "sglang"], ["large/a-thousand"]),
        (["large", "--source", "sgl-project/sglang#1"], ["large/a-thousand"]),
    ],
)
def test_what_is_selected(tpbed, arguments, names):
    status, out, _ = tpbed("list", *arguments, "--json")
    assert status == 0
    assert [json.loads(line)["name"] for line in out.splitlines()] == names


def test_show_tells_faults_and_expectations_in_words(tpbed):
    status, out, _ = tpbed("show", "hang/one-rank-raises")
    told = dict(line.split(maxsplit=1) for line in out.splitlines() if not line.startswith(" "))
    assert status == 0
    assert told["kind"] == "1: one rank raises before a collective"
    assert told["faults"].startswith("raise@rank=3,seq=7")
    assert told["expect"] == "hang of rank 3 in all_gather seq 7 caused by InjectedError"
    assert told["overwrites"] == told["source"] == told["widths"] == "none"


def test_the_json_of_a_scenario_has_no_nan(tpbed, catalogue):
    catalogue["nan"] = unlike(SMALL, name="nan", pad_fill=float("nan"))
    told = json.loads(tpbed("show", "nan", "--json")[1], parse_constant=pytest.fail)
    assert (told["pad_fill"], json.loads(tpbed("show", SMALL.name, "--json")[1])["pad_fill"]) == ("nan", 0.0)


def test_show_as_json(tpbed):
    _, out, _ = tpbed("show", "hang/one-rank-raises", "--json")
    assert json.loads(out)["worlds"] == ["sim", "gloo", "nccl"]


@pytest.mark.parametrize("patterns", [["hang/*"], ["hang"], ["hang/one-rank-raises", "hang/unexpected"]])
def test_show_tells_all_that_match(tpbed, patterns):
    status, out, _ = tpbed("show", *patterns)
    told = [block.splitlines()[0].split() for block in out.split("\n\n")]
    assert (status, told) == (0, [["name", "hang/one-rank-raises"], ["name", "hang/unexpected"]])
    assert len(tpbed("show", *patterns, "--json")[1].splitlines()) == 2


CLOSES = """
import os, sys
from tpbed.harness.cli import main
reads, writes = os.pipe()
os.close(reads)
os.dup2(writes, 1)
main(sys.argv[1:])
"""


@pytest.mark.parametrize("arguments", [["list"], ["list", "--json"], ["--help"], ["show", "hang"]])
def test_a_reader_that_goes_away_is_met_with_silence(arguments):
    ended = subprocess.run([sys.executable, "-c", CLOSES, *arguments], stderr=subprocess.PIPE, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("names", "status", "counts"),
    [
        (["hang/one-rank-raises"], 0, "1 scenario: 1 passed, 0 failed, 0 undecided, 0 not run here"),
        (["hang"], 1, "2 scenarios: 1 passed, 1 failed, 0 undecided, 0 not run here"),
        (["doubt"], 3, "1 scenario: 0 passed, 0 failed, 1 undecided, 0 not run here"),
        (["doubt", "hang/u*"], 1, "2 scenarios: 0 passed, 1 failed, 1 undecided, 0 not run here"),
        (["large", "hang/o*"], 0, "1 scenario: 1 passed, 0 failed, 0 undecided, 1 not run here"),
        (["large"], 3, "0 scenarios: 0 passed, 0 failed, 0 undecided, 1 not run here"),
    ],
)
def test_run_ends_with_the_counts_and_the_exit_status(tpbed, names, status, counts):
    found, out, _ = tpbed("run", *names, "--world", "gloo")
    assert found == status
    assert last(out).startswith(f"{counts}  (ray+gloo, ")


def test_the_first_verdict_is_timed(tpbed):
    assert ", first verdict after " in last(tpbed("run", "hang")[1])
    assert "first verdict" not in last(tpbed("run", "large", "--world", "gloo")[1])


def test_run_prints_each_report_and_what_was_not_run(tpbed):
    _, out, _ = tpbed("run", "hang/o*", "large", "--world", "gloo")
    lines = out.splitlines()
    assert lines[0].startswith("PASS  hang/one-rank-raises  ray+gloo  4 ranks, 1000 tokens, seed 0, ")
    assert lines[1].startswith("hang  proved 12 ms after the last event: ")
    assert lines[2].startswith("cause rank 3 raised InjectedError ")
    assert lines[3] == "NOT RUN  large/a-thousand  gloo cannot express it: run it with --world sim"


def test_what_did_not_pass_is_told_again_at_the_end_of_several(tpbed):
    lines = tpbed("run", "hang", "doubt")[1].splitlines()
    assert sum(line.startswith("FAIL  hang/unexpected") for line in lines) == 2
    assert sum(line.startswith("UNDECIDED  doubt/never-fires") for line in lines) == 2
    assert sum(line.startswith("PASS  ") for line in lines) == 1
    lines = tpbed("run", "hang/unexpected")[1].splitlines()
    assert sum(line.startswith("FAIL  hang/unexpected") for line in lines) == 1


def test_progress_goes_to_stderr_and_begins_before_torch_is_there(tpbed):
    _, out, err = tpbed("run", "hang", "--world", "gloo")
    assert err.splitlines() == [
        "loading torch ...",
        "world gloo: as asked",
        "1/2 hang/one-rank-raises ...",
        "2/2 hang/unexpected ...",
    ]
    assert " ..." not in out


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_progress_is_one_live_line_among_the_reports(tpbed, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    status, _, _ = tpbed("run", "hang", "--world", "gloo")
    shown = Text.from_ansi(screen.getvalue()).plain
    assert status == 1
    assert "\nworld gloo: as asked\n" in f"\n{shown}".replace("\r", "\n")
    assert "PASS  hang/one-rank-raises  ray+gloo  4 ranks" in shown
    assert (
        "hang  proved 12 ms after the last event: all_gather seq 7 of group world waits for rank 3, which can" in shown
    )
    assert last(shown).startswith("2 scenarios: 1 passed, 1 failed, ")
    assert "loading torch ...\n" not in shown
    assert "\x1b[32mPASS\x1b[0m  hang/one-rank-raises" in screen.getvalue()


def test_tp_narrows_to_one_world_size(tpbed):
    _, out, _ = tpbed("run", "h*", "--tp", 1, "--fail-fast", "--json")
    assert [json.loads(line).get("scenario") for line in out.splitlines()] == ["healthy/one-rank", None]


def test_the_seed_reaches_the_report(tpbed):
    assert "seed 20417" in tpbed("run", "hang/o*", "--seed", 20417)[1]


def test_json_is_one_verdict_a_line_and_then_the_summary(tpbed):
    status, out, _ = tpbed("run", "hang", "large", "--world", "gloo", "--json")
    *verdicts, summary = map(json.loads, out.splitlines())
    assert [(told["type"], told["scenario"], told["status"]) for told in verdicts] == [
        ("verdict", "hang/one-rank-raises", "PASS"),
        ("verdict", "hang/unexpected", "FAIL"),
    ]
    assert (summary["type"], summary["exit_status"], summary["world"]) == ("summary", status, "ray+gloo")
    assert [summary[name] for name in ("scenarios", "passed", "failed", "undecided")] == [2, 1, 1, 0]
    assert [entry["scenario"] for entry in summary["not_run"]] == ["large/a-thousand"]
    assert summary["interrupted"] is False


def test_records_of_failures_are_saved_and_can_be_judged_again(tpbed, tmp_path):
    _, out, _ = tpbed("run", "hang")
    assert "evidence  runs/hang/unexpected/ray+gloo-0/record.json" in out
    status, again, _ = tpbed("judge", "runs/hang/unexpected/ray+gloo-0/record.json")
    assert (status, again.splitlines()[1:3]) == (1, [line for line in out.splitlines()[4:6]])
    assert tpbed("judge", "runs/hang/unexpected/ray+gloo-0")[:2] == (status, again)
    assert [path.parent.parent.name for path in tmp_path.rglob("record.json")] == ["unexpected"]


def test_keep_and_out_say_what_is_saved_and_where(tpbed, tmp_path):
    tpbed("run", "hang", "--keep", "--out", "kept/here")
    assert len(list((tmp_path / "kept/here").rglob("record.json"))) == 2


def test_judge_tells_a_pass_in_full(tpbed, tmp_path):
    save_record(one_raises(), tmp_path / "record.json")
    status, out, _ = tpbed("judge", tmp_path / "record.json")
    assert status == 0
    assert f"evidence  {tmp_path}/record.json" in out.replace("\n" + " " * 10, "")
    _, out, _ = tpbed("judge", "record.json", "--json")
    assert json.loads(out)["status"] == "PASS"


def test_judge_leaves_an_undecided_record_undecided(tpbed, tmp_path):
    save_record(one_raises(fired=False), tmp_path / "record.json")
    assert tpbed("judge", "record.json")[0] == 3


def test_junit_has_every_selected_scenario(tpbed, tmp_path):
    tpbed("run", "hang", "large", "--world", "gloo", "--junit", "report.xml")
    cases = ElementTree.parse(tmp_path / "report.xml").getroot()[0]
    assert [case.get("name") for case in cases] == ["one-rank-raises", "unexpected", "a-thousand"]


def test_ctrl_c_ends_with_130_and_tells_what_was_found(tpbed, catalogue):
    catalogue["hang/z-interrupt"] = unlike(PASSES, name="hang/z-interrupt")
    status, out, _ = tpbed("run", "hang/o*", "hang/z*")
    assert status == 130
    assert last(out).startswith("interrupted: 1 scenario: 1 passed, 0 failed, 0 undecided, 1 not run here")


@pytest.mark.parametrize(("count", "lines"), [(8, 8), (9, 1)])
def test_many_scenarios_that_were_not_run_for_the_same_reason_are_one_line(tpbed, catalogue, count, lines):
    for number in range(count):
        catalogue[f"many/{number}"] = unlike(ONLY_SIM, name=f"many/{number}")
    told = [line for line in tpbed("run", "many", "--world", "gloo")[1].splitlines() if line.startswith("NOT RUN")]
    assert len(told) == lines
    assert (f"NOT RUN  {count} scenarios, many/0 to many/8  gloo cannot express it" in told[0]) == (lines == 1)


def test_ctrl_c_before_anything_is_run(tpbed, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load_catalogue", interrupt)
    assert tpbed("run")[0] == 130


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["run", "hang/one-rank-raise"],
            "no scenario matches 'hang/one-rank-raise' (near: hang/one-rank-raises, healthy/one-rank)",
        ),
        (["run", "hnag/*"], "no scenario matches 'hnag/*' (near: hang/*): `tpbed list` names all 5."),
        (["run", "never-fire"], "(near: doubt/never-fires)"),
        (["run", "hang", "zzzzzz"], "no scenario matches 'zzzzzz': `tpbed list` names all 5."),
        (["list", "zzzzzz"], "no scenario matches 'zzzzzz'"),
        (["show", "hagn"], "no scenario matches 'hagn' (near: hang/*): `tpbed list` names all 5."),
        (["run", "--tp", "5"], "no selected scenario has --tp 5: give one of 1, 4."),
        (["run", "hang", "--tp", "1"], "no selected scenario has --tp 1: give one of 4."),
        (["run", "--world", "mpi"], "unknown world 'mpi': give one of auto, sim, gloo, nccl."),
        (["list", "--kind", "hung"], "unknown kind 'hung': give one of none, hang, mismatch, "),
        (["list", "--kind", "leak"], "no selected scenario is of kind 'leak': there are none, hang, 0, 1, 10."),
        (["list", "--source", "vllm#2"], "no selected scenario shows a report like 'vllm#2'."),
        (["list", "--source", "sonar"], "dphnAI/sonar#157 is outside: Two ranks on one GPU: "),
        (["judge", "nowhere.json"], "cannot read nowhere.json: No such file or directory."),
        (["run", "--junit", "no/such/folder/x.xml"], "--junit no/such/folder/x.xml cannot be written"),
        (["run", "--junit", "."], "--junit . cannot be written: give a file in a folder that exists."),
    ],
)
def test_what_was_asked_for_wrongly_is_one_line_and_status_2(tpbed, arguments, said):
    status, out, err = tpbed(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("tpbed: ")
    assert said in err
    assert err.count("\n") == 1


def test_an_out_that_is_a_file_is_refused_before_anything_is_run(tpbed, tmp_path):
    (tmp_path / "taken").write_text("")
    status, out, err = tpbed("run", "hang", "--out", "taken")
    assert (status, out) == (2, "")
    assert err == "tpbed: --out taken is a file: give a folder, which is made if need be.\n"


def test_a_record_that_is_cut_short_or_no_record_is_one_line(tpbed, tmp_path):
    save_record(one_raises(), tmp_path / "record.json")
    whole = (tmp_path / "record.json").read_text()
    for text, said in [(whole[:200], "cut short"), ("{}", "no run record"), ("\0\xff", "not whole JSON")]:
        (tmp_path / "record.json").write_text(text)
        status, out, err = tpbed("judge", "record.json")
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert said in err


def test_an_error_of_the_test_bed_in_several_lines_is_told_in_one(tpbed, monkeypatch):
    def fail():
        raise ScenarioError("k=0\n  is too few:\nuse 1.")

    monkeypatch.setattr(cli, "load_catalogue", fail)
    status, _, err = tpbed("list")
    assert (status, err) == (2, "tpbed: k=0 is too few: use 1.\n")


def test_a_world_that_cannot_be_opened_at_all_is_one_line(tpbed, monkeypatch):
    def refuse(*arguments, **options):
        raise TestbedError("Ray at 10.0.0.1 does not answer: start it.")

    monkeypatch.setattr(runner, "open_world", refuse)
    status, out, err = tpbed("run", "hang", "--ray-address", "10.0.0.1")
    assert (status, out, last(err)) == (2, "", "tpbed: Ray at 10.0.0.1 does not answer: start it.")


def test_a_bug_of_tpbed_shows_its_traceback_and_is_no_fail(tpbed, monkeypatch):
    monkeypatch.setattr(cli, "load_catalogue", lambda: 1 / 0)
    status, _, err = tpbed("run")
    assert (status, last(err)) == (3, "ZeroDivisionError: division by zero")


def test_an_empty_catalogue_is_refused(tpbed, monkeypatch):
    monkeypatch.setattr(cli, "load_catalogue", dict)
    assert tpbed("run")[0] == 2
    assert tpbed("list")[0] == 2


def test_fail_fast_stops_and_tells_what_was_not_run(tpbed):
    _, out, _ = tpbed("run", "hang/u*", "doubt", "--fail-fast")
    assert "NOT RUN  doubt/never-fires  the run stopped before it (--fail-fast)" in out
    assert last(out).startswith("1 scenario: 0 passed, 1 failed, 0 undecided, 1 not run here")


def test_the_address_of_a_cluster_and_the_placement_reach_the_world(tpbed, monkeypatch):
    seen = []

    def open_world(choice, world_size, *, ray_address, placement, stacks, progress):
        seen.append((choice, world_size, ray_address, placement, stacks))
        return World(world_size)

    monkeypatch.setattr(runner, "open_world", open_world)
    tpbed("run", "hang", "--world", "nccl", "--ray-address", "10.0.0.1:6379")
    tpbed("run", "hang", "--world", "nccl", "--ray-address", "auto", "--placement", "spread", "--keep")
    assert seen == [("nccl", 4, "10.0.0.1:6379", "pack", False), ("nccl", 4, "auto", "spread", True)]


def test_an_unknown_placement_is_refused(tpbed):
    status, _, err = tpbed("run", "--placement", "scatter")
    assert status == 2 and "give one of pack, spread" in err


def test_a_trouble_of_the_test_bed_is_told_and_no_pass(tpbed, monkeypatch):
    monkeypatch.setattr(World, "close", lambda world: 1 / 0)
    status, out, _ = tpbed("run", "hang/o*")
    assert status == 3
    assert out.splitlines()[-2].startswith("TROUBLE  closing ray+gloo with 4 ranks failed: ")


def test_list_fits_the_terminal_and_is_whole_in_a_pipe(tpbed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, tpbed("list")[1].splitlines())) > 60
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    tpbed("list")
    assert max(map(len, screen.getvalue().splitlines())) == 60


@pytest.mark.parametrize("arguments", [["run", "--bogus"], ["run", "--tp", "two"], ["nonsense"], []])
def test_usage_errors_of_typer_have_status_2_too(tpbed, arguments):
    status, _, _ = tpbed(*arguments)
    assert status == 2


def test_doctor_prints_facts_and_the_largest_worlds(tpbed):
    status, out, _ = tpbed("doctor")
    told = json.loads(tpbed("doctor", "--json")[1])
    assert status == (0 if told["largest_world_size"]["gloo"] else 1)
    assert last(out).startswith("worlds sim: up to 1024 ranks, gloo: ")
    assert len([line for line in out.splitlines() if line.startswith(("ok ", "note ", "no "))]) == len(told["facts"])


def test_doctor_fails_where_gloo_cannot_run(tpbed, monkeypatch):
    import torch.distributed as dist

    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    status, out, _ = tpbed("doctor")
    assert (status, "gloo: no" in last(out)) == (1, True)


def test_version_names_what_it_runs_on(tpbed):
    status, out, _ = tpbed("version")
    assert (status, [line.split()[0] for line in out.splitlines()]) == (
        0,
        ["tpbed", "torch", "ray", "greenlet", "Python"],
    )
    assert [" ".join(one) for one in json.loads(tpbed("version", "--json")[1]).items()] == out.splitlines()


# Schedules.

TIMED = """
import torch
import torch.distributed as dist

def quiet(rank):
    dist.barrier()

def hasty(rank):
    work = dist.all_reduce(torch.ones(1), async_op=True)
    if work.is_completed():
        dist.barrier()

def overlaps(rank):
    dist.all_reduce(torch.ones(1), async_op=True).wait()

def lonely():
    pass
"""


@pytest.fixture
def timed(tpbed, tmp_path, monkeypatch):
    """The name of a module with rank programs, in the working folder."""
    (tmp_path / "timed_programs.py").write_text(TIMED)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "timed_programs"
    sys.modules.pop("timed_programs", None)


def test_explore_tells_that_all_schedules_are_free_or_the_shortest_that_is_not(tpbed, timed):
    status, out, _ = tpbed("explore", f"{timed}:quiet", "--tp", 3)
    assert (status, out) == (
        0,
        "all 36 schedules at TP=3 are free of hangs and other findings (1 run stands for them)\n",
    )
    status, out, _ = tpbed("explore", f"{timed}:hasty")
    assert (status, last(out)) == (1, "again     tpbed explore timed_programs:hasty --tp 2 --schedule 0,0")
    replayed, told, _ = tpbed(*last(out).split()[2:])
    assert (replayed, last(told)) == (1, last(out))
    assert tpbed("explore", f"{timed}:hasty", "--schedule", "round-robin")[0] == 0


def test_explore_without_an_answer_ends_with_3_and_what_was_found_outweighs_it(tpbed, timed):
    status, out, _ = tpbed("explore", f"{timed}:overlaps", "--max-runs", 1)
    assert (status, out[:10]) == (3, "undecided:")
    assert tpbed("explore", f"{timed}:overlaps", f"{timed}:hasty", "--max-runs", 1)[0] == 1
    assert [tpbed("explore", f"{timed}:{name}", "--random", 50)[0] for name in ("overlaps", "hasty")] == [0, 1]


def test_explore_as_json_has_what_replays(tpbed, timed):
    told = json.loads(tpbed("explore", f"{timed}:hasty", "--json")[1])
    assert (told["answer"], told["orders"], told["schedule"], told["findings"][0]["ranks"]) == ("found", 6, "0,0", [0])
    assert told["again"] == "tpbed explore timed_programs:hasty --tp 2 --schedule 0,0"


def test_explore_takes_scenarios_too(tpbed, catalogue):
    status, out, _ = tpbed("explore", SMALL.name)
    assert (status, out.partition(" are ")[0]) == (0, "all 1 schedules at TP=1")
    status, out, _ = tpbed("explore", PASSES.name)
    assert (status, last(out)) == (1, f"again     tpbed run {PASSES.name} --schedule round-robin")


@pytest.mark.parametrize("target", ["no_such_module:f", "timed_programs:f", "timed_programs:lonely", "no/scenario"])
def test_what_cannot_be_explored_is_told_in_one_line(tpbed, timed, target):
    status, _, err = tpbed("explore", target)
    assert status == 2 and len(err.splitlines()) == 1


@pytest.mark.parametrize("world", ["gloo", "nccl"])
def test_only_simulated_ranks_follow_a_schedule(tpbed, world):
    status, _, err = tpbed("run", "hang", "--world", world, "--schedule", "0,1")
    assert status == 2 and f"who runs next in --world {world}" in err


@pytest.mark.parametrize(
    ("word", "told"),
    [("zero", "'zero' is none of round-robin"), ("0,9", "a turn to rank 9, and 4 ranks are 0 to 3"), ("-1", "rank -1")],
)
def test_a_schedule_that_is_none_is_told_before_anything_runs(tpbed, word, told):
    status, out, err = tpbed("run", "hang/one-rank-raises", "--world", "sim", f"--schedule={word}")
    assert (status, out) == (2, "") and told in last(err)


def test_run_follows_a_schedule_in_the_simulated_world(tpbed, catalogue, monkeypatch):
    from tpbed.harness.worlds import open_world

    monkeypatch.setattr(runner, "open_world", open_world)
    status, out, _ = tpbed("run", FAILS.name, "--schedule", "seed:4", "--json")
    told = json.loads(out.splitlines()[0])
    assert (status, told["world"], told["schedule"]) == (1, "sim", "seed:4")
    assert told["again"] == f"tpbed run {FAILS.name} --seed 0 --world sim --schedule seed:4"
