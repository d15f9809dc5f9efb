"""Plans and records: the same seed is the same plan, and a record judged from its file says the same."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import get_args

import pytest
from pydantic import TypeAdapter
from test_catalogue import simulate

from tpbed.harness.faults import Fault, Raise, describe
from tpbed.harness.plan import Plan, make_plan
from tpbed.harness.record import RecordError, load_record, save_record
from tpbed.harness.scenario import Scenario, ScenarioError
from tpbed.harness.verdict import judge
from tpbed.scenarios import CATALOGUE

PLAIN = Scenario(name="plain", claim="Plain.", kind=0)


def test_a_seed_repeats_a_plan_and_another_seed_does_not():
    assert make_plan(PLAIN, seed=3) == make_plan(PLAIN, seed=3) != make_plan(PLAIN, seed=4)


def test_scenarios_of_the_same_seed_draw_for_themselves():
    assert make_plan(PLAIN, seed=3).weight_seed != make_plan(replace(PLAIN, name="other"), seed=3).weight_seed


@pytest.mark.parametrize(
    "name",
    [
        "hang/crop-tail-rank",
        "mismatch/local-fast-path",
        "ties/nan-marks-its-row",
        "lifecycle/killed-rank",
        "lifecycle/segfault",
    ],
)
def test_a_record_from_its_file_is_the_record_and_is_judged_alike(name, tmp_path):
    record = simulate(name)
    save_record(record, tmp_path / "deep" / "record.json")
    loaded = load_record(tmp_path / "deep" / "record.json")
    assert repr(loaded) == repr(record)  # NaN is not equal to itself
    assert replace(judge(loaded), record=record) == replace(judge(record), record=record)


@pytest.mark.parametrize("kept", [0, 1, 200, -2])
def test_a_file_that_was_cut_short_is_refused_in_one_line(kept, tmp_path):
    save_record(simulate("healthy/tp1"), tmp_path / "record.json")
    text = (tmp_path / "record.json").read_text()
    (tmp_path / "record.json").write_text(text[:kept])
    with pytest.raises(RecordError, match="cut short") as caught:
        load_record(tmp_path / "record.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[]", "{}", '{"plan": 3}'])
def test_json_that_is_no_record_is_refused_with_the_place(text, tmp_path):
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(RecordError, match="no run record"):
        load_record(tmp_path / "record.json")


def drop_a_ledger(record):
    record["ledgers"].pop(1)


def drop_liveness(record):
    record["liveness"] = []


def swap_ledgers(record):
    record["ledgers"].reverse()


def shrink_the_world(record):
    record["plan"]["scenario"]["world_size"] = -3


def resize_a_ledger(record):
    record["ledgers"][0]["world_size"] = 7


def name_a_stranger(record):
    record["ledgers"][0]["groups"]["pair"] = [0, 9]


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (drop_a_ledger, "the ledgers of 0, 2, 3, and world_size=4 needs one of each rank"),
        (drop_liveness, "the liveness of 0 ranks, and world_size=4 needs that of each rank"),
        (swap_ledgers, "the ledgers of 3, 2, 1, 0"),
        (shrink_the_world, "world_size=-3: give 1 or more"),
        (resize_a_ledger, "ranks that world_size=4 does not have"),
        (name_a_stranger, "ranks that world_size=4 does not have"),
    ],
)
def test_a_record_in_which_something_is_missing_or_impossible_is_refused(spoil, told, tmp_path):
    path = tmp_path / "record.json"
    save_record(simulate("hang/one-rank-raises"), path)
    record = json.loads(path.read_text())
    spoil(record)
    path.write_text(json.dumps(record))
    with pytest.raises(RecordError, match=told) as caught:
        load_record(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(RecordError, match="cannot read"):
        load_record(tmp_path / "none.json")


def test_a_record_is_json_that_other_tools_can_read(tmp_path):
    save_record(simulate("hang/one-rank-raises"), tmp_path / "record.json")
    stored = json.loads((tmp_path / "record.json").read_text())
    assert stored["ledgers"][2]["end"]["error_type"] == "InjectedError"


@pytest.mark.parametrize("name", [scenario.name for scenario in CATALOGUE.values() if scenario.faults])
def test_a_plan_with_faults_survives_json(name):
    plan, plans = make_plan(CATALOGUE[name], seed=7), TypeAdapter(Plan)
    stored = json.dumps(plans.dump_python(plan))  # as records are written: with NaN and infinities
    assert repr(plans.validate_python(json.loads(stored))) == repr(plan)


def test_every_fault_is_in_the_catalogue_and_shown_as_it_is_called():
    used = {fault.kind: describe(fault).partition("@")[0] for one in CATALOGUE.values() for fault in one.faults}
    assert used == {kind: kind for kind in used} and len(used) == len(get_args(Fault))


def test_a_fault_on_a_rank_that_is_not_there_is_refused():
    with pytest.raises(ScenarioError, match="ranks 0 to 3"):
        replace(PLAIN, faults=(Raise(rank=4, seq=1),))


def test_more_planted_rows_than_hidden_dimensions_are_refused():
    with pytest.raises(ScenarioError, match="hidden_size is 64"):
        replace(PLAIN, rows=65)


def test_scenarios_of_the_catalogue_can_be_planned():
    assert all(len(make_plan(scenario, seed=0).step_seeds) == scenario.steps for scenario in CATALOGUE.values())
