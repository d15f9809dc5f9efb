"""The search of schedules: how many orders it finds, that leaving some out loses no outcome, and what it says."""

import _thread
import contextlib
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tpbed.tp import search
from tpbed.tp.rank import current, decision
from tpbed.tp.schedule import Replayed, RoundRobin, Seeded
from tpbed.tp.search import NotRepeatableError, explore
from tpbed.tp.searched_run import SearchedRun, Touch, _Notes
from tpbed.tp.simulated import SimulatedWorld
from tpbed.tp.simulated_run import SimulatedRun


def barriers(count):
    def program(rank):
        for _ in range(count):
            dist.barrier()

    return program


def overlaps(count):
    def program(rank):
        for _ in range(count):
            dist.all_reduce(torch.ones(1), async_op=True).wait()

    return program


def asks(rank):
    return dist.barrier(async_op=True).is_completed()


def pairs(rank):
    """Two groups that have nothing to do with each other."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for _ in range(2):
        dist.barrier(groups[rank // 2])


def gives_up(rank):
    """Leaves the others waiting if it asks too early, and twice: each time before one other, and after the other."""
    early = 0
    for _ in range(2):
        work = dist.all_reduce(torch.ones(1), async_op=True)
        early += rank == 0 and not work.is_completed()
        work.wait()
    if early < 2:
        dist.barrier()


# How many orders there are.


@pytest.mark.parametrize(
    ("program", "size", "reduced", "trusted", "all_orders"),
    [
        (barriers(1), 2, 1, 1, 2 * 2),  # who comes first, and who goes on first
        (barriers(2), 3, 1, 1, 6**3),
        (overlaps(1), 2, 2, 1, 2 * 2),
        (overlaps(2), 3, 6**2, 1, 6**3),  # who comes last moves the data
        (asks, 2, 4, 3, 4),  # the first asks again before the other comes or after it, or not at all
    ],
)
def test_the_number_of_orders(program, size, reduced, trusted, all_orders):
    found = [explore(program, size), explore(program, size, trust_overlap=True), explore(program, size, reduce=False)]
    assert [each.schedules for each in found] == [reduced, trusted, all_orders]
    assert [(each.pruned, each.complete, each.bad) for each in found] == [(0, True, None)] * 3
    assert [each.orders for each in found] == [all_orders, None, all_orders]  # for so many the runs stand


@pytest.mark.parametrize(("program", "size"), [(barriers(5), 16), (pairs, 4)])
def test_one_order_stands_for_all_where_ranks_only_wait_for_each_other(program, size):
    assert explore(program, size).schedules == 1
    assert not explore(program, size, reduce=False, limit=100).complete


# That no outcome is lost.

TOGETHER = ["world", "pair", "issue"]
STEPS = ["world", "pair", "issue", "ask", "wait", "hasty", "write", "read", "sleep", "skip", "raise"]


class Player:
    """A rank that does what it is told, and writes down all that it sees."""

    def __init__(self, rank):
        self.groups = {"world": dist.group.WORLD, "pair": dist.new_group([0, 1])}
        self.rank, self.value, self.work = rank, torch.zeros(1), None

    def play(self, script):
        for number, name in enumerate(script):
            if self.do(name, number):
                return

    def do(self, name, number):
        if name in self.groups and self.groups[name] is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.barrier(self.groups[name])
        elif name == "issue":
            self.value = torch.tensor([10.0 ** (self.rank + number)])
            self.work = dist.all_reduce(self.value, async_op=True)
        elif name == "write":
            self.value += 1
        elif name == "read":
            decision("value", self.value.item(), "")
        elif name == "sleep":
            current().sleep(2e-6)
        elif name == "raise":
            raise ValueError
        elif self.work is not None:
            return self.do_with_work(name)

    def do_with_work(self, name):
        if name == "wait":
            self.work.wait()
        elif name == "hasty":
            with contextlib.suppress(RuntimeError):
                self.work.wait(timedelta(microseconds=3))
        elif name in ("ask", "skip"):
            done = self.work.is_completed()
            decision("done", done, "")
            return name == "skip" and done


def outcome(run):
    """What the ranks saw, how they ended, and where they are stuck."""
    return run.stuck, *(
        (
            [(each.name, each.value) for each in ledger.decisions],
            ledger.end and ledger.end.how,
            [(each.group, each.seq, each.state) for each in ledger.collectives],
        )
        for ledger in run.ledgers
    )


def outcomes(scripts, **options):
    """All that can come of the scripts, one for each rank."""
    found = {}

    def note(run):
        found[repr(outcome(run))] = None

    done = explore(lambda rank: Player(rank).play(scripts[rank]), len(scripts), limit=1500, is_bad=note, **options)
    return set(found), done


def loses_nothing(scripts, **options):
    every, unreduced = outcomes(scripts, reduce=False)
    if not unreduced.complete:
        return True  # nothing to compare with
    some, reduced = outcomes(scripts, **options)
    assert reduced.orders in (unreduced.schedules, None if options else unreduced.schedules)
    return some == every and reduced.complete and reduced.schedules <= unreduced.schedules


ALONE = st.lists(st.sampled_from([name for name in STEPS if name not in TOGETHER]), max_size=2)


@st.composite
def scripts_of_ranks(draw):
    """Steps that all ranks take, and between them some of each rank's own."""
    together = draw(st.lists(st.sampled_from(TOGETHER), max_size=2))
    ranks = range(draw(st.integers(2, 3)))
    return [draw(ALONE) + [each for step in together for each in (step, *draw(ALONE))] for _ in ranks]


def without_overlaps(scripts):
    return [[step for step in script if step not in ("write", "read")] for script in scripts]


SCRIPTS = scripts_of_ranks() | st.lists(st.lists(st.sampled_from(STEPS), max_size=4), min_size=2, max_size=3)


@settings(max_examples=60)
@given(scripts=SCRIPTS)
@example([["issue", "ask", "skip", "world"], ["issue", "wait", "world"]])
@example([["issue", "write", "wait", "read"], ["issue", "wait", "read"]])
@example([["issue", "pair", "read"], ["pair"], ["issue"]])
@example([[], ["world"]])  # the last step of a run
@example(
    [["issue", "world", "ask"], ["issue", "world"], ["issue", "world", "wait"]]
)  # steps while nobody else can go on
@example([["issue", "ask", "ask", "ask"], ["issue"]])  # held back
@example([["issue", "ask", "ask", "ask"], ["raise"]])  # held back until nobody else can go on
def test_leaving_out_equivalent_schedules_loses_no_outcome(scripts):
    assert loses_nothing(scripts)


@settings(max_examples=60)
@given(scripts=SCRIPTS)
@example([["issue", "ask", "world"], ["issue", "wait", "world"], ["issue", "pair"]])
def test_trust_in_overlaps_loses_nothing_where_it_is_deserved(scripts):
    assert loses_nothing(without_overlaps(scripts), trust_overlap=True)


# That a reduction which leaves out more would be found out.


def nothing_watched(self, other):
    return self.everything or other.everything


def never_awake(self, touch):
    before = self._path[-1].asleep | self._path[-1].tried
    return {rank: of for rank, of in before.items() if rank != self._path[-1].choice}


def every_wait_an_answer(self, rank, events):
    self.waited = events[-1][1:3] if events and events[-1][0] in ("start", "wait") else None


MUTANTS = {
    "what is watched does not count": (Touch, "meets", nothing_watched),
    "nothing counts": (Touch, "meets", lambda self, other: False),
    "a question does not count": (SearchedRun, "poll", SimulatedRun.poll),
    "a time-out does not count": (SearchedRun, "wait_for", SimulatedRun.wait_for),
    "what sleeps never wakes": (search._Tree, "_still_asleep", never_awake),
    "no race is reversed": (search._Tree, "_want_reversals", lambda self, steps: []),
    "a question that was in vain is answered": (_Notes, "note_wait", every_wait_an_answer),
}
NOTE = _Notes._note


def overlooks_an_answer(self, event, **options):
    NOTE(self, event, **options)
    return self.open


LOST = [  # at least one of these loses outcomes under each mutant
    [["issue", "read"], ["issue"]],
    [["issue", "ask"], ["issue"], ["issue", "ask"]],
    [["issue", "read", "pair", "read"], ["issue", "pair"], ["issue"]],
    [["issue", "skip", "skip"], ["ask", "issue", "issue", "skip", "issue"], ["issue", "skip", "ask", "ask"]],
    [["issue", "sleep", "issue", "hasty"], ["issue", "issue", "hasty", "read"], ["hasty", "issue", "read", "issue"]],
]


@pytest.mark.parametrize("scripts", LOST)
def test_the_reduction_loses_none_of_these(scripts):
    assert loses_nothing(scripts)
    assert loses_nothing(without_overlaps(scripts), trust_overlap=True)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_reduction_that_leaves_out_too_much_loses_some(mutant, monkeypatch):
    every = [outcomes(scripts, reduce=False)[0] for scripts in LOST]
    monkeypatch.setattr(*MUTANTS[mutant])
    assert [outcomes(scripts)[0] for scripts in LOST] != every


@pytest.mark.parametrize("mutant", [("_note", overlooks_an_answer), ("look", lambda self, patience: None)])
def test_an_answer_counts_where_overlaps_are_trusted(mutant, monkeypatch):
    scripts = [["issue"], ["issue"], ["issue", "ask"]]
    every = outcomes(scripts, reduce=False)[0]
    assert outcomes(scripts, trust_overlap=True)[0] == every
    monkeypatch.setattr(_Notes, *mutant)
    assert outcomes(scripts, trust_overlap=True)[0] != every


def steps_of(program, size=2):
    """The steps of a run in which the lowest rank that can go on does so."""
    world, steps = SimulatedWorld(size), []
    world.make_run = partial(SearchedRun, steer=lambda run, options: note(run, steps) or options[0], patience=2)
    world.run(program)
    return steps[-1]


def touches(program):
    return [(step.rank, step.touch.everything) for step in steps_of(program)]


def note(run, kept):
    kept.append(run.steps)


def test_while_a_rank_waits_for_a_time_every_turn_counts():
    def program(rank):
        dist.barrier()
        if rank == 0:
            time.sleep(1)
        dist.barrier()

    before, asleep, after = [(0, False), (1, False)], [(0, True), (1, True)], [(0, False), (0, False), (1, False)]
    assert touches(program) == before + asleep + after


def test_a_collective_is_watched_from_the_call_to_the_end_of_its_wait():
    def program(rank):
        work = dist.all_reduce(torch.ones(1), async_op=True)
        dist.barrier()
        work.wait()
        dist.barrier()

    first = ("world", 1)
    watched = [first in step.touch.watches for step in steps_of(program) if step.rank == 0]
    assert watched == [True, True, True, False]


def test_looking_at_the_clock_counts():
    assert touches(lambda rank: rank or time.monotonic()) == [(0, True), (1, False)]


def test_while_a_message_is_under_way_each_turn_of_its_rank_counts():
    def program(rank):
        dist.barrier()
        if rank == 0:
            work = dist.isend(torch.ones(1), 1)
            dist.barrier()
            work.wait()
        else:
            dist.barrier()
            dist.recv(torch.ones(1), 0)
        for _ in range(2):
            dist.barrier()

    seen = [[everything for turn, everything in touches(program) if turn == rank] for rank in range(2)]
    assert seen == [[False, True, True, True, False, False], [False, False, True, True, False, False]]


# What it finds, and what it says.


def test_a_hang_that_only_a_search_finds_is_told_as_a_schedule_that_repeats_it():
    assert not SimulatedWorld(3).run(gives_up).stuck
    assert not any(SimulatedWorld(3, Seeded(seed)).run(gives_up).stuck for seed in range(4))
    found = explore(gives_up, 3)
    assert found.complete and found.schedules > 100
    assert found.bad_run.stuck == (1, 2)
    assert SimulatedWorld(3, found.bad).run(gives_up).ledgers == found.bad_run.ledgers
    assert str(found) == (
        f"one of {found.schedules} schedules ({found.pruned} pruned) is bad: SimulatedWorld(3, {found.bad!r})"
    )
    again = eval(repr(found.bad))
    assert SimulatedWorld(3, again).run(gives_up).stuck == (1, 2)


def test_the_schedule_told_is_as_short_as_it_can_be():
    choices = explore(gives_up, 3).bad.choices
    assert choices
    for length in range(len(choices)):
        assert not SimulatedWorld(3, Replayed(choices[:length], then=RoundRobin())).run(gives_up).stuck


def test_a_time_out_that_depends_on_who_comes_first():
    def program(rank):
        """Rank 1 is as late as rank 0 is patient."""
        if rank == 1:
            current().sleep(5)
        with contextlib.suppress(RuntimeError):
            dist.barrier(timeout=timedelta(seconds=5))
            return "in time"

    def answers(run):
        found.add(run.results[0])

    found = set()
    assert explore(program, 2, is_bad=answers).complete
    assert found == {"in time", None}


def test_answers_can_be_looked_for_as_well_as_hangs():
    def program(rank):
        value = torch.ones(1)
        work = dist.all_reduce(value, async_op=True)
        value += rank
        work.wait()
        return value.item()

    found = explore(program, 2, is_bad=lambda run: run.results[0] != run.results[1])
    assert found.bad_run.results[0] != found.bad_run.results[1]


def test_every_choice_of_a_search_repeats_in_an_ordinary_world():
    world = SimulatedWorld(3)
    world.make_run = partial(SearchedRun, steer=search._Tree(False).steer, patience=2)
    first = world.run(asks)
    assert SimulatedWorld(3, Replayed(world.choices)).run(asks).ledgers == first.ledgers


def test_a_limit_is_said_and_proves_nothing():
    found = explore(overlaps(2), 3, limit=5)
    assert (found.schedules, found.complete, found.bad) == (5, False, None)
    assert str(found) == "5 schedules (0 pruned) are good, and others were not searched"
    assert str(explore(barriers(1), 3)) == "all 1 schedules (0 pruned) are good"


def test_a_run_that_does_not_end_is_said_and_proves_nothing(monkeypatch):
    monkeypatch.setattr(search, "LONGEST", 10)
    found = explore(barriers(10), 2)
    assert (found.schedules, found.complete) == (0, False)


def test_ranks_that_ask_for_ever_do_not_keep_the_search_for_ever():
    def program(rank):
        work = dist.barrier(async_op=True)
        while not work.is_completed():
            pass

    found = explore(program, 3)
    assert found.complete and found.bad is None


@pytest.mark.parametrize("later", [lambda: None, lambda: current().die("kill", "on purpose"), lambda: dist.barrier()])
def test_a_program_that_does_something_else_the_next_time_is_refused(later):
    runs = []

    def program(rank):
        runs.append(rank)
        dist.barrier()
        if len(runs) > 2:
            return later() if rank else None
        for _ in range(3):
            dist.all_reduce(torch.ones(1), async_op=True).wait()

    with pytest.raises(NotRepeatableError, match="after"):
        explore(program, 2)


def test_an_interrupt_ends_the_search():
    def program(rank):
        _thread.interrupt_main()

    with pytest.raises(KeyboardInterrupt):
        explore(program, 2)


def test_a_rank_that_is_held_back_is_not_tried_before_what_it_waits_for():
    def program(rank):
        work = dist.all_reduce(torch.ones(1), async_op=True)
        while rank == 0 and not work.is_completed():
            pass

    found = explore(program, 4, trust_overlap=True)
    assert (found.schedules, found.pruned, found.patience) == (8, 0, 2)
