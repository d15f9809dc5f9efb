"""Flight Recorder dumps: real ones of gloo, and built by hand, are diagnosed as the ledgers of the same run."""

import json
import pickle
from pathlib import Path

import flight_programs
import pytest
from flights import Recorder, save, save_json

from tpbed.harness import cli
from tpbed.harness.diagnose import diagnose
from tpbed.harness.flight import read_report
from tpbed.harness.flight_recorder import DumpError
from tpbed.tp.simulated import SimulatedWorld


def report(folder, *recorders, **options):
    return read_report([save(folder, *recorders)], **options)


def only_finding(told):
    (finding,) = told.findings
    return finding


def root(finding):
    return finding.kind, finding.ranks, finding.op, finding.seq, finding.group, finding.waiting_ranks


def ledgers_of(name):
    program, _ = flight_programs.PROGRAMS[name]
    return SimulatedWorld(3).run(lambda rank: [work.wait() for work in program(rank)])


@pytest.mark.parametrize("name", ["returns_early", "skips_in_a_subgroup", "calls_another_op"])
def test_a_real_dump_of_gloo_gives_the_root_cause_that_the_ledgers_give(name, tmp_path):
    flight_programs.leave_dumps(name, "gloo", 3, tmp_path)
    told = read_report([tmp_path])
    run = ledgers_of(name)
    (proved,) = diagnose(run.ledgers, run.liveness)
    found = only_finding(told)
    assert root(found) == root(proved)
    assert any("gloo records no messages" in note for note in told.notes)
    sites = {record.site for ledger in told.run.ledgers for record in ledger.collectives}
    assert sites == {record.site for ledger in run.ledgers for record in ledger.collectives}


def test_gloo_does_not_tell_who_belongs_to_a_group_that_one_rank_used_alone_so_that_is_undecided(tmp_path):
    flight_programs.leave_dumps("crosses_groups", "gloo", 3, tmp_path)
    told = read_report([tmp_path])
    assert told.answer == "undecided" and len(told.doubts) == 1
    assert "all_reduce seq 1 of group 1 (rank 0)" in told.doubts[0]
    run = ledgers_of("crosses_groups")
    assert diagnose(run.ledgers, run.liveness)[0].ranks == (0, 1)


def test_ranks_that_completed_all_they_called_are_healthy(tmp_path):
    told = report(tmp_path, *(Recorder(rank).calls().calls("barrier") for rank in range(4)))
    assert (told.answer, told.doubts, told.notes) == ("healthy", (), ())


def test_a_rank_that_never_called_the_collective_is_named_with_its_last_call(tmp_path):
    told = report(tmp_path, *(Recorder(r).calls(line=3).waits() for r in range(3)), Recorder(3).calls(line=3))
    found = only_finding(told)
    assert root(found) == ("hang", (3,), "all_reduce", 2, "world", (0, 1, 2))
    assert found.causes[0].site == "model/decode.py:3 step" and told.answer == "found"


@pytest.mark.parametrize("state", ["scheduled", "started"])
def test_what_has_only_started_is_waited_for_like_what_is_scheduled(state, tmp_path):
    told = report(tmp_path, Recorder(0, 2).waits(state=state), Recorder(1, 2))
    assert only_finding(told).ranks == (1,)


def test_another_shape_dtype_or_op_is_a_mismatch_of_that_rank(tmp_path):
    for fields in ({"sizes": [(4, 8)]}, {"dtype": "BFloat16"}, {"op": "reduce"}):
        told = report(tmp_path, *(Recorder(r, 3).waits() for r in (0, 2)), Recorder(1, 3).waits(**fields))
        assert (only_finding(told).kind, only_finding(told).ranks) == ("mismatch", (1,)), fields
        assert told.doubts == ()


def test_a_scatter_is_compared_by_what_comes_out_for_only_its_root_brings_something(tmp_path):
    ranks = [Recorder(0, 2).calls("scatter", sizes=[(4,), (4,)], outputs=[(4,)])]
    ranks += [Recorder(1, 2).calls("scatter", sizes=[], outputs=[(4,)])]
    assert report(tmp_path, *ranks).answer == "healthy"


def test_names_of_one_op_in_different_calls_and_versions_are_one(tmp_path):
    for rank, op in enumerate(("_all_gather_base", "all_gather_single", "all_gather")):
        save(tmp_path, Recorder(rank, 3).calls(op))
    assert read_report([tmp_path]).answer == "healthy"


def test_members_of_a_subgroup_wait_for_its_members_alone(tmp_path):
    told = report(
        tmp_path,
        Recorder(0).group("3", [0, 1]).waits("all_gather", group="3"),
        Recorder(1).group("3", [0, 1]),
        *(Recorder(r).group("4", [2, 3]).calls("all_gather", group="4") for r in (2, 3)),
    )
    assert root(only_finding(told)) == ("hang", (1,), "all_gather", 1, "3", (0,))


def test_groups_of_one_description_keep_their_names_and_one_alone_goes_by_it(tmp_path):
    told = report(
        tmp_path,
        *(Recorder(r).group("3", [0, 1], "mesh_tp").group("9", range(4), "dp").calls(group="3") for r in (0, 1)),
        *(Recorder(r).group("5", [2, 3], "mesh_tp").group("9", range(4), "dp").calls(group="9") for r in (2, 3)),
    )
    assert set(told.run.ledgers[0].groups) == {"world", "mesh_tp/3", "dp"}
    assert set(told.run.ledgers[3].groups) == {"world", "mesh_tp/5", "dp"}


@pytest.mark.parametrize("launched", [True, False])
def test_a_subgroup_and_the_default_group_that_are_crossed_are_a_circle_of_both_ranks(launched, tmp_path):
    first, second = (Recorder(rank, 2).group("1", [0, 1]) for rank in (0, 1))
    first.waits(group="1"), second.waits("all_reduce_barrier", sizes=[(1,)])
    if launched:  # NCCL: the host goes on, and a stream holds what it launches next
        first.waits("all_reduce_barrier", sizes=[(1,)]), second.waits(group="1")
    found = only_finding(report(tmp_path, first, second))
    assert (found.kind, found.ranks) == ("hang", (0, 1)) and "in a circle" in found.text


def test_a_send_without_its_receive_names_the_peer(tmp_path):
    told = report(tmp_path, Recorder(0, 2).message("send", 1, state="started"), Recorder(1, 2))
    assert root(only_finding(told)) == ("hang", (1,), "send", 1, "world", (0,))


def test_messages_that_met_are_healthy_and_of_other_sizes_a_mismatch(tmp_path):
    told = report(tmp_path, Recorder(0, 2).message("send", 1), Recorder(1, 2).message("recv", 0))
    assert told.answer == "healthy"
    told = report(tmp_path, Recorder(0, 2).message("send", 1), Recorder(1, 2).message("recv", 0, input_sizes=[[9]]))
    assert only_finding(told).kind == "mismatch"


def test_messages_of_a_batch_have_the_state_of_the_entry_that_ends_it(tmp_path):
    def batch(rank, state):
        peer, recorder = 1 - rank, Recorder(rank, 2)
        recorder.message("send", peer, state="scheduled")
        recorder.message("recv", peer, state="scheduled", same_seq=True)
        return recorder.message("coalesced", peer, state=state, same_seq=True)

    assert report(tmp_path, batch(0, "completed"), batch(1, "completed")).answer == "healthy"
    told = report(tmp_path, batch(0, "started"), Recorder(1, 2))
    assert root(only_finding(told)) == ("hang", (1,), "send", 1, "world", (0,))


def test_coalesced_collectives_are_one_with_the_state_of_their_end(tmp_path):
    def coalesced(rank, state, last=(4,)):
        recorder = Recorder(rank, 2).calls("all_reduce", sizes=[(4,)], state="scheduled")
        recorder.calls("all_reduce", sizes=[last], state="scheduled", same_seq=True)
        return recorder.calls("coalesced", sizes=[], state=state, same_seq=True)

    told = report(tmp_path, coalesced(0, "completed"), coalesced(1, "completed"))
    assert told.answer == "healthy" and told.run.ledgers[0].collectives[0].shape == (8,)
    told = report(tmp_path, coalesced(0, "started"), Recorder(1, 2))
    assert root(only_finding(told)) == ("hang", (1,), "all_reduce_coalesced", 1, "world", (0,))
    told = report(tmp_path, coalesced(0, "started"), coalesced(1, "started", last=(5,)))
    assert only_finding(told).kind == "mismatch"


def test_a_ring_that_lost_its_beginning_blames_nobody_for_it_and_says_so(tmp_path):
    whole = [Recorder(r, 3).calls().calls().calls().waits() for r in (0, 1)]
    told = report(tmp_path, *whole, Recorder(2, 3, first_record=2).starts_at("0", 3).calls())
    assert root(only_finding(told)) == ("hang", (2,), "all_reduce", 4, "world", (0, 1))
    assert "the rings of rank 2 have lost their beginning" in told.notes[0]
    assert [record.seq for record in told.run.ledgers[0].collectives] == [3, 4]


def test_a_batch_that_a_ring_has_cut_is_left_out(tmp_path):
    def batch(recorder, parts):
        for number in range(parts):
            recorder.calls(state="scheduled", same_seq=number > 0)
        return recorder.calls("coalesced", sizes=[], same_seq=parts > 0)

    cut = batch(Recorder(1, 2, first_record=1), 1).calls()
    assert report(tmp_path, batch(Recorder(0, 2), 2).calls(), cut).answer == "healthy"


def test_messages_that_a_ring_has_lost_are_missed_at_nobody(tmp_path):
    told = report(
        tmp_path,
        Recorder(0, 2).message("send", 1).message("send", 1),
        Recorder(1, 2, first_record=1).message("recv", 0),
    )
    assert told.answer == "healthy"
    told = report(
        tmp_path,
        Recorder(0, 2, first_record=1).message("send", 1).message("send", 1, state="started"),
        Recorder(1, 2).message("recv", 0, input_sizes=[[9]]).message("recv", 0).message("recv", 0, state="started"),
    )
    assert told.findings == ()


def test_a_rank_without_a_dump_is_named_only_where_nobody_else_is_missing(tmp_path):
    told = report(tmp_path, *(Recorder(r).waits() for r in range(3)))
    assert only_finding(told).ranks == (3,) and "left no dump" in only_finding(told).causes[0].text
    assert told.doubts == ("rank 3 left no dump: what happened there is not seen.",)
    told = report(tmp_path, Recorder(0).waits(), Recorder(1), Recorder(2).waits())
    assert only_finding(told).ranks == (1,)


def test_a_rank_without_a_dump_leaves_an_otherwise_healthy_run_undecided(tmp_path):
    assert report(tmp_path, *(Recorder(r).calls() for r in range(3))).answer == "undecided"
    assert report(tmp_path, *(Recorder(r, 3).calls() for r in range(3)), world_size=4).doubts


def test_what_all_have_joined_and_is_not_complete_is_undecided(tmp_path):
    told = report(tmp_path, *(Recorder(r, 2).waits(state="started") for r in range(2)))
    assert told.answer == "undecided" and "all_reduce seq 1 of group world is not complete" in told.doubts[0]


def test_a_dump_that_was_written_a_call_later_than_another_is_healthy(tmp_path):
    assert report(tmp_path, Recorder(0, 2).calls().calls(), Recorder(1, 2).calls()).answer == "healthy"


def test_gloo_says_done_of_a_call_that_failed_for_want_of_a_peer(tmp_path):
    ranks = [Recorder(r, 3, backend="gloo").calls(state="scheduled", retired=True) for r in range(3)]
    for recorder in ranks[:2]:
        recorder.calls("barrier", sizes=[], state="scheduled", retired=True)
    assert root(only_finding(report(tmp_path, *ranks))) == ("hang", (2,), "barrier", 2, "world", (0, 1))


def test_no_entries_at_all_are_no_health(tmp_path):
    told = report(tmp_path, Recorder(0, 2), Recorder(1, 2))
    assert told.answer == "undecided" and "TORCH_FR_BUFFER_SIZE" in told.doubts[0]


def test_json_gives_what_the_pickle_gives_but_for_places(tmp_path):
    (tmp_path / "pickles").mkdir(), (tmp_path / "json").mkdir()
    ranks = [Recorder(0, 3).calls().waits(), Recorder(1, 3).calls().waits(), Recorder(2, 3).calls()]
    plain = read_report([save_json(tmp_path / "json", *ranks)])
    assert root(only_finding(plain)) == root(only_finding(report(tmp_path / "pickles", *ranks)))


class Evil:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (pickle.dumps({"version": "2.10", "entries": [Evil()]}), "names builtins.print"),
        (pickle.dumps({"version": "2.10", "entries": []})[:-9], "no whole"),
        (b"", "no whole"),
        (b"\x80\x02not a pickle", "no whole"),
        (b'{"version": "2.10", "entries": [', "no whole"),
        (pickle.dumps([1, 2]), "holds list"),
        (pickle.dumps({"entries": []}), "version"),
        (pickle.dumps({"version": "3.1", "entries": []}), "version 3.1"),
        (pickle.dumps({"version": "2.10", "entries": [{"record_id": 0}]}), "entries.0.process_group"),
    ],
)
def test_what_is_no_dump_is_refused_in_one_line_and_never_executed(content, says, tmp_path, capsys):
    (tmp_path / "rank_0").write_bytes(content)
    with pytest.raises(SystemExit) as end:
        cli.main(["flight", str(tmp_path)])
    told = capsys.readouterr()
    assert end.value.code == 2 and says in told.err and told.err.count("\n") == 1 and "executed" not in told.out


def test_files_without_a_rank_twice_the_same_or_missing_are_refused(tmp_path):
    save(tmp_path, Recorder(1))
    for paths, says in (
        ([tmp_path / "nccl_trace_rank_1", tmp_path / "nccl_trace_rank_1"], "both of rank 1"),
        ([tmp_path / "nothing_2"], "there is no"),
        ([Path(__file__)], "which rank"),
    ):
        with pytest.raises(DumpError, match=says):
            read_report(paths)
    with pytest.raises(DumpError, match="give 4 or more"):
        read_report([tmp_path], 2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DumpError, match="holds no file"):
        read_report([tmp_path / "empty"])


@pytest.mark.parametrize(("missing", "status"), [(False, 0), (True, 1)])
def test_the_command_tells_people_and_machines_alike(missing, status, tmp_path, capsys):
    save(tmp_path, Recorder(0, 2).calls(state="scheduled" if missing else "completed"))
    save(tmp_path, Recorder(1, 2) if missing else Recorder(1, 2).calls())
    for option in ([], ["--json"]):
        with pytest.raises(SystemExit) as end:
            cli.main(["flight", str(tmp_path), *option])
        assert end.value.code == status
    *lines, plain = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FOUND" if missing else "HEALTHY")
    assert json.loads(plain)["culprits"] == ([1] if missing else [])


@pytest.mark.parametrize("fields", [{"duration_ms": 1.5, "thread_id": "1", "unheard_of": []}, {"frames": []}])
def test_fields_that_come_and_go_between_versions_of_torch_do_no_harm(fields, tmp_path):
    told = report(tmp_path, Recorder(0, 2).calls(**fields), Recorder(1, 2).calls(**fields))
    assert told.answer == "healthy"


def test_a_path_where_nothing_is_is_told_as_that(tmp_path):
    with pytest.raises(DumpError, match="there is no .*/nowhere"):
        read_report([tmp_path / "nowhere"])
