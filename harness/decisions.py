"""find_divergences: choices that ranks took from facts of their own, and not all alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tpbed.harness.findings import Cause, Finding, name_ranks
from tpbed.tp.ledger import Decision, Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """One decision that the ranks took differently; `issued` collectives came before it on the earliest of them."""

    name: str
    step: str
    issued: int
    odd: tuple[tuple[int, Decision], ...]  # the ranks outside the majority; all of them where there is none
    usual: str

    def causes(self) -> tuple[Cause, ...]:
        """One sentence per odd rank."""
        return tuple(
            Cause(
                rank=rank,
                text=f"rank {rank} decided {self.name}={d.value} because {d.because}, its peers {self.usual}",
                site=d.site,
            )
            for rank, d in self.odd
        )

    def finding(self) -> Finding:
        """The divergence as a trouble of its own, where nothing came of it."""
        ranks = tuple(rank for rank, _ in self.odd)
        text = f"{name_ranks(ranks)} decided {self.name} otherwise than the others"
        return Finding(kind="diverge", ranks=ranks, step=self.step, text=text, causes=self.causes())


def find_divergences(ledgers: Sequence[Ledger]) -> list[Divergence]:
    """Decisions of the same name, step and occurrence that differ in value, the earliest first."""
    taken: dict[tuple[str, str, int], dict[int, Decision]] = {}
    for ledger in ledgers:
        seen: Counter[tuple[str, str]] = Counter()
        for decision in ledger.decisions:
            seen[decision.name, decision.step] += 1
            key = (decision.name, decision.step, seen[decision.name, decision.step])
            taken.setdefault(key, {})[ledger.rank] = decision
    differing = (by_rank for by_rank in taken.values() if len({d.value for d in by_rank.values()}) > 1)
    return sorted((_divergence(by_rank) for by_rank in differing), key=lambda d: d.issued)


def _divergence(by_rank: dict[int, Decision]) -> Divergence:
    votes = Counter(decision.value for decision in by_rank.values()).most_common()
    tied = votes[0][1] == votes[1][1]
    odd = tuple((rank, d) for rank, d in sorted(by_rank.items()) if tied or d.value != votes[0][0])
    first = min(by_rank.values(), key=lambda d: d.issued)
    usual = "otherwise" if tied else votes[0][0]
    return Divergence(name=first.name, step=first.step, issued=first.issued, odd=odd, usual=usual)
