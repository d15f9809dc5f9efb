"""Finding: one thing that went wrong, whose fault it was, where and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tpbed.harness.scenario import Expected, Kind
from tpbed.tp.ledger import WORLD, Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What one rank did that made the finding inevitable."""

    rank: int
    text: str  # a sentence that begins with "rank N"
    error_type: str = ""
    site: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One trouble with its root: consequences of it are not findings of their own."""

    kind: Kind
    ranks: tuple[int, ...]  # at fault, never those that merely waited
    text: str  # what was observed
    op: str = ""
    seq: int | None = None
    group: str = ""
    step: str = ""
    waiting_ranks: tuple[int, ...] = ()
    causes: tuple[Cause, ...] = ()

    def matches(self, expected: Expected) -> bool:
        """Whether this is the finding that a scenario expects."""
        said = " ".join([self.text, *(cause.text for cause in self.causes)])
        return (
            self.kind == expected.kind
            and expected.ranks in (None, self.ranks)
            and expected.op in (None, self.op)
            and expected.seq in (None, self.seq)
            and (expected.error is None or expected.error in (cause.error_type for cause in self.causes))
            and (expected.says is None or expected.says in said)
        )


def name_ranks(ranks: tuple[int, ...] | list[int]) -> str:
    """`rank 3`, `ranks 0-2`, `ranks 0, 2-3`: runs of three and more are shortened."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(parts)}"


def name_group(name: str, ledgers: Sequence[Ledger]) -> str:
    """`group world`, `group 2 (ranks 0, 1)`: with its members, as the first rank says that knows the group."""
    members = next((ledger.groups[name] for ledger in ledgers if name in ledger.groups), ())
    return f"group {name}" + (f" ({name_ranks(members)})" if members and name != WORLD else "")
