"""Every call, right and wrong, over gloo in two processes and in the simulated world: the same for each rank.

A rank's fate is the value it returns, the type of the error that it is refused with, or LOST: it waits for ever, its
transport breaks, or gloo aborts its process. Which of the three a lost rank meets with gloo depends on the moment.
`python tests/test_conformance.py` runs all of it and prints the table, and on stderr what each difference is.
"""

import sys
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from tpbed.harness.diagnose import TRANSPORT, diagnose
from tpbed.tp.ray_world import RayWorld
from tpbed.tp.simulated import SimulatedWorld

pytestmark = pytest.mark.xdist_group("ray")
LOST = "lost"
SECOND = timedelta(seconds=1)


def name_of(value):
    return getattr(value, "__name__", value)


# The calls: what a rank brings, and what it has then.


class Bring:
    """What one rank brings to a call of two ranks."""

    def __init__(self, rank, dtype=torch.float32, rows=2, root=0, parts=2, reduce_op="SUM", strided=False):
        self.rank, self.dtype, self.rows, self.root, self.parts = rank, dtype, rows, root, parts
        self.reduce_op, self.strided = getattr(dist.ReduceOp, reduce_op), strided

    def tensor(self, rows=None):
        rows = self.rows if rows is None else rows
        values = torch.arange(rows * 2).to(self.dtype) + 100 * self.rank
        return values.view(2, rows).t() if self.strided else values.view(rows, 2)

    def empty(self, rows=None):
        return torch.zeros_like(self.tensor(rows), memory_format=torch.contiguous_format)

    def tensors(self):
        return [self.tensor() for _ in range(self.parts)]

    def empties(self):
        return [self.empty() for _ in range(self.parts)]


def all_reduce(bring):
    value = bring.tensor()
    dist.all_reduce(value, bring.reduce_op)
    return value


def reduce(bring):
    value = bring.tensor()
    dist.reduce(value, bring.root, bring.reduce_op)
    return value if bring.rank == bring.root else None  # elsewhere it is scratch


def broadcast(bring):
    value = bring.tensor()
    dist.broadcast(value, bring.root)
    return value


def all_gather(bring):
    got = bring.empties()
    dist.all_gather(got, bring.tensor())
    return got


def all_gather_into_tensor(bring):
    got = bring.empty(2 * bring.rows)
    dist.all_gather_into_tensor(got, bring.tensor())
    return got


def gather(bring):
    got = bring.empties() if bring.rank == bring.root else None
    dist.gather(bring.tensor(), got, bring.root)
    return got


def scatter(bring):
    got = bring.empty()
    dist.scatter(got, bring.tensors() if bring.rank == bring.root else None, bring.root)
    return got


def reduce_scatter(bring):
    got = bring.empty()
    dist.reduce_scatter(got, bring.tensors(), bring.reduce_op)
    return got


def reduce_scatter_tensor(bring):
    got = bring.empty()
    dist.reduce_scatter_tensor(got, bring.tensor(2 * bring.rows), bring.reduce_op)
    return got


def all_to_all(bring):
    got = bring.empties()
    dist.all_to_all(got, bring.tensors())
    return got


def all_to_all_single(bring):
    got = bring.empty(2 * bring.rows)
    dist.all_to_all_single(got, bring.tensor(2 * bring.rows))
    return got


def all_reduce_coalesced(bring):
    values = bring.tensors()
    dist.all_reduce_coalesced(values, bring.reduce_op)
    return values


def all_reduce_under_a_manager(bring):
    values = bring.tensors()
    with dist._coalescing_manager(async_ops=True) as manager:
        for value in values:
            dist.all_reduce(value, bring.reduce_op)
    manager.wait()
    return values


def all_gather_coalesced(bring):
    got = [bring.empties() for _ in range(2)]
    dist.all_gather_coalesced(got, bring.tensors())
    return got


def send(bring):
    value = bring.tensor()
    dist.send(value, 1) if bring.rank == 0 else dist.recv(value, 0)
    return value


def receive_from_anybody(bring):
    value = bring.tensor()
    source = dist.send(value, 1) if bring.rank == 0 else dist.recv(value)
    return value, source


def batch_isend_irecv(bring):
    got, peer = bring.empty(), 1 - bring.rank
    operations = [dist.P2POp(dist.isend, bring.tensor(), peer), dist.P2POp(dist.irecv, got, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return got


def barrier(bring):
    dist.barrier()


def monitored_barrier(bring):
    dist.group.WORLD.monitored_barrier(SECOND, False)


def functional_all_reduce(bring):
    return functional.all_reduce(bring.tensor(), "sum", dist.group.WORLD) + 0


def functional_all_gather(bring):
    return functional.all_gather_tensor(bring.tensor(), 0, dist.group.WORLD) + 0


def functional_reduce_scatter(bring):
    return functional.reduce_scatter_tensor(bring.tensor(2 * bring.rows), "sum", 0, dist.group.WORLD) + 0


def functional_all_to_all(bring):
    return functional.wait_tensor(functional.all_to_all_single(bring.tensor(), None, None, dist.group.WORLD))


def functional_broadcast(bring):
    return functional.broadcast(bring.tensor(), bring.root, dist.group.WORLD) + 0


FOLDS = [all_reduce, reduce, reduce_scatter, reduce_scatter_tensor, all_reduce_coalesced]
LISTS = [all_gather, reduce_scatter, all_to_all, gather, scatter, all_gather_coalesced, all_reduce_coalesced]
ROOTS = [reduce, broadcast, gather, scatter, functional_broadcast]
EMPTY = [barrier, monitored_barrier]
CALLS = [
    *[all_reduce, reduce, broadcast, all_gather, all_gather_into_tensor, gather, scatter, reduce_scatter],
    *[reduce_scatter_tensor, all_to_all, all_to_all_single, all_reduce_coalesced, all_reduce_under_a_manager],
    *[all_gather_coalesced, send, receive_from_anybody, batch_isend_irecv, barrier, monitored_barrier],
    *[functional_all_reduce, functional_all_gather, functional_reduce_scatter, functional_all_to_all],
    functional_broadcast,
]
WAYS = {  # how rank 1 differs, and which calls can differ so
    "valid": ({}, CALLS),
    "missing rank": (None, CALLS),
    "other op": (None, CALLS),
    "other dtype": ({"dtype": torch.int32}, [call for call in CALLS if call not in EMPTY]),
    "other shape": ({"rows": 3}, [call for call in CALLS if call not in EMPTY]),
    "other root": ({"root": 1}, ROOTS),
    "other reduce op": ({"reduce_op": "MAX"}, FOLDS),
    "wrong list length": ({"parts": 3}, LISTS),
    "not contiguous": ({"strided": True}, [call for call in CALLS if call not in EMPTY]),
}
CASES = [(call, way) for way, (_, calls) in WAYS.items() for call in calls]


def played(call, way):
    """The rank program of one case."""

    def program(rank):
        warnings.simplefilter("ignore")
        if rank == 1 and way == "missing rank":
            return None
        if rank == 1 and way == "other op":
            return plain((barrier if call not in EMPTY else all_reduce)(Bring(rank)))
        return plain(call(Bring(rank, **(WAYS[way][0] or {} if rank == 1 else {}))))

    return program


def plain(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def fates(world, program):
    """By rank."""
    run = world.run(program)
    return tuple(fate(ledger, result) for ledger, result in zip(run.ledgers, run.results, strict=True))


def fate(ledger, result):
    if ledger.end is None or ledger.end.how in ("killed", "exited"):
        return LOST
    if ledger.end.how == "returned":
        return result
    lost = ledger.end.error_type == "OverrunError" or any(word in ledger.end.message for word in TRANSPORT)
    return LOST if lost else ledger.end.error_type


@pytest.fixture(scope="session")
def pair():
    with RayWorld(2) as world:
        yield world


GARBLED = {  # gloo reduces some parts of a tensor by the op and dtype of one rank, and some by those of the other
    *((call, "other reduce op") for call in FOLDS),
    *((call, "other dtype") for call in (*FOLDS, all_reduce_under_a_manager)),
    *((call, "other dtype") for call in (functional_all_reduce, functional_reduce_scatter)),
}
GROWN = {  # gloo lets who expects more than is sent go on, with what came; NCCL does not say what it does
    *((call, "other shape") for call in (broadcast, scatter, gather, all_gather, all_gather_into_tensor)),
    *((call, "other shape") for call in (all_to_all, all_to_all_single, all_gather_coalesced)),
    *((call, "other shape") for call in (functional_broadcast, functional_all_gather)),
    (all_gather_coalesced, "wrong list length"),
}
CUT = {(batch_isend_irecv, "other shape")}  # gloo aborts rank 0, and rank 1 may have got its message by then


def are_alike(call, way, over_gloo, simulated):
    """Whether the simulated world does as gloo, or worse where gloo lets a mistake pass."""
    if (call, way) in CUT:
        return over_gloo[0] == simulated[0] == LOST
    if (call, way) in GROWN:
        return simulated == (LOST, LOST)
    if (call, way) in GARBLED:
        return [fate == LOST for fate in over_gloo] == [fate == LOST for fate in simulated]
    return over_gloo == simulated


@pytest.mark.parametrize(("call", "way"), CASES, ids=name_of)
def test_each_rank_fares_alike_over_gloo_and_simulated(pair, call, way):
    program = played(call, way)
    over_gloo, simulated = fates(pair, program), fates(SimulatedWorld(2), program)
    assert are_alike(call, way, over_gloo, simulated), (over_gloo, simulated)


@pytest.mark.parametrize(
    ("call", "way"), sorted(GARBLED | GROWN | CUT, key=lambda case: (case[0].__name__, case[1])), ids=name_of
)
def test_what_gloo_lets_pass_is_found_as_a_mismatch(call, way):
    run = SimulatedWorld(2).run(played(call, way))
    assert [finding.kind for finding in diagnose(run.ledgers, run.liveness)] == ["mismatch"]


STATED = {"mixed": GARBLED, "stricter": GROWN, "cut": CUT}  # where the simulated world differs on purpose, and how
LEGEND = """
same: each rank returns the same, is refused with the same error, or is lost (waits for ever, or ends) in both worlds.
mixed: gloo leaves a mixture of both ranks' ops or dtypes in the tensors; a simulated rank gets the result of its own.
stricter: gloo lets who expects more than is sent go on with what came; simulated ranks wait for ever.
cut: gloo ends rank 0, and rank 1 may have its message by then; simulated ranks wait for ever.
Each of the last three is found as a mismatch."""


def comparison(call, way, over_gloo, simulated):
    """A cell of the table."""
    if not are_alike(call, way, over_gloo, simulated):
        return "DIFFERS"
    return next((word for word, cases in STATED.items() if (call, way) in cases), "same")


def table(cells):
    """Markdown, with a row for each call; cells: words by call and way."""
    rows = [["call", *WAYS], ["---"] * (1 + len(WAYS))]
    rows += [[call.__name__, *(cells.get((call, way), "") for way in WAYS)] for call in CALLS]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def test_the_table_tells_apart_what_is_the_same_stated_and_neither():
    assert comparison(barrier, "valid", (1, 1), (1, 1)) == "same"
    assert comparison(all_reduce, "other dtype", (1, 2), (3, 4)) == "mixed"
    assert comparison(all_gather, "other shape", (1, LOST), (LOST, LOST)) == "stricter"
    assert comparison(batch_isend_irecv, "other shape", (LOST, 1), (LOST, LOST)) == "cut"
    assert (
        comparison(all_gather, "other shape", (1, 1), (1, 1)) == comparison(send, "valid", (1, 1), (1, 2)) == "DIFFERS"
    )


def main():
    cells = {}
    with RayWorld(2) as real:
        for call, way in CASES:
            print(f"{call.__name__}, {way} ...", file=sys.stderr, flush=True)
            program = played(call, way)
            over_gloo, simulated = fates(real, program), fates(SimulatedWorld(2), program)
            cells[call, way] = comparison(call, way, over_gloo, simulated)
            if cells[call, way] != "same":
                print(
                    f"{cells[call, way]}: {over_gloo!s:.100} over gloo, {simulated!s:.100} simulated", file=sys.stderr
                )
    print(table(cells), LEGEND, sep="\n")


if __name__ == "__main__":
    main()
