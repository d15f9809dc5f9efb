"""Cases: a plan in a file is the same plan again, in a report that names the file, and under pytest."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tpbed.harness import cli
from tpbed.harness.case import Case, CaseError, load_case, save_case
from tpbed.harness.faults import Delay, Nudge, Raise
from tpbed.harness.plan import make_plan
from tpbed.harness.scenario import Expected, Overwrite, Scenario

PLAIN = Scenario(name="fuzz/plain", claim="It passes.", kind=0, world_size=2)
RAISES = replace(PLAIN, name="fuzz/raises", faults=(Raise(rank=1, seq=2, message="out of memory"),))
EXPECTED = replace(RAISES, expect=(Expected(kind="hang", ranks=(1,)),))
ODD = replace(
    PLAIN,
    pad_fill=math.nan,
    overwrites=(Overwrite(row=0, token_id=3, value=-math.inf),),
    faults=(Delay(rank=0, seq=1, seconds=0.5), Nudge(rank=1, step=0, row=0, column=3, value=math.inf)),
)


def case(scenario, **plan):
    return Case(about="what it shows", plan=replace(make_plan(scenario, seed=7), **plan))


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Writes a case into the working folder; returns the name of its file."""
    monkeypatch.chdir(tmp_path)

    def write(scenario, name="my.tpbed.json", **plan):
        save_case(case(scenario, **plan), Path(name))
        return name

    return write


@pytest.fixture
def tpbed(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            cli.main([str(argument) for argument in arguments])
        return end.value.code, *capsys.readouterr()

    return run


def test_a_case_that_is_read_again_is_the_same_but_for_the_file_that_its_plan_names(tmp_path):
    path = tmp_path / "new" / "odd.json"
    first = case(ODD, weight_seed=1, step_seeds=(2, 3, 4), schedule="0,1", asked=("elsewhere",))
    save_case(first, path)
    again = load_case(path)
    assert again.plan.asked == (str(path),)
    assert repr(replace(again, plan=replace(again.plan, asked=()))) == repr(
        replace(first, plan=replace(first.plan, asked=()))
    )  # as text, since NaN is not equal to NaN


def misspell(case):
    case["plan"]["scenario"]["worldsize"] = 2


def misspell_in_a_fault(case):
    case["plan"]["scenario"]["faults"][0]["time"] = 2


def lose_a_seed(case):
    case["plan"]["step_seeds"].pop()


def mistype(case):
    case["plan"]["scenario"]["rows"] = "many"


def strike_a_stranger(case):
    case["plan"]["scenario"]["faults"][0]["rank"] = 9


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (misspell, "plan.scenario.worldsize is not known"),
        (misspell_in_a_fault, "plan.scenario.faults.0.time is not known"),
        (lose_a_seed, "it has 2 step_seeds, and steps=3 need one each"),
        (mistype, "plan.scenario.rows - Input should be a valid integer"),
        (strike_a_stranger, "a fault strikes rank 9, and world_size=2 has ranks 0 to 1"),
    ],
)
def test_a_file_that_is_no_case_is_refused_with_the_place_and_what_to_do(file, spoil, told):
    name = file(RAISES)
    stored = json.loads(Path(name).read_text())
    spoil(stored)
    Path(name).write_text(json.dumps(stored))
    with pytest.raises(CaseError, match=told) as caught:
        load_case(Path(name))
    assert str(caught.value).startswith(name) and "\n" not in str(caught.value)


def test_a_file_that_is_cut_short_or_missing_is_refused(file, tpbed):
    name = file(RAISES)
    Path(name).write_text(Path(name).read_text()[:-20])
    with pytest.raises(CaseError, match="not whole JSON"):
        load_case(Path(name))
    status, out, error = tpbed("run", "none.json")
    assert (status, out) == (2, "") and error.startswith("tpbed: cannot read none.json: No such file")


def test_run_takes_cases_beside_scenarios_and_the_report_names_the_file(file, tpbed):
    status, out, _ = tpbed("run", "healthy/tp4-padded-tail", file(RAISES), "--world", "sim")
    assert status == 1
    assert [line.split()[:2] for line in out.splitlines() if line.startswith(("PASS", "FAIL"))][:2] == [
        ["FAIL", "fuzz/raises"],
        ["PASS", "healthy/tp4-padded-tail"],
    ]
    assert "cause rank 1 raised InjectedError" in out
    assert "again     tpbed run my.tpbed.json --world sim\n" in out


def test_a_case_has_its_own_seeds_and_schedule(file, tpbed):
    name = file(RAISES, weight_seed=5, step_seeds=(1, 2, 3), schedule="1,0")
    tpbed("run", name, "--seed", 99)  # and in the simulated world, since nothing else follows a schedule
    plan = json.loads(Path("runs/fuzz/raises/sim-7/record.json").read_text())["plan"]
    assert (plan["seed"], plan["weight_seed"], plan["step_seeds"], plan["schedule"]) == (7, 5, [1, 2, 3], "1,0")


def test_a_schedule_for_a_case_is_said_in_the_line_that_repeats_it(file, tpbed):
    _, out, _ = tpbed("run", file(RAISES), "--schedule", "1,1")
    assert "again     tpbed run my.tpbed.json --world sim --schedule 1,1\n" in out


def test_simulated_ranks_take_turns_as_the_seed_of_the_case_says_and_not_the_option(file, tpbed):
    def order(seed, option):
        """What the ranks did, with the virtual times of it."""
        tpbed("run", file(RAISES, seed=seed), "--world", "sim", "--seed", option)
        return json.loads(Path(f"runs/fuzz/raises/sim-{seed}/record.json").read_text())["ledgers"]

    first = order(7, 0)
    assert order(7, 1) == first != order(8, 0)


def test_show_tells_a_case_and_list_knows_no_files(file, tpbed):
    name = file(RAISES, schedule="0,1")
    told = dict(line.split(maxsplit=1) for line in tpbed("show", name)[1].splitlines() if not line.startswith(" "))
    assert (told["about"], told["seed"], told["name"], told["schedule"]) == ("what it shows", "7", "fuzz/raises", "0,1")
    assert tpbed("list", name)[0] == 2


def test_pytest_collects_case_files_and_fails_with_their_report(pytester, monkeypatch):
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    for name, scenario in {"good": PLAIN, "found": EXPECTED, "bad": RAISES}.items():
        save_case(case(scenario), pytester.path / "cases" / f"{name}.tpbed.json")
    (pytester.path / "cases" / "other.json").write_text("{}")
    (pytester.path / "cases" / "broken.tpbed.json").write_text("{")
    outcome = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:xdist", "cases")
    outcome.assert_outcomes(passed=2, failed=2)
    outcome.stdout.fnmatch_lines_random(
        ["hang * waits for rank 1*", "cause rank 1 raised InjectedError*", "again *run *bad.tpbed.json --world sim"]
    )
    outcome.stdout.fnmatch_lines(["*broken.tpbed.json is not whole JSON*"])
    outcome.stdout.no_fnmatch_line("*Traceback*")


def test_pytest_skips_a_case_that_its_world_cannot_express_and_says_which_can(pytester, monkeypatch):
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    save_case(case(replace(PLAIN, worlds=("gloo",))), pytester.path / "real.tpbed.json")
    outcome = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:xdist", "-rs", "real.tpbed.json")
    outcome.assert_outcomes(skipped=1)
    outcome.stdout.fnmatch_lines(["*sim cannot express it: give --tp-world gloo*"])


@pytest.mark.parametrize(
    ("scenario", "plan", "told"),
    [
        ({"name": "../../else/where"}, {}, "name='../../else/where': give words of letters"),
        ({"name": "/else/where"}, {}, "name='/else/where': give words of letters"),
        ({"steps": 0}, {"step_seeds": ()}, "steps=0"),
        ({"rows": -1}, {}, "rows=-1"),
        ({"stall_after_s": -1.0}, {}, "stall_after_s=-1.0: give more than 0"),
        ({}, {"row_order": (99,)}, "row_order has [99], and there are rows 0 to 3"),
        ({}, {"shard_order": (0, 0)}, "name each rank once"),
    ],
)
def test_a_file_with_what_no_run_can_have_is_no_case(file, tpbed, scenario, plan, told):
    path = Path(file(PLAIN))
    given = json.loads(path.read_text())
    given["plan"] |= plan
    given["plan"]["scenario"] |= scenario
    path.write_text(json.dumps(given))
    status, out, err = tpbed("run", path, "--world", "sim", "--out", "kept", "--keep")
    assert (status, out) == (2, "") and "is no case" in err and told in err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("delay@rank=0,seq=1,ms=-5", "delay with seconds=-0.005: give 0 to 86,400.0."),
        ("delay@rank=0,seq=1,ms=nan", "delay with seconds=nan"),
        ("delay@rank=0,seq=1,ms=1e99", "delay with seconds=9.99"),
        ("raise@rank=0,seq=1,times=0", "raise with times=0: give 1 to"),
        ("raise@rank=0,seq=0", "raise with seq=0: give 1 to"),
    ],
)
def test_numbers_that_no_fault_can_have_are_usage_errors(tpbed, text, told):
    status, out, err = tpbed("run", "--fault", text, "--world", "sim")
    assert (status, out) == (2, "") and told in err


def test_a_selector_without_a_name_and_a_module_that_exits_are_usage_errors(tpbed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("leaves_at_once.py").write_text("raise SystemExit(5)")
    assert tpbed("run", "--selector", "", "--world", "sim")[0] == 2
    status, _, err = tpbed("run", "healthy/tp1", "--selector", "leaves_at_once:select", "--world", "sim")
    assert status == 2 and "SystemExit: 5" in err
