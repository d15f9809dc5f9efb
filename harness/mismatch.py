"""find_mismatches: ranks that met in the same collective with different calls, and which of them is the odd one out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tpbed.harness.findings import Cause, Finding, name_group, name_ranks
from tpbed.harness.misformed import find_misformed_groups
from tpbed.tp.ledger import CollectiveRecord, Ledger

_Placed = tuple[int, CollectiveRecord]
Meeting = dict[int, CollectiveRecord]  # by rank: what each issued as its collective `seq` of a group
FIELDS = ("op", "dtype", "shape", "reduce_op", "root", "step")
ELEMENTWISE = frozenset({"all_reduce", "reduce", "broadcast"})  # ops whose answer lies as what was sent does
RAGGED = frozenset({"all_to_all", "gather_object"})  # ops whose contributions may differ in shape between ranks


def find_mismatches(ledgers: Sequence[Ledger]) -> list[Finding]:
    """Groups made in different orders, and the first mismatch of each group.

    A mismatch is another op, dtype, shape, reduce op, root or step at the same seq.

    Ranks that are out of step while their shapes match are found by step label, or, where a program has none, by call
    sites: a rank at a place that its peers pass at another seq.
    """
    misformed = find_misformed_groups(ledgers)
    names = dict.fromkeys(name for ledger in ledgers for name in ledger.groups)
    groups = [name for name in names if not any(name == finding.group for finding in misformed)]
    found = (_first_of_group(name, ledgers) for name in groups)
    return [*misformed, *(finding for finding in found if finding is not None)]


def _first_of_group(group: str, ledgers: Sequence[Ledger]) -> Finding | None:
    history = [placed for ledger in ledgers for placed in _placed(ledger, group)]
    users = _users_of_sites(group, ledgers)
    for seq, meeting in _meetings(group, ledgers):
        if len({_signature(r) for r in meeting.values()}) > 1 or _passed_elsewhere(meeting, users):
            return _explain(group, seq, meeting, history, ledgers)
    return None


def _placed(ledger: Ledger, group: str) -> Iterator[_Placed]:
    """Each call of a rank in a group, with how many it had made there in the same step."""
    made: Counter[str] = Counter()
    for record in ledger.in_group(group):
        yield made[record.step], record
        made[record.step] += 1


def _meetings(group: str, ledgers: Sequence[Ledger]) -> Iterator[tuple[int, Meeting]]:
    by_seq: dict[int, Meeting] = {}
    for ledger in ledgers:
        for record in ledger.in_group(group):
            by_seq.setdefault(record.seq, {})[ledger.rank] = record
    yield from sorted(by_seq.items())


def _signature(record: CollectiveRecord) -> tuple[object, ...]:
    return tuple("" if name == "shape" and record.op in RAGGED else getattr(record, name) for name in FIELDS)


def _users_of_sites(group: str, ledgers: Sequence[Ledger]) -> dict[str, set[int]]:
    users: dict[str, set[int]] = {}
    for ledger in ledgers:
        for record in ledger.in_group(group):
            users.setdefault(record.site, set()).add(ledger.rank)
    return users


def _passed_elsewhere(meeting: Meeting, users: dict[str, set[int]]) -> bool:
    """Whether call sites differ here and are no roles: every rank that is here passes each of these places sometime."""
    sites = {record.site for record in meeting.values()}
    return len(sites) > 1 and all(users[site].issuperset(meeting) for site in sites)


@dataclass(frozen=True, slots=True)
class _Camp:
    """Ranks that issued the same thing."""

    ranks: tuple[int, ...]
    record: CollectiveRecord


def _explain(group: str, seq: int, meeting: Meeting, history: Sequence[_Placed], ledgers: Sequence[Ledger]) -> Finding:
    camps = _camps(meeting)
    odd = _odd_ranks(camps, seq, history) or _off_pattern(group, camps, ledgers) or tuple(sorted(meeting))
    usual = next((camp.record for camp in camps if not set(camp.ranks) & set(odd)), None)
    differs = _differences(camps)
    calls = "; ".join(f"{name_ranks(c.ranks)} {_call(c.record, differs)}" for c in camps)
    return Finding(
        kind="mismatch",
        ranks=odd,
        op=(usual or camps[0].record).op,
        seq=seq,
        group=group,
        step=min((record.step for record in meeting.values()), key=_step_order),
        text=f"seq {seq} of {name_group(group, ledgers)} is not the same collective on every rank: {calls}",
        causes=tuple(_cause(rank, meeting[rank], usual, differs) for rank in odd),
    )


def _camps(meeting: Meeting) -> list[_Camp]:
    """By what was issued; by call sites only where nothing else tells the ranks apart."""
    alike = len({_signature(record) for record in meeting.values()}) == 1
    ranks: dict[tuple[object, ...], list[int]] = {}
    for rank, record in sorted(meeting.items()):
        ranks.setdefault((*_signature(record), record.site if alike else ""), []).append(rank)
    return sorted((_Camp(tuple(r), meeting[r[0]]) for r in ranks.values()), key=lambda camp: -len(camp.ranks))


def _odd_ranks(camps: list[_Camp], seq: int, history: Sequence[_Placed]) -> tuple[int, ...]:
    """Everybody outside the largest camp; between equal camps, those whose call was never made like this before.

    That tells nothing where a place has never been passed before: the others may have passed theirs too often.
    """
    if len(camps) > 1 and len(camps[0].ranks) == len(camps[1].ranks):
        passed = {record.site for _, record in history if record.seq < seq}
        precedents = {camp.ranks: _precedents(camp.record, seq, history) for camp in camps}
        camps = sorted(camps, key=lambda camp: precedents[camp.ranks], reverse=True)
        tied = precedents[camps[0].ranks] == precedents[camps[1].ranks]
        if tied or not all(camp.record.site in passed for camp in camps):
            return ()
    return tuple(sorted(rank for camp in camps[1:] for rank in camp.ranks))


def _precedents(record: CollectiveRecord, seq: int, history: Sequence[_Placed]) -> bool:
    """Whether such a call was made before: at the same place of a step, where a program has steps, or else anywhere."""
    place = next(place for place, other in history if other is record)
    before = [there for there, other in history if other.seq < seq and _is_alike(record, other)]
    return place in before if record.step else bool(before)


def _is_alike(one: CollectiveRecord, other: CollectiveRecord) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in ("op", "dtype", "shape", "site"))


def _off_pattern(group: str, camps: list[_Camp], ledgers: Sequence[Ledger]) -> tuple[int, ...]:
    """The ranks that issued another number of collectives in a finished step than is usual for steps of this run."""
    ranks = sorted(rank for camp in camps for rank in camp.ranks)
    counts = {rank: _counts_of_finished_steps(ledgers[rank], group) for rank in ranks}
    usual = Counter(count for by_step in counts.values() for count in by_step.values()).most_common(1)
    if not usual:
        return ()
    odd = tuple(rank for rank in ranks if set(counts[rank].values()) - {usual[0][0]})
    return odd if len(odd) < len(ranks) else ()


def _counts_of_finished_steps(ledger: Ledger, group: str) -> dict[str, int]:
    counts = dict.fromkeys(ledger.steps[: None if ledger.end and ledger.end.how == "returned" else -1], 0)
    for record in ledger.in_group(group):
        if record.step in counts:
            counts[record.step] += 1
    return counts


def _differences(camps: list[_Camp]) -> tuple[str, ...]:
    names = tuple(name for name in FIELDS if len({getattr(camp.record, name) for camp in camps}) > 1)
    return names or ("site",)


def _call(record: CollectiveRecord, differs: tuple[str, ...]) -> str:
    told = [record.op, f"{record.dtype} {record.shape}" if record.dtype else ""]
    named = {name: getattr(record, name) for name in differs if name in ("reduce_op", "root", "step")}
    told += [f"{name.replace('_', ' ')}={value}" for name, value in named.items() if value not in ("", None)]
    return " ".join([*filter(None, told), f"at {record.site}"])


def _cause(rank: int, record: CollectiveRecord, usual: CollectiveRecord | None, differs: tuple[str, ...]) -> Cause:
    """What the rank did, and what its peers did; where no camp is the usual one, only the former."""
    told = f"calls {_call(record, differs)}" if usual is None else _contrast(record, usual)
    return Cause(rank=rank, text=f"rank {rank} {told}", site=record.site)


def _contrast(record: CollectiveRecord, usual: CollectiveRecord) -> str:
    if record.step != usual.step:
        return f"is out of step: it is in step {record.step}, its peers are in step {usual.step}"
    if record.op != usual.op:
        return f"calls {record.op}, not {usual.op}"
    if (record.dtype, record.shape) != (usual.dtype, usual.shape):
        return f"contributes {record.dtype} {record.shape}, not {usual.dtype} {usual.shape}"
    if record.reduce_op != usual.reduce_op:
        return f"reduces with {record.reduce_op}, not {usual.reduce_op}"
    if record.root != usual.root:
        return f"takes rank {record.root} of the group as root, not {usual.root}"
    return f"calls {record.op} at {record.site}, not at {usual.site}"


def _step_order(step: str) -> tuple[int, str]:
    return (int(step), "") if step.isdecimal() else (0, step)


def find_strided(ledgers: Sequence[Ledger]) -> list[Finding]:
    """The first collective of each group whose contribution is not contiguous on some rank.

    Dense memory that lies alike on all ranks is no trouble where the answer goes back to it, element by element.
    gloo sends a strided view without a word, in whatever order its memory has; NCCL refuses memory with holes on that
    rank alone, and sends dense permuted memory as it lies.
    Source: PyTorch's ProcessGroupNCCL, check of non-overlapping and dense tensors (pull request 76142).
    """
    first: dict[str, dict[int, CollectiveRecord]] = {}
    layouts: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    for ledger in ledgers:
        for record in ledger.collectives:
            layouts.setdefault((record.group, record.seq), set()).add(record.stride)
    for ledger in ledgers:
        for record in ledger.collectives:
            alike = len(layouts[record.group, record.seq]) == 1
            in_place = record.op in ELEMENTWISE and alike and _is_dense(record)
            if not _is_contiguous(record) and not in_place:
                first.setdefault(record.group, {}).setdefault(ledger.rank, record)
    return [_explain_strides(group, by_rank, ledgers) for group, by_rank in first.items()]


def _explain_strides(group: str, by_rank: Meeting, ledgers: Sequence[Ledger]) -> Finding:
    seq = min(record.seq for record in by_rank.values())
    here = {rank: record for rank, record in by_rank.items() if record.seq == seq}
    record = next(iter(here.values()))
    return Finding(
        kind="mismatch",
        ranks=tuple(sorted(here)),
        op=record.op,
        seq=seq,
        group=group,
        step=record.step,
        text=f"{record.op} seq {seq} of {name_group(group, ledgers)}: {name_ranks(list(here))} sends a view that is "
        "not contiguous",
        causes=tuple(_stride_cause(rank, record) for rank, record in sorted(here.items())),
    )


def _stride_cause(rank: int, record: CollectiveRecord) -> Cause:
    view = f"rank {rank} contributes shape {record.shape} with strides {record.stride}"
    if _is_dense(record):
        return Cause(
            rank=rank, text=f"{view}: NCCL sends the memory as it lies, permuted and without a word", site=record.site
        )
    return Cause(
        rank=rank, text=f'{view}: NCCL raises "Tensors must be contiguous" on this rank alone', site=record.site
    )


def _is_contiguous(record: CollectiveRecord) -> bool:
    expected = 1
    for size, stride in zip(reversed(record.shape), reversed(record.stride), strict=True):
        if size == 0:
            return True
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _is_dense(record: CollectiveRecord) -> bool:
    expected = 1
    for stride, size in sorted(zip(record.stride, record.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
