"""Runs made by hand: what worlds would have seen, without a world."""

from dataclasses import replace

from tpbed.harness.faults import Raise
from tpbed.harness.plan import make_plan
from tpbed.harness.record import RunRecord
from tpbed.harness.scenario import Expected, Scenario
from tpbed.tp.ledger import WORLD, CollectiveRecord, End, Ledger, Mark
from tpbed.tp.world import Liveness

SITE = "selector/merge.py:61 gather_columns"
RAISED = End(how="raised", error_type="InjectedError", message="injected error", site="harness/inject.py:184 _raise")
RETURNED = End(how="returned")


def collective(seq, state="completed", **fields):
    """An all_gather of the default group."""
    plain = {"group": WORLD, "op": "all_gather", "dtype": "float32", "shape": (4, 16), "stride": (16, 1)}
    return CollectiveRecord(seq=seq, payload_bytes=256, site=SITE, state=state, **{**plain, **fields})


def ledger(rank, *, completed=6, waiting=False, end=None, marks=(), **fields):
    """A rank that completed some collectives, and then waits in the next one, or ended."""
    issued = [collective(seq) for seq in range(1, completed + 1)]
    issued += [collective(completed + 1, "started")] if waiting else []
    ranks = tuple(range(fields.setdefault("world_size", 4)))
    groups = fields.pop("groups", {WORLD: ranks})
    return Ledger(rank=rank, groups=groups, collectives=tuple(issued), end=end, marks=marks, **fields)


def record(scenario, ledgers, *, world="ray+gloo", seed=7, **fields):
    """A run of a scenario in which the ranks did what their ledgers say."""
    plain = {
        "liveness": tuple(Liveness(state="ended" if one.end else "running") for one in ledgers),
        "stuck": tuple(one.rank for one in ledgers if one.end is None),
        "proof_ms": None,
        "recovery_ms": None,
        "replaced": (),
        "elapsed_s": 0.25,
        "torch_version": "2.13.0",
    }
    plan = make_plan(scenario, seed=seed)
    return RunRecord(plan=plan, world=world, ledgers=tuple(ledgers), **{**plain, **fields})


ONE_RAISES = Scenario(
    name="hang/one-rank-raises",
    claim="A rank that raises before a collective is named with its own error, and not the ranks left waiting.",
    kind=1,
    steps=8,
    faults=(Raise(rank=3, seq=7),),
    expect=(Expected(kind="hang", ranks=(3,), op="all_gather", seq=7, error="InjectedError"),),
)


def one_raises(scenario=ONE_RAISES, *, fired=True, **fields):
    """The record of ONE_RAISES, or of a scenario like it: rank 3 raises before seq 7, and the others wait there."""
    marks = (Mark(name="fault", value=0, step="3", issued=6),) if fired else ()
    ledgers = [*(ledger(rank, waiting=True) for rank in range(3)), ledger(3, end=RAISED, marks=marks)]
    return record(scenario, ledgers, **{"proof_ms": 12.3, **fields})


def unlike(scenario, **fields):
    """The same scenario with other fields."""
    return replace(scenario, **fields)
