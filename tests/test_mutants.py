"""Mutants: all die, each check kills one, what is right lives; and the matrix says so where it is not so."""

import json
from dataclasses import replace

import pytest
from ledgers import Story, tell

from tpbed.harness import cli, kill_matrix
from tpbed.harness.diagnose import diagnose
from tpbed.harness.fault_oracle import foresee
from tpbed.harness.faults import Raise
from tpbed.harness.kill_matrix import ALL_RIGHT, EXAMPLES, Prober, all_mutants, build_matrix, draw_plans
from tpbed.harness.kills import CHECKS, Matrix, make_row
from tpbed.harness.mutants import MUTANTS, Mutant
from tpbed.harness.plan import make_plan
from tpbed.harness.properties import Simulator
from tpbed.harness.scenario import Scenario
from tpbed.harness.swapped import gist, swap_ranks

pytestmark = pytest.mark.usefixtures("one_thread")
HARMLESS = Mutant(name="selector/harmless", about="Nothing.", needs={"selector": "staged"}, change={"rows": 1})
FEW = ["selector/no-mask", "topk/raises-on-nan", "diagnosis/names-everybody"]


@pytest.fixture(scope="module")
def prober():
    return Prober(EXAMPLES, seed=0)


@pytest.fixture(scope="module")
def first_kills(prober):
    """By mutant: the checks that kill it in the first of the examples in which one does."""
    return {name: next(filter(None, prober.kills(name)), frozenset()) for name in all_mutants()}


def test_there_are_sixty_mutants_and_more_and_each_says_what_is_wrong():
    known = all_mutants()
    assert len(MUTANTS) >= 60
    assert len(set(known.values())) == len(known)
    assert all(about.endswith(".") for about in known.values())


def test_a_mutant_changes_one_thing_in_a_scenario_that_is_right_without_it():
    plain = draw_plans(1, seed=0)[0].scenario
    for mutant in MUTANTS.values():
        control, planted = mutant.control(plain), mutant.planted(plain)
        changed = [name for name in plain.__dataclass_fields__ if getattr(control, name) != getattr(planted, name)]
        assert changed == list(mutant.change), mutant.name
        assert len(changed) == 1, mutant.name


def test_every_mutant_dies(first_kills):
    assert [name for name, killers in first_kills.items() if not killers] == []


def test_every_check_kills_a_mutant(first_kills, prober):
    in_time = set().union(*prober.kills("program/exits-with-status-zero"))  # leaves nobody waiting
    assert set(CHECKS) - in_time - set().union(*first_kills.values()) == set()


@pytest.mark.parametrize("name", ALL_RIGHT)
def test_what_is_right_is_killed_in_no_example(name):
    assert set().union(*Prober(6, seed=1).false_alarms(name)) == set()


def test_a_mutant_that_changes_nothing_survives(monkeypatch):
    monkeypatch.setitem(MUTANTS, HARMLESS.name, HARMLESS)
    assert build_matrix([HARMLESS.name], examples=3).survivors == (HARMLESS.name,)


def test_something_wrong_that_is_called_right_is_a_false_alarm(monkeypatch):
    monkeypatch.setattr(kill_matrix, "ALL_RIGHT", ("no-offset",))
    assert build_matrix([], examples=10).false_alarms == ("no-offset",)


def row(name, *kills):
    return make_row(name, "", map(frozenset, kills))


def test_a_row_counts_the_examples_in_which_each_check_kills():
    found = row("a/b", (), ("order", "hang"), (), ("hang",))
    assert (found.examples, found.killed_in, found.kills) == (4, (2, 4), {"hang": 2, "order": 1})
    assert list(found.kills) == ["hang", "order"]  # as CHECKS has them


def test_the_matrix_names_survivors_idle_checks_and_mutants_that_one_check_kills():
    matrix = Matrix(rows=(row("a", ("hang",)), row("b", ("hang", "order")), row("c", ())), controls=(row("right", ()),))
    assert matrix.survivors == ("c",)
    assert matrix.killed_by_one == {"a": "hang"}
    assert matrix.by_check["hang"] == ("a", "b")
    assert set(matrix.idle_checks) == set(CHECKS) - {"hang", "order"}
    assert matrix.false_alarms == ()


def test_a_seed_repeats_the_matrix_whatever_the_number_of_processes():
    alone = build_matrix(FEW, examples=2, seed=3)
    assert build_matrix(FEW, examples=2, seed=3, jobs=2) == alone
    assert build_matrix(FEW, examples=2, seed=4) != alone


def a_hang():
    """Rank 3 raises, and its peers wait for it."""
    healthy = [Story(rank).calls().waits() for rank in range(3)]
    return tell(*healthy, Story(3).calls().raises("KeyError"))


def test_the_other_rank_is_named_once_it_has_changed_places_with_the_culprit():
    (found,) = diagnose(*swap_ranks(*a_hang(), 3, 1))
    assert (found.kind, found.ranks, found.seq, found.causes[0].rank) == ("hang", (1,), 2, 1)
    assert set(found.waiting_ranks) == {0, 2, 3}


def test_ranks_that_change_places_do_so_in_every_group():
    pair = [Story(rank).group("2", [2, 3]).calls() for rank in range(2)]
    ledgers, liveness = tell(*(story.returns() for story in pair), *(Story(r).group("2", [2, 3]) for r in (2, 3)))
    ledgers[2] = Story(2).group("2", [2, 3]).calls().waits(group="2").ledger()
    ledgers[3] = Story(3).group("2", [2, 3]).calls().returns().ledger()
    (found,) = diagnose(*swap_ranks(ledgers, liveness, 3, 0))
    assert (found.kind, found.ranks, found.group, found.waiting_ranks) == ("hang", (0,), "2", (2,))


def test_ranks_that_change_places_twice_are_where_they_were():
    ledgers, liveness = a_hang()
    again = swap_ranks(*swap_ranks(ledgers, liveness, 3, 1), 3, 1)
    assert again == (tuple(ledgers), tuple(liveness))


def test_findings_say_the_same_only_of_the_same_ranks_at_the_same_place():
    found = diagnose(*a_hang())
    renamed = gist(found, {3: 1, 1: 3})
    assert gist(found) == gist(found[::-1])
    assert renamed == gist(diagnose(*swap_ranks(*a_hang(), 3, 1))) != gist(found)
    assert gist([replace(found[0], seq=1)]) != gist(found)


def test_a_fault_on_another_rank_leaves_the_ledgers_of_ranks_that_changed_places():
    """What swap_ranks makes of ledgers is what really happens when another rank is struck."""

    def findings(rank):
        scenario = Scenario(name="a/b", claim="", kind=0, world_size=4, widths=(8,) * 4, org_vocab_size=32)
        struck = replace(scenario, faults=(Raise(rank=rank, seq=2),))
        record = Simulator()(make_plan(struck, seed=0))
        assert foresee(record.plan).culprits == {rank}
        return record.ledgers, record.liveness

    assert gist(diagnose(*swap_ranks(*findings(0), 0, 2))) == gist(diagnose(*findings(2)))


@pytest.fixture
def tpbed(capsys, monkeypatch):
    """Runs the command with one control, which are tried above."""
    monkeypatch.setattr(kill_matrix, "ALL_RIGHT", ("staged",))

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            cli.main(["mutants", *arguments])
        return end.value.code, *capsys.readouterr()

    return run


def test_the_command_tells_each_mutant_and_what_each_check_kills(tpbed):
    status, out, err = tpbed("selector/no-offset", "program/shard-only", "--examples", "8", "--jobs", "1")
    lines = out.splitlines()
    assert status == 0
    assert [line.split()[0] for line in lines[1:3]] == ["selector/no-offset", "program/shard-only"]
    assert any(line.split()[:3] == ["diverge", "1", "0"] for line in lines)
    assert lines[-1].startswith("2 mutants: 2 killed, 0 by one check only; of 1 right things 0 killed")
    assert "trying program/shard-only" in err


def test_a_mutant_that_survives_is_named_and_exit_status_1(tpbed, monkeypatch):
    monkeypatch.setitem(MUTANTS, HARMLESS.name, HARMLESS)
    status, out, _ = tpbed(HARMLESS.name, "--examples", "4", "--jobs", "1")
    assert status == 1
    assert f"SURVIVES     {HARMLESS.name}" in out.splitlines()


def test_a_check_that_kills_no_mutant_is_named_and_exit_status_1(tpbed, monkeypatch):
    monkeypatch.setattr(kill_matrix, "MUTANTS", {name: MUTANTS[name] for name in ["selector/no-offset"]})
    monkeypatch.setattr(kill_matrix, "DIAGNOSES", {})
    status, out, _ = tpbed("--examples", "8", "--jobs", "1")
    assert status == 1
    assert "IDLE         hang kills no mutant" in out.splitlines()
    assert "IDLE         wrong_ids kills no mutant" not in out.splitlines()


def test_json_has_a_value_for_each_mutant_control_and_check_and_the_summary_last(tpbed):
    status, out, _ = tpbed("diagnosis/names-the-*", "--examples", "8", "--jobs", "1", "--json")
    values = [json.loads(line) for line in out.splitlines()]
    told = [value["type"] for value in values]
    mutants = [value for value in values if value["type"] == "mutant"]
    assert status == 0
    assert told == ["right", *["mutant"] * len(mutants), *["check"] * len(CHECKS), "summary"]
    assert all(value["kills"] and value["world"] == "sim" for value in mutants)
    assert (values[-1]["mutants"], values[-1]["survivors"]) == (len(mutants), [])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nothing"], "give a name, a glob, or one of selector, topk, head, program, diagnosis."),
        (["--world", "mars"], "give one of sim, gloo."),
    ],
)
def test_what_is_asked_for_wrongly_is_one_line_and_exit_status_2(tpbed, arguments, told):
    status, out, err = tpbed(*arguments)
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith("tpbed: ")
    assert err.endswith(f"{told}\n")
