"""Diagnosis on ledgers written by hand: every kind of trouble has its root named, and consequences are not findings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledgers import STALLED, STOPPED, Story, tell

from tpbed.harness.diagnose import diagnose
from tpbed.harness.findings import Finding, name_ranks
from tpbed.tp.ledger import END_FIELDS, End
from tpbed.tp.stuck import find_stuck


def only(*stories: Story, **fields: object) -> Finding:
    findings = diagnose(*tell(*stories, **fields))  # type: ignore[arg-type]
    assert len(findings) == 1, findings
    return findings[0]


def others(culprit: int, build: object) -> list[Story]:
    return [build(rank) for rank in range(4) if rank != culprit]  # type: ignore[operator]


def in_order(*stories: Story) -> list[Story]:
    return sorted(stories, key=lambda story: story.rank)


def waiters(culprit: int, before: int = 2) -> list[Story]:
    stories = []
    for rank in range(4):
        if rank != culprit:
            story = Story(rank)
            for _ in range(before):
                story.calls()
            stories.append(story.waits())
    return stories


def test_a_run_without_trouble_has_no_finding():
    assert diagnose(*tell(*(Story(rank).calls().checks(1).returns() for rank in range(4)))) == ()


@pytest.mark.parametrize("culprit", range(4))
def test_the_rank_that_raised_is_named_and_not_those_that_wait(culprit):
    finding = only(*in_order(Story(culprit).calls().calls().raises("RuntimeError", "contiguous"), *waiters(culprit)))
    assert (finding.kind, finding.ranks, finding.op, finding.seq) == ("hang", (culprit,), "all_gather", 3)
    assert finding.waiting_ranks == tuple(rank for rank in range(4) if rank != culprit)
    assert (finding.causes[0].error_type, finding.causes[0].site) == ("RuntimeError", "topk.py:1 topk")
    assert "after all_gather seq 2: contiguous" in finding.causes[0].text


@pytest.mark.parametrize("end", ["returns", "dies", "exits"])
def test_a_rank_that_left_without_an_error_is_named_with_how_it_ended(end):
    finding = only(*in_order(getattr(Story(1).calls().calls(), end)(), *waiters(1)))
    told = {"returns": "returned", "dies": "SIGKILL", "exits": "exit status 1"}[end]
    assert (finding.kind, finding.ranks) == ("hang", (1,)) and told in finding.causes[0].text


def test_peers_that_the_transport_threw_out_are_victims_of_the_rank_that_died():
    lost = [Story(r).calls().fails("RuntimeError: Connection closed by peer").raises("RuntimeError") for r in (0, 1)]
    finding = only(*lost, Story(2).calls().dies(), Story(3).calls().waits())
    assert (finding.kind, finding.ranks, finding.seq) == ("hang", (2,), 2)


def test_a_rank_whose_collective_failed_by_its_own_fault_is_the_culprit():
    culprit = Story(3).calls().fails("ValueError: wrong list").raises("ValueError", "wrong list")
    finding = only(*in_order(culprit, *waiters(3, before=1)))
    assert (finding.kind, finding.ranks, finding.seq) == ("hang", (3,), 2)


def test_two_ranks_at_fault_are_both_named():
    finding = only(Story(0).waits(), Story(1).raises(), Story(2).waits(), Story(3).dies())
    assert (finding.kind, finding.ranks) == ("hang", (1, 3))


def test_a_chain_of_waits_ends_at_the_rank_that_began_it():
    """Rank 0 waits for rank 2 in a sub-group, ranks 1 and 3 wait for rank 0 in the world: rank 2 is the root."""
    pair = [Story(0).group("pair", (0, 2)).waits(group="pair"), Story(2).group("pair", (0, 2)).raises()]
    finding = only(pair[0], Story(1).waits(), pair[1], Story(3).waits())
    assert (finding.kind, finding.ranks, finding.seq) == ("hang", (2,), 1)
    assert finding.waiting_ranks == (0, 1, 3)


def test_ranks_that_wait_for_each_other_are_a_circle_without_a_single_culprit():
    stories = [
        Story(0, 2).group("a", (0, 1)).group("b", (0, 1)).waits(group="a"),
        Story(1, 2).group("a", (0, 1)).group("b", (0, 1)).waits(group="b"),
    ]
    ledgers, liveness = tell(*stories)
    assert find_stuck(ledgers, liveness) == {0, 1}
    finding = only(*stories)
    assert (finding.kind, finding.ranks) == ("hang", (0, 1)) and "circle" in finding.text


def in_groups(rank, size=4, **groups):
    story = Story(rank, size)
    for name, members in groups.items():
        if rank in members:
            story.group(name, members)
    return story


def test_a_bystander_for_whom_nobody_waits_is_not_at_fault_in_a_circle():
    groups = {"a": (0, 1), "b": (0, 1), "c": (2, 3), "d": (1, 2)}
    waits = "abdc"  # ranks 0 and 1 for each other, rank 2 for rank 1, rank 3 for rank 2
    finding = only(*(in_groups(rank, **groups).waits(group=waits[rank]) for rank in range(4)))
    assert (finding.ranks, [cause.rank for cause in finding.causes]) == ((0, 1), [0, 1])
    assert finding.waiting_ranks == (0, 1, 2, 3)
    assert finding.text.endswith(
        "rank 0 in all_gather seq 1 of group a (ranks 0, 1); rank 1 in all_gather seq 1 of group b (ranks 0, 1)"
    )


@pytest.mark.parametrize("skipper", [0, 1, 3])
def test_a_skip_that_ends_in_a_circle_is_blamed_on_the_rank_that_skipped(skipper):
    groups = {"a": (0, 1), "b": (2, 3)}

    def story(rank):
        partner, own = rank ^ 1, "a" if rank < 2 else "b"
        begun = (
            in_groups(rank, **groups).calls(group=own, site="tp.py:1 reduce").calls("barrier", site="loop.py:9 step")
        )
        if rank == skipper:
            return begun.waits("barrier", site="loop.py:9 step")
        if partner == skipper:
            return begun.waits(group=own, site="tp.py:1 reduce")
        return begun.calls(group=own, site="tp.py:1 reduce").waits("barrier", site="loop.py:9 step")

    finding = only(*map(story, range(4)))
    assert (finding.kind, finding.ranks) == ("hang", (skipper,)) and "in a circle" in finding.text
    assert "call all_gather at tp.py:1 reduce, and it calls barrier seq 2 of group world" in finding.causes[0].text


def test_a_call_that_only_two_ranks_could_make_tells_nothing_of_who_left_the_order():
    stories = [in_groups(rank, a=(0, 1)) for rank in range(4)]
    late = [story.waits("barrier", site="loop.py:9 step") for story in stories[1:]]
    assert only(stories[0].waits(group="a", site="tp.py:1 reduce"), *late).ranks == (0, 1)


def test_who_asks_for_ever_waits_for_the_rank_that_left():
    asking = {rank: STALLED for rank in range(3)}
    finding = only(*(Story(rank).calls().asks() for rank in range(3)), Story(3).calls().returns(), frozen=asking)
    assert (finding.kind, finding.ranks, finding.seq) == ("hang", (3,), 2)
    assert finding.waiting_ranks == (0, 1, 2)


def test_who_asks_for_what_is_complete_elsewhere_and_then_stalls_is_at_fault_itself():
    stories = [Story(0, 2).asks(), Story(1, 2).calls().waits()]
    assert only(*stories, frozen={0: STALLED}).ranks == (0,)


def test_who_asked_and_then_waits_elsewhere_is_where_it_waits():
    finding = only(Story(0, 2).asks().waits("barrier"), Story(1, 2).calls().returns())
    assert (finding.kind, finding.ranks, finding.op) == ("hang", (1,), "barrier")


def test_a_wait_that_timed_out_is_the_fault_of_the_rank_that_never_came():
    gave_up = [Story(rank).fails("RuntimeError: Operation timed out!").raises("RuntimeError") for rank in range(3)]
    finding = only(*gave_up, Story(3).returns())
    assert (finding.kind, finding.ranks, finding.waiting_ranks) == ("hang", (3,), (0, 1, 2))


def test_a_wait_that_timed_out_is_at_fault_where_the_peer_came_later_and_waits():
    finding = only(Story(0, 2).fails("RuntimeError: Operation timed out!").raises("RuntimeError"), Story(1, 2).waits())
    assert (finding.kind, finding.ranks, finding.waiting_ranks) == ("hang", (0,), (1,))


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (End(how="killed", signal=9, message="killed by SIGKILL"), "was killed by SIGKILL before any collective"),
        (
            End(how="exited", exit_code=3, message="exited with status 3"),
            "left with exit status 3 before any collective",
        ),
        (End(how="killed", signal=9, message="node lost"), "was killed by SIGKILL before any collective: node lost"),
    ],
)
def test_how_a_rank_died_is_not_told_twice(end, told):
    stories = [Story(0, 2).waits(), Story(1, 2)]
    stories[1].events.append(("end", *(getattr(end, name) for name in END_FIELDS)))
    assert only(*stories).causes[0].text == f"rank 1 {told}"


@pytest.mark.parametrize(("seen", "told"), [(STALLED, "in top-k"), (STOPPED, "is stopped")])
def test_a_rank_that_does_not_get_there_is_a_stall_and_not_a_hang(seen, told):
    finding = only(*in_order(Story(0).calls().calls(), *waiters(0)), frozen={0: seen})
    assert (finding.kind, finding.ranks, finding.seq) == ("stall", (0,), 3) and told in finding.causes[0].text


def test_ranks_that_all_stall_are_named_although_nobody_waits():
    finding = only(Story(0, 2), Story(1, 2), frozen={0: STALLED, 1: STALLED})
    assert (finding.kind, finding.ranks) == ("stall", (0, 1))


def test_all_ranks_raising_alike_is_a_clean_stop():
    finding = only(*(Story(rank).calls().raises("SelectionError") for rank in range(4)))
    assert (finding.kind, finding.ranks) == ("crash_all", (0, 1, 2, 3))


def test_a_rank_that_raises_when_nobody_waits_is_a_crash_of_one():
    finding = only(*(Story(rank).calls().returns() for rank in range(3)), Story(3).calls().raises())
    assert (finding.kind, finding.ranks) == ("crash_one", (3,))


@pytest.mark.parametrize(
    "odd",
    [
        {"op": "broadcast"},
        {"dtype": "int32"},
        {"shape": (3, 16)},
        {"reduce_op": "MAX"},
        {"root": 1},
    ],
)
@pytest.mark.parametrize("culprit", [0, 2])
def test_another_call_at_the_same_seq_is_a_mismatch_of_the_odd_rank(odd, culprit):
    stories = [Story(r).calls().waits(**{"op": "all_reduce", **(odd if r == culprit else {})}) for r in range(4)]
    finding = only(*stories)
    assert (finding.kind, finding.ranks, finding.seq) == ("mismatch", (culprit,), 2)


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ({"op": "broadcast"}, "calls broadcast, not all_reduce"),
        ({"reduce_op": "MAX"}, "reduces with MAX, not SUM"),
        ({"root": 1}, "takes rank 1 of the group as root, not 0"),
    ],
)
def test_the_cause_of_a_mismatch_says_what_differs(odd, told):
    usual = {"op": "all_reduce", "reduce_op": "SUM", "root": 0}
    finding = only(*(Story(r).waits(**{**usual, **(odd if r == 2 else {})}) for r in range(4)))
    assert [cause.text for cause in finding.causes] == [f"rank 2 {told}"]


def test_where_no_camp_is_the_usual_one_no_cause_takes_one_for_right():
    finding = only(*(Story(r).waits(reduce_op="MAX" if r < 2 else "SUM") for r in range(4)))
    assert finding.ranks == (0, 1, 2, 3)
    assert all(", not " not in cause.text for cause in finding.causes)


def test_ranks_out_of_step_are_found_although_their_shapes_match():
    """Rank 2 left out step 1: its step 2 meets the others' step 1 in the same shape, and the shift is found there."""
    stories = [Story(r).step("0").calls().step("1").calls().step("2").calls() for r in range(4) if r != 2]
    finding = only(*in_order(Story(2).step("0").calls().step("1").step("2").calls().returns(), *stories))
    assert (finding.kind, finding.ranks, finding.seq) == ("mismatch", (2,), 2)
    assert "out of step" in finding.causes[0].text


def test_between_two_ranks_the_one_whose_steps_hold_fewer_calls_is_odd():
    usual = Story(0, 2).step("0").calls().calls().step("1").calls().calls().step("2").calls().waits()
    short = Story(1, 2).step("0").calls().calls().step("1").calls().step("2").calls().calls().returns()
    assert only(usual, short).ranks == (1,)


def test_between_two_ranks_the_one_that_left_its_step_is_odd_however_often_its_call_was_made():
    """Rank 1 goes back to the broadcast that begins each step; rank 0 makes the gather that the step still needs."""

    def begin(rank: int) -> Story:
        story = Story(rank, 2).step("0").calls("broadcast", site="a.py:1 f").calls(site="b.py:1 g")
        return story.step("1").calls("broadcast", site="a.py:1 f")

    finding = only(begin(0).waits(site="b.py:1 g"), begin(1).step("2").waits("broadcast", site="a.py:1 f"))
    assert finding.ranks == (1,)


def test_between_two_ranks_a_place_that_is_new_says_nothing_of_who_is_odd():
    """One barrier too many on rank 0, or one too few on rank 1."""
    stories = [Story(rank, 2).calls("barrier", site="a.py:1 f") for rank in range(2)]
    finding = only(stories[0].waits("barrier", site="a.py:1 f"), stories[1].waits(site="b.py:1 g"))
    assert finding.ranks == (0, 1)


def test_between_two_ranks_the_one_whose_shape_is_new_is_odd():
    stories = [Story(r, 2).calls().calls().waits(shape=(3 if r == 0 else 4, 16)) for r in range(2)]
    assert only(*stories).ranks == (0,)


def test_call_sites_that_ranks_pass_at_another_seq_are_out_of_step():
    """No labels, same shapes: rank 1 lacks one call at a.py, so its b.py meets the others' a.py."""
    stories = [
        Story(r).calls(site="a.py:1 f").calls(site="b.py:1 g").calls(site="a.py:1 f").waits(site="b.py:1 g")
        for r in range(4)
        if r != 1
    ]
    odd = Story(1).calls(site="a.py:1 f").calls(site="b.py:1 g").calls(site="b.py:1 g").returns()
    finding = only(*in_order(odd, *stories))
    assert (finding.kind, finding.ranks, finding.seq) == ("mismatch", (1,), 3)


def test_call_sites_that_are_roles_of_ranks_are_no_mismatch():
    stories = [
        Story(r).calls("broadcast", root=0, site="send.py:1 f" if r == 0 else "recv.py:1 g").returns() for r in range(4)
    ]
    assert diagnose(*tell(*stories)) == ()


def test_what_follows_a_mismatch_is_no_finding_of_its_own():
    """The odd rank ran out of calls and returned, its peers hang two seqs later: one finding, at the shift."""
    stories = [Story(r).calls().calls(dtype="int64").waits() for r in range(4) if r != 3]
    finding = only(*stories, Story(3).calls().calls().returns())
    assert (finding.kind, finding.ranks, finding.seq) == ("mismatch", (3,), 2)


@pytest.mark.parametrize(("stride", "told"), [((32, 1), "raises"), ((1, 4), "permuted")])
def test_a_view_that_is_not_contiguous_is_reported_with_what_nccl_would_do(stride, told):
    stories = [Story(r).calls(stride=stride if r == 1 else (16, 1)).returns() for r in range(4)]
    finding = only(*stories)
    assert (finding.kind, finding.ranks, finding.seq) == ("mismatch", (1,), 1) and told in finding.causes[0].text


@pytest.mark.parametrize("shape", [(1, 16), (0, 16), ()])
def test_one_row_no_row_and_scalars_are_contiguous_whatever_their_strides(shape):
    stories = [Story(r).calls(shape=shape, stride=(99, 1)[: len(shape)]).returns() for r in range(4)]
    assert diagnose(*tell(*stories)) == ()


def test_a_rank_that_did_less_than_its_peers_does_not_pass_in_silence():
    finding = only(
        *(Story(r).calls().calls("broadcast", waited=False).returns() for r in range(3)), Story(3).calls().returns()
    )
    assert (finding.kind, finding.ranks, finding.op, finding.seq) == ("mismatch", (3,), "broadcast", 2)


def test_a_rank_that_checked_less_than_its_peers_does_not_pass_in_silence():
    finding = only(*(Story(r).calls().checks(1 if r == 2 else 2).returns() for r in range(4)))
    assert (finding.kind, finding.ranks) == ("mismatch", (2,))


def test_an_error_that_a_collective_holds_back_is_shown_as_a_cause_of_what_it_broke():
    stories = [Story(rank).calls().waits() for rank in range(4) if rank != 2]
    finding = only(*in_order(Story(2).calls().holds_back("ValueError", "no page").waits("barrier"), *stories))
    assert (finding.kind, finding.ranks) == ("mismatch", (2,))
    assert finding.causes[1].text == "rank 2 calls barrier while ValueError is on its way out: no page"
    assert (finding.causes[1].error_type, finding.causes[1].site) == ("ValueError", "topk.py:1 topk")


def test_an_error_that_was_over_before_is_no_cause():
    stories = [Story(rank).calls().waits() for rank in range(4) if rank != 2]
    finding = only(*in_order(Story(2).holds_back("ValueError", "no page").calls().waits("barrier"), *stories))
    assert len(finding.causes) == 1


def test_a_decision_that_differs_is_shown_as_a_cause_of_what_it_broke():
    stories = [Story(r).decides("fast", str(r != 2), "padding").waits(shape=(4, 8 if r == 2 else 16)) for r in range(4)]
    finding = only(*stories)
    assert finding.kind == "mismatch"
    assert "rank 2 decided fast=False because padding, its peers True" in [cause.text for cause in finding.causes]


def test_a_decision_that_differs_is_a_finding_where_nothing_came_of_it():
    finding = only(*(Story(r).decides("fast", str(r != 2)).calls().returns() for r in range(4)))
    assert (finding.kind, finding.ranks) == ("diverge", (2,))


@given(ended=st.sets(st.integers(0, 7), min_size=1, max_size=7), before=st.integers(0, 5), data=st.data())
def test_whoever_ends_before_a_collective_is_named_or_the_few_that_call_once_more_than_most(ended, before, data):
    """Property over all ranks, places and ends: the ranks at fault are exactly those that ended without joining.

    But where most of the ranks returned, after as many calls as the rest had made, the rest make one too many.
    """
    stories, ends = [], set()
    for rank in range(8):
        story = Story(rank, 8)
        for _ in range(before):
            story.calls()
        end = data.draw(st.sampled_from(["returns", "raises", "dies", "exits"])) if rank in ended else "waits"
        ends.add(end)
        stories.append(getattr(story, end)())
    finding = only(*stories)
    one_too_many = ends == {"returns", "waits"} and before > 0 and len(ended) > 4
    culprits = set(range(8)) - ended if one_too_many else ended
    assert (finding.kind, set(finding.ranks), finding.seq) == ("hang", culprits, before + 1)
    assert find_stuck(*tell(*stories)) == set(range(8)) - ended


@pytest.mark.parametrize("returned", [4, 5])
def test_those_who_wait_are_named_where_more_than_half_have_returned(returned):
    stories = [Story(rank, 8).calls() for rank in range(8)]
    finding = only(*(story.returns() if rank < returned else story.waits() for rank, story in enumerate(stories)))
    assert finding.ranks == (tuple(range(4)) if returned == 4 else (5, 6, 7))


@given(swapped=st.integers(1, 7))
def test_ledgers_with_the_culprit_swapped_are_told_apart(swapped):
    """The mutant of a diagnosis that blames a fixed rank."""

    def run(culprit: int) -> list[Story]:
        return [Story(r, 8).calls().raises() if r == culprit else Story(r, 8).calls().waits() for r in range(8)]

    assert only(*run(0)).ranks == (0,) and only(*run(swapped)).ranks == (swapped,)


def test_ranks_are_named_in_runs():
    assert [name_ranks(r) for r in ((3,), (0, 1), (0, 1, 2, 5))] == ["rank 3", "ranks 0, 1", "ranks 0-2, 5"]


# Messages.


def test_two_that_both_send_first_are_a_circle():
    stories = Story(0, 2).message("send", 1, done=False), Story(1, 2).message("send", 0, done=False)
    assert find_stuck(*tell(*stories)) == {0, 1}
    finding = only(*stories)
    assert (finding.kind, finding.ranks) == ("hang", (0, 1)) and "circle" in finding.text


def test_messages_that_have_met_are_under_way_and_prove_nothing():
    stories = Story(0, 2).message("send", 1, done=False), Story(1, 2).message("recv", 0, done=False)
    assert find_stuck(*tell(*stories)) == frozenset()


@pytest.mark.parametrize("end", [Story.returns, Story.raises, Story.dies, Story.exits])
@pytest.mark.parametrize(("op", "peer"), [("send", 1), ("recv", 1), ("recv", None)])
def test_who_can_never_meet_a_message_is_named(end, op, peer):
    stories = Story(0, 2).message(op, peer, done=False), end(Story(1, 2))
    assert find_stuck(*tell(*stories)) == {0}
    finding = only(*stories)
    assert (finding.kind, finding.ranks, finding.waiting_ranks, finding.op) == ("hang", (1,), (0,), op)


@given(sent=st.integers(0, 3), received=st.integers(0, 3))
def test_ends_pair_up_in_their_order(sent, received):
    sender, receiver = Story(0, 2), Story(1, 2)
    for number in range(max(sent, received)):
        if number < sent:
            sender.message("send", 1, done=number < received)
        if number < received:
            receiver.message("recv", 0, done=number < sent)
    stories = sender if sent > received else sender.returns(), receiver if received > sent else receiver.returns()
    expected = {0} if sent > received else {1} if received > sent else set()
    assert find_stuck(*tell(*stories)) == expected
    assert [finding.ranks for finding in diagnose(*tell(*stories))] == [(1 - rank,) for rank in expected]


def test_a_pending_receive_from_anybody_can_take_a_send():
    sender = Story(0, 3).message("send", 2, done=False)
    taker = Story(2, 3).message("recv", None, done=False, waited=False).returns()
    assert find_stuck(*tell(sender, Story(1, 3).returns(), taker)) == frozenset()
    assert find_stuck(*tell(sender, Story(1, 3).returns(), Story(2, 3).returns())) == {0}


def test_who_waits_for_anybody_is_freed_by_any_one_of_them():
    waiting, gone = Story(0, 3).message("recv", None, done=False), Story(1, 3).raises()
    assert find_stuck(*tell(waiting, gone, Story(2, 3))) == frozenset()
    assert find_stuck(*tell(waiting, gone, Story(2, 3).message("recv", 0, done=False))) == {0, 2}


def test_a_message_of_which_the_receiver_died_keeps_its_sender():
    stories = Story(0, 2).message("send", 1, done=False), Story(1, 2).message("recv", 0, done=False).dies()
    assert find_stuck(*tell(*stories)) == {0}
    assert (only(*stories).kind, only(*stories).ranks) == ("hang", (1,))


def test_messages_and_collectives_wait_for_each_other():
    stories = Story(0, 2).waits(), Story(1, 2).message("recv", 0, done=False)
    assert find_stuck(*tell(*stories)) == {0, 1}
    assert (only(*stories).kind, only(*stories).ranks) == ("hang", (0, 1))


def test_a_mismatch_of_messages_does_not_excuse_a_hang_of_collectives():
    pair = Story(0, 3).message("send", 1), Story(1, 3).message("recv", 0, dtype="int32")
    findings = diagnose(*tell(pair[0].waits(), pair[1].waits(), Story(2, 3).raises()))
    assert [(found.kind, found.ranks) for found in findings] == [("mismatch", (0, 1)), ("hang", (2,))]


def test_all_have_come_and_nobody_gets_out():
    """Contributions of all_to_all may differ; when they do not fit, nothing else tells."""
    stories = [Story(rank, 2).waits("all_to_all", shape=(4 + rank, 1)) for rank in range(2)]
    finding = only(*stories)
    assert (finding.kind, finding.ranks) == ("mismatch", (0, 1)) and "does not fit" in finding.text


# Groups.


def test_the_rank_that_made_its_groups_in_another_order_is_named():
    stories = [Story(rank, 3).group("1", (0, 1, 2) if rank != 1 else (1, 2)).returns() for rank in range(3)]
    finding = only(*stories)
    assert (finding.kind, finding.ranks, finding.group) == ("mismatch", (1,), "1")


def test_of_two_ranks_neither_is_the_odd_one():
    stories = [Story(0, 2).group("1", (0,)).returns(), Story(1, 2).group("1", (0, 1)).returns()]
    assert only(*stories).ranks == (0, 1)


def test_what_ranks_call_in_groups_that_are_not_the_same_is_not_compared():
    alone = Story(0, 2).group("1", (0,)).calls("barrier", group="1").returns()
    finding = only(alone, Story(1, 2).group("1", (0, 1)).waits("all_reduce", group="1"))
    assert (finding.op, finding.ranks) == ("new_group", (0, 1))


# The group is not formed


@pytest.mark.parametrize("end", ["raises", "dies", "exits"])
def test_a_rank_that_ends_before_the_group_is_formed_is_named_and_not_those_that_wait_for_it(end):
    waiting = [Story(rank).comes("arrived") for rank in (0, 2, 3)]
    finding = only(*in_order(getattr(Story(1).comes(), end)(), *waiting), frozen={r: STALLED for r in (0, 2, 3)})
    assert (finding.kind, finding.ranks, finding.waiting_ranks) == ("init_fail", (1,), (0, 2, 3))
    assert "before the group was formed" in finding.causes[0].text


@pytest.mark.parametrize(
    ("seen", "told"), [(STALLED, "is alive and does not come"), (STOPPED, "is stopped and does not")]
)
def test_a_rank_that_does_not_come_is_named_and_not_those_that_wait_for_it(seen, told):
    stories = [Story(rank).comes("arrived") for rank in range(3)]
    finding = only(*stories, Story(3).comes(), frozen={0: STALLED, 1: STALLED, 2: STALLED, 3: seen})
    assert (finding.kind, finding.ranks) == ("init_fail", (3,)) and told in finding.causes[0].text


def test_ranks_that_the_transport_threw_out_of_the_forming_are_not_named():
    thrown = [Story(rank).comes("arrived").raises("RuntimeError", "Connection closed by peer") for rank in range(3)]
    assert only(*thrown, Story(3).comes("arrived").dies()).ranks == (3,)


def test_a_rank_that_cannot_reach_the_store_is_named_whatever_its_error_says():
    alone = Story(0).comes().raises("DistNetworkError", "Connection refused")
    assert only(alone, *(Story(rank).comes("arrived") for rank in (1, 2, 3))).ranks == (0,)


def test_ranks_that_all_end_alike_before_a_group_are_a_clean_stop():
    assert only(*(Story(rank).comes().raises("ImportError") for rank in range(4))).kind == "crash_all"


def test_ranks_that_all_came_and_formed_no_group_are_all_named():
    finding = only(*(Story(rank, 2).comes("arrived") for rank in range(2)), frozen={0: STALLED, 1: STALLED})
    assert (finding.kind, finding.ranks) == ("init_fail", (0, 1))


def test_a_rank_that_cannot_load_a_program_for_a_group_that_is_there_leaves_its_peers_in_a_hang():
    lost = Story(1)
    lost.events.clear()
    finding = only(*in_order(lost.raises("ImportError"), *waiters(1, before=0)))
    assert (finding.kind, finding.ranks, finding.seq) == ("hang", (1,), 1)


def test_a_rank_of_which_the_last_is_not_known_is_in_the_group_that_its_peers_use():
    finding = only(*in_order(Story(2).comes("arrived").dies(), *waiters(2, before=0)))
    assert (finding.kind, finding.ranks, finding.seq) == ("hang", (2,), 1)


def test_a_collective_that_timed_out_before_the_last_had_come_is_told_of_the_last():
    error = "Timed out waiting 2000ms for recv operation to complete"
    early = Story(1, 2).fails(error).raises("RuntimeError", error)
    late = Story(0, 2)
    late.events += [("check", 1)] * 5  # each event takes a nanosecond
    finding = only(late.fails(error).raises("RuntimeError", error), early)
    assert (finding.kind, finding.ranks, finding.waiting_ranks) == ("stall", (0,), (1,))
    assert "timed out before all had come" in finding.text and "after the first" in finding.causes[0].text


def test_a_cause_between_two_equal_camps_says_what_differs():
    stories = [Story(rank, 2).waits("reduce", shape=(4 * rank + 4,), reduce_op="MAX", root=0) for rank in range(2)]
    assert ["(4,)" in cause.text or "(8,)" in cause.text for cause in only(*stories).causes] == [True, True]


@pytest.mark.parametrize(("op", "findings"), [("all_reduce", 0), ("broadcast", 0), ("all_gather", 1)])
def test_dense_memory_that_lies_alike_everywhere_is_no_trouble_where_the_answer_goes_back_to_it(op, findings):
    stories = [Story(r).calls(op, stride=(1, 4)).returns() for r in range(4)]
    assert len(diagnose(*tell(*stories))) == findings


def test_dense_memory_that_lies_otherwise_on_one_rank_is_reported_for_any_op():
    stories = [Story(r).calls("all_reduce", stride=(1, 4) if r == 1 else (16, 1)).returns() for r in range(4)]
    assert only(*stories).ranks == (1,)
