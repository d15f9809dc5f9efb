"""The report: its shape, what it folds and cuts, and what machines read of it."""

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from records import ONE_RAISES, RAISED, RETURNED, collective, ledger, one_raises, record, unlike

from tpbed.harness.faults import Kill
from tpbed.harness.findings import Cause, Finding
from tpbed.harness.report import WIDTH, again, describe_expected, headline, positions, render, row, to_json, to_junit
from tpbed.harness.scenario import Expected
from tpbed.harness.verdict import Verdict, judge
from tpbed.tp.ledger import End, Mark
from tpbed.tp.world import Liveness

NONE_EXPECTED = unlike(ONE_RAISES, expect=(), faults=())

FAILED = """\
FAIL  hang/one-rank-raises  ray+gloo  4 ranks, 1000 tokens, seed 7, 0.2 s
hang  proved 12 ms after the last event: all_gather seq 7 of group world waits for rank 3, which can never join
cause rank 3 raised InjectedError after all_gather seq 6: injected error  (harness/inject.py:184 _raise)
  rank  last completed    now                      at
  0-2   all_gather seq 6  waiting in all_gather 7  selector/merge.py:61 gather_columns
  3     all_gather seq 6  raised InjectedError     harness/inject.py:184 _raise
faults    none planned
expected  no finding
          not this: hang of rank 3 in all_gather seq 7
evidence  runs/record.json
again     tpbed run hang/one-rank-raises --seed 7 --world gloo"""


def verdict_of(*findings, status="FAIL", scenario=NONE_EXPECTED, **fields):
    run = record(scenario, [ledger(rank, end=RETURNED) for rank in range(4)])
    return Verdict(record=run, status=status, findings=findings, **fields)


def lines_of(report, label):
    return [line for line in report.splitlines() if line.startswith(label)]


def test_a_failure_says_who_where_why_and_how_to_see_it_again():
    assert render(judge(one_raises(NONE_EXPECTED)), evidence=Path("runs/record.json")) == FAILED


def test_a_pass_explains_its_findings_and_nothing_more():
    report = render(judge(one_raises()))
    assert report.splitlines()[0] == FAILED.splitlines()[0].replace("FAIL", "PASS")
    assert report.splitlines()[1:] == FAILED.splitlines()[1:3]


def test_a_pass_without_findings_is_one_line():
    assert render(verdict_of(status="PASS")) == row(verdict_of(status="PASS"))


def test_a_pass_can_be_told_in_full():
    report = render(judge(one_raises()), full=True)
    assert "expected  hang of rank 3 in all_gather seq 7 caused by InjectedError - found" in report
    assert lines_of(report, "faults") == ["faults    raise@rank=3,seq=7 - fired"]


def test_what_was_expected_and_not_found_is_told_apart_from_what_was_found():
    both = (*ONE_RAISES.expect, Expected(kind="mismatch", ranks=(1, 2)))
    told = render(judge(one_raises(unlike(ONE_RAISES, expect=both))))
    assert "expected  hang of rank 3 in all_gather seq 7 caused by InjectedError - found\n" in told
    assert f"\n{'':10}mismatch of ranks 1, 2 - not found\n" in told
    assert "not this" not in told


def test_the_same_finding_expected_twice_is_missed_once():
    told = render(judge(one_raises(unlike(ONE_RAISES, expect=ONE_RAISES.expect * 2))))
    assert [line.rpartition(" - ")[2] for line in told.splitlines() if "InjectedError - " in line] == [
        "not found",
        "found",
    ]


def test_an_undecided_run_tells_its_doubts_and_which_fault_did_not_fire():
    report = render(judge(one_raises(fired=False)))
    assert report.startswith("UNDECIDED  ")
    assert lines_of(report, "doubt") == ["doubt the planned fault `raise@rank=3,seq=7` never fired"]
    assert lines_of(report, "faults") == ["faults    raise@rank=3,seq=7 - did not fire"]


def test_a_doubt_with_a_traceback_begins_with_the_error_and_keeps_the_layout():
    trace = "Traceback (most recent call last):\n  File 'x', line 1\n    fails()\nValueError: no"
    report = render(verdict_of(status="UNDECIDED", doubts=(f"check_x crashed: {trace}",)))
    assert report.splitlines()[1:5] == [
        "doubt check_x crashed: ValueError: no",
        "        File 'x', line 1",
        "          fails()",
        "      ValueError: no",
    ]


def test_each_fault_is_told_with_how_often_it_fired():
    run = one_raises(unlike(ONE_RAISES, faults=(*ONE_RAISES.faults, Kill(rank=2, seq=9))))
    fired, other = run.ledgers[3].marks[0], Mark(name="other", value=1, step="3", issued=6)
    marks = (fired, fired, fired, other)
    told = to_json(judge(replace(run, ledgers=(*run.ledgers[:3], replace(run.ledgers[3], marks=marks)))))["faults"]
    assert [fault["fired"] for fault in told] == [3, 0]
    told = render(judge(replace(run, ledgers=(*run.ledgers[:3], replace(run.ledgers[3], marks=marks)))))
    assert lines_of(told, "faults")[0].endswith(" - fired 3 times")
    assert f"\n{'':10}kill@rank=2,seq=9 - did not fire\n" in told


@pytest.mark.parametrize(
    ("kind", "proof_ms", "told"),
    [
        ("hang", 12.3, "proved 12 ms after the last event: x"),
        ("hang", 0.31, "proved 0.3 ms after the last event: x"),
        ("hang", 1234.5, "proved 1,234 ms after the last event: x"),
        ("hang", 0.0, "proved 0.0 ms after the last event: x"),
        ("hang", None, "x"),
        ("stall", 1000.0, "noticed 1,000 ms after the last event: x"),
        ("diverge", 12.3, "x"),  # nothing was proved of it
    ],
)
def test_a_hang_is_proved_and_a_stall_noticed(kind, proof_ms, told):
    verdict = verdict_of(Finding(kind=kind, ranks=(1,), text="x"))
    timed = replace(verdict, record=replace(verdict.record, proof_ms=proof_ms))
    assert render(timed).splitlines()[1] == f"{kind:<5} {told}"


def test_long_texts_are_wrapped_at_120_columns_and_lose_nothing_in_a_failure():
    words = [f"word{number}" for number in range(60)]
    finding = Finding(kind="wrong_ids", ranks=(), text=" ".join(words), causes=(Cause(rank=0, text="rank 0\n did it"),))
    report = render(verdict_of(finding))
    assert all(len(line) <= WIDTH for line in report.splitlines())
    assert [word for word in report.split() if word.startswith("word")] == words
    assert "cause rank 0 did it" in report


def test_long_texts_are_cut_visibly_in_a_pass():
    finding = Finding(kind="order", ranks=(), text=" ".join(["word"] * 200))
    lines = render(verdict_of(finding, status="PASS")).splitlines()
    assert len(lines) == 3
    assert lines[-1].endswith(" ...")


def finding_of(*texts):
    causes = tuple(Cause(rank=rank, text=f"rank {rank} {text}") for rank, text in enumerate(texts))
    return Finding(kind="hang", ranks=tuple(range(len(texts))), text="x", causes=causes)


@pytest.mark.parametrize("status", ["PASS", "FAIL"])
def test_ranks_that_did_alike_are_one_cause_and_another_culprit_is_told(status):
    report = render(verdict_of(finding_of("left", "left", "raised it", "left"), status=status))
    assert lines_of(report, "cause") == ["cause rank 0 left; ranks 1, 3 alike", "cause rank 2 raised it"]


def test_causes_beyond_the_second_are_named_by_rank_in_a_pass_and_told_in_a_failure():
    finding = finding_of(*"abcde")
    assert lines_of(render(verdict_of(finding, status="PASS")), "cause")[2:] == ["cause and of ranks 2-4"]
    assert lines_of(render(verdict_of(finding)), "cause") == [f"cause rank {rank} {'abcde'[rank]}" for rank in range(5)]


def test_a_headline_is_one_line_that_begins_with_what_and_who():
    one, two = finding_of("raised\n it"), finding_of("left", "raised it")
    assert headline([one]) == "hang: rank 0 raised it"
    assert headline([two, one]) == "hang of ranks 0, 1 (and 1 more): rank 0 left"
    assert headline([replace(one, causes=())]) == "hang: x"


def test_the_site_of_a_cause_is_not_told_twice():
    cause = Cause(rank=1, text="rank 1 calls broadcast at a.py:1 f", site="a.py:1 f")
    report = render(verdict_of(Finding(kind="mismatch", ranks=(1,), text="x", causes=(cause,))))
    assert lines_of(report, "cause") == ["cause rank 1 calls broadcast at a.py:1 f"]


@pytest.mark.parametrize(
    ("rank", "seen", "now", "at"),
    [
        (ledger(0, end=RETURNED), "ended", "returned", ""),
        (ledger(0, waiting=True, end=RETURNED), "ended", "returned", ""),  # it issued without waiting
        (ledger(0, end=RAISED), "ended", "raised InjectedError", RAISED.site),
        (ledger(0, end=End(how="killed", signal=9)), "dead", "killed by SIGKILL", ""),
        (ledger(0, end=End(how="killed", signal=99)), "dead", "killed by signal 99", ""),
        (ledger(0, waiting=True, end=End(how="killed", signal=9)), "dead", "killed by SIGKILL in all_gather 7", ""),
        (ledger(0, end=End(how="exited", exit_code=1)), "dead", "exited, status 1", ""),
        (ledger(0, waiting=True), "running", "waiting in all_gather 7", "selector/merge.py:61 gather_columns"),
        (ledger(0, waiting=True), "stopped", "stopped in all_gather 7", "selector/merge.py:61 gather_columns"),
        (ledger(0), "running", "running", ""),
        (ledger(0), "stalled", "stalled: in top-k", "a.py:1 f"),
    ],
)
def test_where_a_rank_is(rank, seen, now, at):
    frames = ("a.py:1 f", "b.py:2 g") if seen == "stalled" else ()
    liveness = Liveness(state=seen, detail="in top-k" if seen == "stalled" else "", frames=frames)
    run = record(unlike(ONE_RAISES, world_size=1, faults=()), [rank], liveness=(liveness,))
    assert positions(run) == {("all_gather seq 6", now, at): (0,)}


def test_a_rank_is_where_its_own_code_is_and_not_where_the_test_bed_is():
    liveness = Liveness(state="stalled", frames=("tp/recording.py:44 is_completed", "a.py:1 f"))
    run = record(unlike(ONE_RAISES, world_size=1, faults=()), [ledger(0)], liveness=(liveness,))
    assert next(iter(positions(run)))[2] == "a.py:1 f"


def test_a_rank_that_completed_nothing_is_told_so():
    run = record(unlike(ONE_RAISES, world_size=1, faults=()), [ledger(0, completed=0, world_size=1)])
    assert next(iter(positions(run)))[0] == "none"


def test_the_last_completed_collective_is_the_last_that_the_rank_issued():
    issued = (collective(1), collective(2, "started", waited=False), collective(3), collective(4, "failed"))
    run = record(unlike(ONE_RAISES, world_size=1, faults=()), [replace(ledger(0), collectives=issued)])
    assert next(iter(positions(run)))[0] == "all_gather seq 3"


def test_the_group_is_named_where_there_are_several():
    groups = {"world": (0,), "pair": (0, 1)}
    run = record(unlike(ONE_RAISES, world_size=1, faults=()), [ledger(0, waiting=True, groups=groups)])
    assert next(iter(positions(run)))[:2] == ("all_gather seq 6 of world", "waiting in all_gather 7 of world")
    issued = (collective(1, group="pair"), collective(2, "started", group="pair"))
    run = replace(run, ledgers=(replace(run.ledgers[0], collectives=issued),))
    place = "all_gather seq 1 of pair (ranks 0, 1)", "waiting in all_gather 2 of pair (ranks 0, 1)"
    assert next(iter(positions(run)))[:2] == place


def test_only_ranks_in_the_same_position_are_folded():
    ledgers = [ledger(rank, completed=6 + rank % 2, waiting=True) for rank in range(4)]
    assert list(positions(record(NONE_EXPECTED, ledgers)).values()) == [(0, 2), (1, 3)]


def test_the_table_of_a_thousand_ranks_stays_short():
    ledgers = [ledger(rank, completed=rank % 50, waiting=True, world_size=1000) for rank in range(1000)]
    run = record(unlike(NONE_EXPECTED, world_size=1000), ledgers)
    report = render(Verdict(record=run, status="FAIL", findings=()))
    table = [line for line in report.splitlines() if line.startswith("  ")]
    assert table[1].startswith("  0, 50, 100, ... (20 ranks)  ")
    assert table[-1] == "  and 760 more ranks in 38 more places"
    assert len(table) == 14


@pytest.mark.parametrize(("elapsed_s", "told"), [(61.26, "61.3 s"), (0.1, "0.1 s"), (0.0514, "51 ms"), (0.0, "0 ms")])
def test_short_runs_are_told_in_milliseconds(elapsed_s, told):
    verdict = verdict_of(status="PASS")
    assert row(replace(verdict, record=replace(verdict.record, elapsed_s=elapsed_s))).endswith(f", seed 7, {told}")


def test_one_rank_is_not_ranks():
    scenario = unlike(NONE_EXPECTED, world_size=1, added_vocab_size=24)
    told = row(Verdict(record=record(scenario, [ledger(0)], world="sim"), status="PASS", findings=()))
    assert told == "PASS  hang/one-rank-raises  sim  1 rank, 1024 tokens, seed 7, 0.2 s"


@pytest.mark.parametrize(("world", "option"), [("sim", "sim"), ("ray+gloo", "gloo"), ("ray+nccl", "nccl")])
def test_again_names_the_world_that_was_used(world, option):
    assert again(one_raises(world=world)) == f"tpbed run hang/one-rank-raises --seed 7 --world {option}"


def test_again_is_quoted_for_a_shell():
    assert "'odd name'" in again(one_raises(unlike(ONE_RAISES, name="odd name")))


@pytest.mark.parametrize(
    ("expected", "told"),
    [
        (Expected(kind="leak"), "leak"),
        (Expected(kind="order", ranks=()), "order of no rank"),
        (Expected(kind="hang", ranks=(0, 1, 2), op="barrier"), "hang of ranks 0-2 in barrier"),
        (Expected(kind="hang", seq=3, says="k=16"), "hang in seq 3 saying 'k=16'"),
    ],
)
def test_an_expected_finding_is_told_without_what_is_open(expected, told):
    assert describe_expected(expected) == told


def test_the_json_of_a_verdict_holds_what_the_report_says():
    told = json.loads(json.dumps(to_json(judge(one_raises(NONE_EXPECTED)), evidence=Path("runs/record.json"))))
    assert told["status"] == "FAIL"
    assert (told["scenario"], told["world"], told["world_size"], told["seed"]) == (
        "hang/one-rank-raises",
        "ray+gloo",
        4,
        7,
    )
    assert told["culprits"] == [3]
    assert told["proof_ms"] == 12.3
    [finding] = told["findings"]
    assert (finding["kind"], finding["ranks"], finding["waiting_ranks"]) == ("hang", [3], [0, 1, 2])
    assert finding["causes"][0]["error_type"] == "InjectedError"
    assert finding["expected"] is False
    assert [entry["ranks"] for entry in told["ranks"]] == [[0, 1, 2], [3]]
    assert told["evidence"] == "runs/record.json"
    assert told["again"] == "tpbed run hang/one-rank-raises --seed 7 --world gloo"


def test_the_json_of_a_pass_calls_its_finding_expected():
    told = to_json(judge(one_raises()))
    assert [finding["expected"] for finding in told["findings"]] == [True]
    assert told["faults"] == [{"fault": "raise@rank=3,seq=7", "fired": 1}]
    assert (told["not_found"], told["doubts"], told["evidence"]) == ([], [], None)


def suite_of(*verdicts, not_run=()):
    return ElementTree.fromstring(to_junit(verdicts, not_run).encode())[0]


def test_junit_counts_failures_errors_and_what_was_not_run():
    verdicts = [judge(one_raises()), judge(one_raises(NONE_EXPECTED)), judge(one_raises(fired=False))]
    suite = suite_of(*verdicts, not_run=[("slow/one", "nccl cannot express it")])
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped", "time")}
    assert counts == {"tests": "4", "failures": "1", "errors": "1", "skipped": "1", "time": "0.750"}
    assert [[child.tag for child in case] for case in suite] == [
        ["properties"],
        ["properties", "failure"],
        ["properties", "error"],
        ["skipped"],
    ]
    assert [(case.get("classname"), case.get("name")) for case in suite][2:] == [
        ("tpbed.hang", "one-rank-raises"),
        ("tpbed.slow", "one"),
    ]


def test_junit_carries_fault_seed_verdict_culprit_and_proof():
    suite = suite_of(judge(one_raises(NONE_EXPECTED)), judge(one_raises()))
    failed, passed = ({p.get("name"): p.get("value") for p in case.iter("property")} for case in suite)
    assert failed["verdict"] == "FAIL"
    assert passed == {
        "verdict": "PASS",
        "fault": "raise@rank=3,seq=7",
        "seed": "7",
        "culprit": "3",
        "proof_ms": "12.300",
        "world_size": "4",
        "backend": "ray+gloo",
    }
    [failure] = suite.iter("failure")
    assert failure.get("message") == "unexpected: hang of rank 3 in all_gather seq 7"
    assert failure.text == render(judge(one_raises(NONE_EXPECTED)))


def test_junit_survives_what_xml_cannot_hold():
    kill = unlike(NONE_EXPECTED, faults=(Kill(rank=2, seq=3),))
    verdict = replace(judge(one_raises(kill)), doubts=("bell \x07 and <tag> & \ufffe",), status="UNDECIDED")
    [error] = suite_of(verdict).iter("error")
    assert error.get("message").startswith("bell ? and <tag> & ?")
