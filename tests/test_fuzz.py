"""The fuzzer: what it finds is small, told in sentences and replayed from a file; it repeats itself, and resumes."""

import json
from dataclasses import replace
from math import inf, nan

import pytest

from tpbed.harness import cli, properties, runner
from tpbed.harness.case import load_case, save_case
from tpbed.harness.coverage import Cell, cell_of, covered, reachable
from tpbed.harness.faults import Absent, Delay, Leave, Linger, Raise
from tpbed.harness.fuzz import BATCH, FuzzError, Search, Tally, fuzz, recall, resumed, run_batch
from tpbed.harness.plan import make_plan
from tpbed.harness.portrait import describe_plan
from tpbed.harness.properties import Simulator
from tpbed.harness.runner import run_plan
from tpbed.harness.scenario import Overwrite, Scenario
from tpbed.harness.selectors import SelectorError
from tpbed.harness.verdict import judge
from tpbed.tp.simulated import SimulatedWorld

pytestmark = pytest.mark.usefixtures("one_thread")
WRONG = Search(selectors=("worst-first",), world_sizes=(2, 4))
RIGHT = Search(world_sizes=(1, 2))


@pytest.fixture(scope="module")
def wrong():
    """A search of a wrong selector."""
    return fuzz(WRONG, examples=BATCH)


@pytest.fixture(scope="module")
def right():
    """A search of the right ones."""
    return fuzz(RIGHT, examples=3 * BATCH)


@pytest.fixture
def tpbed(capsys, tmp_path, monkeypatch):
    """The command line in an empty folder: exit status, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        with pytest.raises(SystemExit) as end:
            cli.main(["fuzz", "--jobs", "1", *map(str, words)])
        return end.value.code, *capsys.readouterr()

    return run


def replayed(plan):
    with SimulatedWorld(plan.scenario.world_size) as world:
        return run_plan(world, plan)


def test_nothing_is_found_in_the_right_selectors_and_all_examples_are_run(right):
    assert right.tally.found == []
    assert right.tally.examples == 3 * BATCH
    assert right.tally.runs > right.tally.examples


def test_a_wrong_selector_is_found_and_the_example_is_as_small_as_can_be(wrong):
    [found] = wrong.tally.found
    scenario = found.plan.scenario
    assert found.name == "right_order"
    assert (scenario.world_size, scenario.org_vocab_size, scenario.rows, scenario.k) == (2, 2, 1, 2)
    assert (scenario.steps, scenario.head, scenario.logits, scenario.overwrites) == (1, "fp32", "distinct", ())


def test_a_case_of_what_was_found_fails_again_and_passes_when_the_selector_is_mended(wrong, tmp_path):
    save_case(wrong.tally.found[0].case(), tmp_path / "found.tpbed.json")
    plan = load_case(tmp_path / "found.tpbed.json").plan
    assert replayed(plan).status == "FAIL"
    assert replayed(replace(plan, scenario=replace(plan.scenario, selector="tpbed"))).status == "PASS"


def test_pytest_replays_the_case(wrong, pytester):
    save_case(wrong.tally.found[0].case(), pytester.path / "found.tpbed.json")
    result = pytester.runpytest_inprocess("found.tpbed.json", "-p", "no:cacheprovider")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["FAIL  fuzz/right_order*"])


def test_a_diagnosis_that_names_the_wrong_rank_is_found_and_its_case_passes_when_it_is_mended(monkeypatch):
    def blames_rank_zero(record):
        verdict = judge(record)
        named = tuple(replace(one, ranks=(0,)) if one.kind == "hang" else one for one in verdict.findings)
        return replace(verdict, findings=named)

    with monkeypatch.context() as patch:
        patch.setattr(properties, "judge", blames_rank_zero)
        [found] = run_batch(replace(RIGHT, world_sizes=(2,)), 1).found
        plan = found.case().plan
        assert found.name == "faults_diagnosed"
        assert len(plan.scenario.faults) == 1
        assert replayed(plan).status == "FAIL"
    assert replayed(plan).status == "PASS"


def test_a_judgement_that_crashes_is_found(monkeypatch):
    def crashes(record, steps):
        raise ZeroDivisionError("of a check")

    monkeypatch.setattr(properties, "check_ranks_agree", crashes)
    [found] = run_batch(RIGHT, 0, examples=5).found
    assert found.text == "judging the run failed: ZeroDivisionError('of a check')"


def test_a_batch_repeats_itself():
    one, again = (run_batch(RIGHT, 7, examples=40) for _ in range(2))
    assert (one.cells, one.runs, one.examples) == (again.cells, again.runs, again.examples)
    assert one.cells != run_batch(RIGHT, 9, examples=40).cells


def test_two_processes_find_what_one_finds(wrong):
    assert fuzz(WRONG, examples=BATCH, jobs=2).tally.found == wrong.tally.found


def test_what_was_found_is_kept_and_found_first_of_all_the_next_time(tmp_path):
    search = replace(WRONG, database=tmp_path)
    assert recall(search).found == []
    first = fuzz(search, examples=BATCH)
    again = fuzz(search, examples=BATCH)
    assert [one.plan for one in again.tally.found] == [one.plan for one in first.tally.found]
    assert again.tally.examples < first.tally.examples
    assert again.batches == 0  # no batch was needed
    assert (first.recalled, again.recalled) == (False, True)


def test_a_search_goes_on_after_the_batches_of_the_last_one_with_its_seed(tmp_path):
    search = replace(RIGHT, world_sizes=(1,), faults=False, database=tmp_path)
    report = fuzz(search, examples=BATCH + 1)
    assert (report.batches, resumed(search), resumed(replace(search, seed=1))) == (2, 2, 0)
    fuzz(search, examples=1)
    assert resumed(search) == 2
    assert fuzz(search, examples=1, first=resumed(search)).batches == 3
    assert resumed(replace(search, world_sizes=(2,))) == 0


def test_a_file_of_batches_that_was_cut_short_is_told(tmp_path):
    search = replace(RIGHT, database=tmp_path)
    search.folder().mkdir()
    (search.folder() / "batches.json").write_text('{"0": ')
    with pytest.raises(FuzzError, match="is not whole"):
        resumed(search)


def test_nothing_is_drawn_when_the_time_is_up():
    assert run_batch(RIGHT, 0, until=0.0).examples == 0


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        ({}, "give one of them"),
        ({"seconds": 0}, "give more than 0"),
        ({"seconds": nan, "examples": 1}, "give more than 0"),
        ({"examples": 0}, "give more than 0"),
        ({"examples": 1, "jobs": 0}, "give more than 0"),
    ],
)
def test_a_search_needs_a_bound_that_allows_something(bounds, says):
    with pytest.raises(FuzzError, match=says):
        fuzz(RIGHT, **bounds)


def test_ranks_that_are_processes_are_searched_by_one():
    with pytest.raises(FuzzError, match="give --jobs 1"):
        fuzz(replace(RIGHT, world="gloo"), examples=1, jobs=2)


@pytest.mark.parametrize(
    ("drawn", "error"),
    [
        ({"selectors": ("no-such",)}, SelectorError),
        ({"topks": ("no-such",)}, FuzzError),
        ({"world_sizes": (0,)}, FuzzError),
    ],
)
def test_a_search_of_what_there_is_not_is_refused(drawn, error):
    with pytest.raises(error):
        Search(**drawn)


def test_of_what_was_found_for_a_property_the_first_is_kept(wrong):
    [found] = wrong.tally.found
    total = Tally(examples=1, found=[found])
    total.add(Tally(examples=2, found=[replace(found, text="later")]))
    assert (total.examples, total.found) == (3, [found])


def test_every_fault_strikes_at_every_place_that_it_can_in_a_simulated_world():
    search, total, number = replace(RIGHT, world_sizes=(2,)), Tally(), 1
    while set(search.reachable()) - set(total.cells) and number < 400:
        total.add(run_batch(search, number))
        number += 2
    assert set(search.reachable()) == set(total.cells)
    assert total.found == []


def test_arrivals_can_be_covered_by_processes_alone_and_collectives_by_more_than_one_rank():
    kinds = {world: {cell.kind for cell in reachable(("tpbed",), (2,), world)} for world in ("sim", "gloo")}
    assert kinds["gloo"] - kinds["sim"] == {"absent", "late"}
    assert Cell("raise", "first") not in reachable(("tpbed",), (1,), "sim")
    assert "spin" not in {cell.kind for cell in reachable(("full-gather",), (2,), "sim")}


SCENARIO = Scenario(
    name="fuzz/case",
    claim="",
    kind=0,
    world_size=2,
    org_vocab_size=5,
    pad_to=8,
    hidden_size=16,
    rows=2,
    k=2,
    steps=2,
    pad_fill=inf,
    overwrites=(Overwrite(row=1, token_id=4, value=-inf),),
)


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        (Raise(rank=0, seq=1), "first"),
        (Raise(rank=0, seq=3), "between"),
        (Raise(rank=0, seq=4), "last"),
        (Raise(rank=0, seq=5), "past"),
        (Leave(rank=0, step=1), "last"),
        (Linger(rank=0), "end"),
        (Absent(rank=0), "start"),
    ],
)
def test_a_fault_is_counted_where_it_is_planned(fault, place):
    assert cell_of(fault, SCENARIO) == Cell(fault.kind, place)


def test_a_fault_that_did_not_strike_covers_nothing():
    plan = make_plan(replace(SCENARIO, faults=(Raise(rank=0, seq=1), Leave(rank=0, step=1))), seed=0)
    assert covered(Simulator()(plan)) == [Cell("raise", "first")]


def test_a_plan_is_described_as_a_person_would():
    plan = make_plan(replace(SCENARIO, faults=(Delay(rank=1, seq=2, seconds=0.5),)), seed=0, schedule="seed:3")
    assert describe_plan(replace(plan, shard_order=(1, 0), row_order=(1, 0))) == [
        "2 ranks share 5 tokens. Real tokens in columns: rank 0 1 in 4, rank 1 4 in 4.",
        "The selector tpbed with the top-k contract is asked for 2 rows, k=2, 2 steps.",
        "The head is bf16; its padding holds inf; all logits of a row differ.",
        "Planted: token 4 of row 1 has the logit -inf.",
        "Fault delay@rank=1,seq=2,seconds=0.5: The rank is late by `seconds`.",
        "The rows come in the order 1, 0.",
        "The shards come in the order 1, 0.",
        "Ranks take turns as seed:3 says.",
    ]


def test_the_command_tells_the_smallest_example_and_writes_the_case_that_it_names(tpbed):
    status, out, err = tpbed("--selector", "worst-first", "--tp", "2,4", "--examples", BATCH, "--no-confirm")
    assert status == 1
    assert "FOUND  right_order does not hold. The smallest example:\n          2 ranks share 2 tokens." in out
    assert "again     tpbed run runs/fuzz/right_order.tpbed.json --world sim" in out
    assert "1 found: " in out and "without faults" in err
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "runs/fuzz/right_order.tpbed.json", "--world", "sim"])
    assert end.value.code == 1


def test_the_command_finds_nothing_in_the_right_selectors_and_says_what_faults_it_tried(tpbed):
    status, out, err = tpbed("--tp", "1", "--examples", BATCH + 20, "--json")
    told = json.loads(out)
    assert (status, told["examples"], told["found"]) == (0, BATCH + 20, [])
    assert told["covered"]
    assert "kinds of faults" in err


def test_cells_that_stay_empty_are_listed_and_fail(tpbed):
    status, out, _ = tpbed("--tp", "2", "--examples", 2, "--coverage")
    assert status == 1
    assert "cells are empty: raise first, " in out


@pytest.mark.parametrize(
    "words",
    [
        ["--world", "moon"],
        ["--tp", "two"],
        ["--tp", "0"],
        ["--topk", "no-such"],
        ["--selector", "no-such"],
        ["--examples", "0"],
        ["--selector", "worst-first", "--coverage"],
        ["--no-faults", "--coverage"],
    ],
)
def test_what_cannot_be_searched_is_refused_in_one_line(tpbed, words):
    status, out, err = tpbed(*words)
    assert (status, out) == (2, "")
    assert len([line for line in err.splitlines() if line.startswith("tpbed: ")]) == 1


@pytest.mark.parametrize(
    ("session", "says"),
    [("no Ray here", "not tried: Ray did not start (no Ray here)"), ("FAIL", "yes, it fails there, too")],
)
def test_what_is_found_is_run_over_gloo_where_ray_can_start(tpbed, monkeypatch, session, says, wrong):
    def runs(plans, *, world, on_progress):
        if session != "FAIL":
            raise RuntimeError(session)
        assert (world, plans[0].schedule, plans[0].must_hold) == ("gloo", "", "right_order")
        return runner.Session(runs=(runner.Run(verdict=replayed(plans[0])),), not_run=())

    monkeypatch.setattr(runner, "run_plans", runs)
    status, out, _ = tpbed("--selector", "worst-first", "--tp", "2", "--examples", BATCH)
    assert status == 1
    assert f"on gloo   {says}" in out
