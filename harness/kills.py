"""Row and Matrix: which check kills which mutant, in how many examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tpbed.harness.plan import PropertyName

KINDS = ("hang", "mismatch", "stall", "diverge", "wrong_ids", "order", "crash_one", "crash_all")  # of findings
INVARIANTS: tuple[PropertyName, ...] = (
    "masked_columns_never_win",
    "tp_invariant",
    "row_invariant",
    "shard_order_invariant",
)
OF_DIAGNOSIS = ("faults_diagnosed", "culprit_swapped", "no_false_alarm")
CHECKS = (*KINDS, *INVARIANTS, *OF_DIAGNOSIS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What became of one mutant. kills: in how many examples each check kills it; killed_in: their numbers, from 1."""

    name: str
    about: str
    examples: int
    killed_in: tuple[int, ...]
    kills: Mapping[str, int]

    @property
    def survives(self) -> bool:
        """No check has seen it in any example."""
        return not self.killed_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A row for each mutant, and one for all that is right, which nothing may kill."""

    rows: tuple[Row, ...]
    controls: tuple[Row, ...]

    @property
    def survivors(self) -> tuple[str, ...]:
        """Mutants that no check kills."""
        return tuple(row.name for row in self.rows if row.survives)

    @property
    def false_alarms(self) -> tuple[str, ...]:
        """What is right and was killed."""
        return tuple(row.name for row in self.controls if not row.survives)

    @property
    def by_check(self) -> dict[str, tuple[str, ...]]:
        """The mutants that each check kills."""
        return {check: tuple(row.name for row in self.rows if check in row.kills) for check in CHECKS}

    @property
    def idle_checks(self) -> tuple[str, ...]:
        """Checks that kill nothing: nothing says that they can fail."""
        return tuple(check for check, killed in self.by_check.items() if not killed)

    @property
    def killed_by_one(self) -> dict[str, str]:
        """Mutants that a single check kills, and which."""
        return {row.name: next(iter(row.kills)) for row in self.rows if len(row.kills) == 1}


def make_row(name: str, about: str, kills: Iterable[frozenset[str]]) -> Row:
    """A row from the checks that kill it, by example."""
    found = list(kills)
    counts = Counter(check for killers in found for check in killers)
    return Row(
        name=name,
        about=about,
        examples=len(found),
        killed_in=tuple(number for number, killers in enumerate(found, start=1) if killers),
        kills={check: counts[check] for check in CHECKS if counts[check]},
    )
