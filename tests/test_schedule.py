"""Schedules: each chooses a rank that can run, starts over when it is told to, and says when it cannot be followed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpbed.tp.schedule import Replayed, RoundRobin, ScheduleError, Seeded

RUNNABLE = st.lists(st.sets(st.integers(0, 9), min_size=2).map(sorted), min_size=1, max_size=20)


def choices(schedule, asked):
    schedule.begin()
    return [schedule.choose(runnable) for runnable in asked]


@given(asked=RUNNABLE, seed=st.integers())
def test_every_choice_is_one_of_the_ranks_that_can_run(asked, seed):
    for schedule in (RoundRobin(), Seeded(seed)):
        assert all(choice in runnable for choice, runnable in zip(choices(schedule, asked), asked, strict=True))


@given(asked=RUNNABLE, seed=st.integers())
def test_a_schedule_starts_over_with_every_run(asked, seed):
    for schedule in (RoundRobin(), Seeded(seed)):
        assert choices(schedule, asked) == choices(schedule, asked)


@given(asked=RUNNABLE, seed=st.integers())
def test_recorded_choices_are_repeated(asked, seed):
    recorded = choices(Seeded(seed), asked)
    replay = Replayed(recorded)
    assert choices(replay, asked) == choices(replay, asked) == recorded


def test_round_robin_keeps_the_turn_until_the_rank_waits_and_then_goes_up_and_around():
    assert choices(RoundRobin(), [[0, 1, 2], [0, 1, 2], [1, 2], [0, 2], [0, 1], [0, 1]]) == [0, 0, 1, 2, 0, 0]


def test_other_seeds_choose_otherwise():
    asked = [list(range(10))] * 20
    assert len({tuple(choices(Seeded(seed), asked)) for seed in range(5)}) == 5


def test_seeds_choose_the_same_on_every_machine():
    assert choices(Seeded(7), [[0, 1, 2, 3]] * 8) == [1, 0, 2, 0, 2, 1, 0, 2]


@pytest.mark.parametrize(
    ("recorded", "asked", "said"),
    [([1], [[0, 1], [0, 1]], "all 1 recorded choices are taken"), ([1], [[0, 2]], "rank 1, but only [0, 2] can run")],
)
def test_a_replay_of_another_program_is_refused(recorded, asked, said):
    with pytest.raises(ScheduleError) as refused:
        choices(Replayed(recorded), asked)
    assert said in str(refused.value)


@given(asked=RUNNABLE, seed=st.integers(), taken=st.integers(0, 20))
def test_when_its_choices_are_used_up_a_replay_can_go_on_as_another_schedule(asked, seed, taken):
    recorded = choices(Seeded(seed), asked)[:taken]
    replay = Replayed(recorded, then=RoundRobin())
    expected = recorded + choices(RoundRobin(), asked[len(recorded) :])
    assert choices(replay, asked) == choices(replay, asked) == expected


@pytest.mark.parametrize(
    "schedule",
    [RoundRobin(), Seeded(7), Replayed([1, 0]), Replayed([], then=RoundRobin()), Replayed([2], then=Seeded(1))],
)
def test_a_schedule_can_be_told_on_one_line(schedule):
    assert repr(eval(repr(schedule))) == repr(schedule)
