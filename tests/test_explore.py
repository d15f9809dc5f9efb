"""Searches of schedules as users ask for them: the answer in words, its replay, and the catalogue's timed troubles."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist

from tpbed.harness.explore import SearchSettingError, explore_schedules, replay, scenario_program
from tpbed.harness.ranks import Ranks, RanksFailed, UndecidedError
from tpbed.harness.record import RunRecord, load_record, save_record
from tpbed.harness.report import again
from tpbed.harness.runner import run_scenario
from tpbed.harness.scenario import Scenario, ScenarioError
from tpbed.harness.schedules import ROUND_ROBIN, ScheduleTextError, following, read_schedule, tell_schedule
from tpbed.harness.timed import TIMED
from tpbed.scenarios import CATALOGUE
from tpbed.scenarios.schedule import SCENARIOS
from tpbed.tp.simulated import SimulatedWorld

pytestmark = pytest.mark.usefixtures("one_thread")


def barriers(rank):
    for _ in range(2):
        dist.barrier()


def hasty(rank):
    """Leaves if it asks before the other has come."""
    work = dist.all_reduce(torch.ones(1), async_op=True)
    if work.is_completed():
        dist.barrier()


def spins(rank):
    work = dist.all_reduce(torch.ones(1), async_op=True)
    while not work.is_completed():
        pass


def shared_between_runs():
    """A program that does less when it is run again."""
    runs = []

    def program(rank):
        runs.append(rank)
        for _ in range(3 if len(runs) <= 2 else 1):
            dist.all_reduce(torch.ones(1), async_op=True).wait()

    return program


# The answer.


def test_one_run_is_told_to_stand_for_all_orders():
    told = explore_schedules(barriers, 4).told("")
    assert told == "all 13,824 schedules at TP=4 are free of hangs and other findings (1 run stands for them)"


def test_the_shortest_schedule_is_explained_as_any_hang_and_replays():
    explored = explore_schedules(hasty, 2, target="mine:hasty")
    lines = explored.told("tpbed again").splitlines()
    assert lines[0] == "the shortest schedule of mine:hasty at TP=2 that shows a finding: 0,0 (4 runs)"
    assert "barrier seq 2 of group world waits for rank 0, which can never join" in lines[1]
    assert lines[2].startswith("cause rank 0 returned after all_reduce seq 1")
    assert lines[-1] == "again     tpbed again"
    assert replay(hasty, 2, explored.schedule).run.ledgers == explored.run.ledgers
    assert replay(hasty, 2, ROUND_ROBIN).answer == "free"


def test_that_ranks_were_held_back_is_said():
    explored = explore_schedules(spins, 2)
    assert explored.answer == "free"
    assert explored.headline().endswith("; a rank that asked 2 times in vain let the others go first)")


def test_polling_ranks_are_searched_in_few_runs():
    explored = explore_schedules(spins, 3)
    assert (explored.answer, explored.runs) == ("free", 36)


def test_too_many_schedules_are_undecided_and_can_be_drawn():
    explored = explore_schedules(spins, 4, max_runs=5)
    assert explored.answer == "undecided" and explored.headline().startswith("undecided: more schedules than 5 runs")
    drawn = explore_schedules(spins, 4, samples=5)
    assert drawn.headline() == "all 5 schedules that were drawn at TP=4 are free of hangs and other findings"


def test_a_schedule_that_was_drawn_replays_from_its_seed():
    explored = explore_schedules(hasty, 2, samples=100)
    assert explored.schedule.startswith("seed:")
    assert replay(hasty, 2, explored.schedule).run.ledgers == explored.run.ledgers


def test_a_program_that_does_not_repeat_itself_is_undecided():
    explored = explore_schedules(shared_between_runs(), 2)
    assert explored.answer == "undecided" and "keep nothing from one run to the next" in explored.why


@pytest.mark.parametrize("setting", [{"max_runs": 0}, {"patience": 0}, {"samples": 0}])
def test_a_search_of_nothing_is_refused(setting):
    with pytest.raises(SearchSettingError, match="=0"):
        explore_schedules(barriers, 2, **setting)


# Schedules in a word.


@pytest.mark.parametrize("text", [ROUND_ROBIN, "seed:17", "0,1,1,0"])
def test_a_schedule_is_told_as_it_is_read(text):
    assert tell_schedule(read_schedule(text)) == text


@pytest.mark.parametrize("text", ["0,,1", "seed:", "first come", "0;1"])
def test_a_word_that_says_no_schedule_is_refused(text):
    with pytest.raises(ScheduleTextError, match="none of round-robin, seed:17"):
        read_schedule(text)


def test_only_simulated_worlds_follow_a_schedule_and_they_find_back_to_their_own():
    world = SimulatedWorld(2)
    own = world.schedule
    with following(world, "seed:1"):
        assert world.schedule is not own
    assert world.schedule is own

    class Other:
        name = "ray+gloo"

    with pytest.raises(ScheduleTextError, match="this one is ray\\+gloo"), following(Other(), "seed:1"):
        pass


def test_a_scenario_with_a_schedule_is_for_simulated_ranks_alone():
    with pytest.raises(ScenarioError, match="worlds=\\('sim',\\)"):
        Scenario(name="timed", claim="Timed.", kind=0, schedule="0,0")


# Ranks.


def test_ranks_search_and_tell_what_replays():
    with Ranks() as ranks:
        assert ranks(barriers, world_size=3, schedules="all") == (None,) * 3
        with pytest.raises(RanksFailed, match="schedule=\"0,0\" instead of schedules='all'") as failed:
            ranks(hasty, world_size=2, schedules="all")
        with pytest.raises(RanksFailed, match="waits for rank 0"):
            ranks(hasty, world_size=2, schedule=failed.value.schedule)
        with pytest.raises(RanksFailed, match="schedule seed:"):
            ranks(hasty, world_size=2, schedules=100)
        assert ranks(hasty, world_size=2) == (None, None)


def test_ranks_that_could_not_be_searched_do_not_pass(monkeypatch):
    with Ranks() as ranks, pytest.raises(UndecidedError, match="do not|keep nothing"):
        ranks(shared_between_runs(), world_size=2, schedules="all")


@pytest.mark.parametrize("asked", [{"schedules": "some"}, {"schedules": 0}, {"schedules": "all", "world": "gloo"}])
def test_what_cannot_be_searched_is_refused(asked):
    with Ranks() as ranks, pytest.raises(ScheduleTextError, match="schedules="):
        ranks(barriers, world_size=2, **asked)


# The catalogue.

TROUBLED = [scenario.name for scenario in SCENARIOS if scenario.expect]
CONTROLS = [scenario.name for scenario in SCENARIOS if not scenario.expect]


@cache
def searched(name):
    scenario = CATALOGUE[name]
    program, find = scenario_program(scenario, seed=0)
    return explore_schedules(program, scenario.world_size, find=find)


@pytest.mark.parametrize("name", TROUBLED)
def test_the_schedule_of_a_timed_trouble_is_what_a_search_finds(name):
    assert (searched(name).answer, searched(name).schedule) == ("found", CATALOGUE[name].schedule)


@pytest.mark.parametrize("name", TROUBLED)
def test_round_robin_does_not_show_a_timed_trouble_and_its_schedule_does(name):
    scenario = CATALOGUE[name]
    with SimulatedWorld(scenario.world_size) as world:
        assert not run_scenario(world, scenario, seed=0, schedule=ROUND_ROBIN).findings
        assert run_scenario(world, scenario, seed=0).status == "PASS"


@pytest.mark.parametrize("name", CONTROLS)
def test_no_schedule_of_a_control_shows_anything(name):
    explored = searched(name)
    assert explored.answer == "free" and explored.orders > explored.runs > 1


def test_every_timed_selector_has_its_scenario():
    assert sorted(scenario.selector for scenario in SCENARIOS) == sorted(TIMED)


def test_a_record_carries_its_schedule_and_says_how_to_repeat_it(tmp_path):
    scenario = CATALOGUE[TROUBLED[0]]
    with SimulatedWorld(scenario.world_size) as world:
        first = run_scenario(world, scenario, seed=3, schedule="seed:5").record
        save_record(first, tmp_path / "record.json")
        record = load_record(tmp_path / "record.json")
        assert again(record).endswith("--seed 3 --world sim --schedule seed:5")
        second = run_scenario(world, scenario, seed=3, schedule=record.plan.schedule).record
        assert isinstance(record, RunRecord) and second.ledgers == record.ledgers
        own = run_scenario(world, replace(scenario, schedule="0,0"), seed=3).record
    assert again(own).endswith("--seed 3 --world sim")
