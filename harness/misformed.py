"""Misformed groups: ranks that made their groups in another order than their peers."""

from __future__ import annotations

from collections.abc import Sequence

from tpbed.harness.findings import Cause, Finding, name_ranks
from tpbed.tp.ledger import Ledger

Camps = dict[tuple[int, ...], list[int]]  # members of one group, and the ranks that say so


def find_misformed_groups(ledgers: Sequence[Ledger]) -> list[Finding]:
    """The first group that ranks have formed of other members under the same name.

    torch.distributed counts the calls of new_group, on all ranks, and makes names of the counts: so ranks that make
    their groups in another order have other groups under a name. gloo and NCCL wait for each other then, in new_group
    or in the first collective.
    """
    names = dict.fromkeys(name for ledger in ledgers for name in ledger.groups)
    found = ((name, _camps(name, ledgers)) for name in names)
    return [_explain(name, camps) for name, camps in found if len(camps) > 1][:1]


def _camps(name: str, ledgers: Sequence[Ledger]) -> Camps:
    camps: Camps = {}
    for ledger in ledgers:
        if name in ledger.groups:
            camps.setdefault(ledger.groups[name], []).append(ledger.rank)
    return camps


def _explain(name: str, camps: Camps) -> Finding:
    ordered = sorted(camps.items(), key=lambda camp: -len(camp[1]))
    tied = len(ordered[0][1]) == len(ordered[1][1])
    odd = tuple(sorted(rank for _, ranks in ordered[0 if tied else 1 :] for rank in ranks))
    told = {rank: f"made group {name} of {name_ranks(members)}" for members, ranks in ordered for rank in ranks}
    return Finding(
        kind="mismatch",
        ranks=odd,
        op="new_group",
        group=name,
        text="ranks make their groups in different orders: "
        + "; ".join(f"{name_ranks(ranks)} made group {name} of {name_ranks(members)}" for members, ranks in ordered),
        causes=tuple(Cause(rank=rank, text=f"rank {rank} {told[rank]}") for rank in odd),
    )
