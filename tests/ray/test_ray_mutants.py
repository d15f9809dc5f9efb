"""What kills a mutant on simulated ranks kills it on real ones."""

from dataclasses import replace

from tpbed.harness.kill_matrix import Prober
from tpbed.harness.kills import make_row
from tpbed.harness.mutants import MUTANTS, Mutant
from tpbed.harness.real_kills import confirm

EXAMPLES = 12
HARMLESS = Mutant(name="selector/harmless", about="Nothing.", needs={"selector": "staged"}, change={"steps": 1})


def test_mutants_die_on_real_ranks_and_what_is_right_does_not(monkeypatch):
    prober = Prober(EXAMPLES, seed=0)
    wrong = make_row("program/swapped-gathers", "", prober.kills("program/swapped-gathers"))
    monkeypatch.setitem(MUTANTS, HARMLESS.name, HARMLESS)
    right = replace(wrong, name=HARMLESS.name)  # as if a check had killed it, too
    diagnosis = replace(wrong, name="diagnosis/names-everybody")  # runs nothing
    told = []
    found = confirm([wrong, right, diagnosis], "gloo", examples=EXAMPLES, seed=0, on_progress=told.append)
    assert {one.name: (one.confirmed, one.real) for one in found} == {
        "program/swapped-gathers": (True, ("mismatch",)),
        HARMLESS.name: (False, ()),
    }
    assert len(told) == 2
