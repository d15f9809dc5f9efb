"""Ledgers of ranks from their Flight Recorder dumps, so that `diagnose` explains these, too.

A dump knows what its rank issued, and of each entry the sizes, the call site and whether it had completed. It knows no
exceptions, no ends, no strides, no roots, no reduce ops, no steps and no decisions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from math import prod
from typing import cast

from tpbed.harness.flight_recorder import DEFAULT_GROUP, UNDESCRIBED, FlightDump, FlightEntry
from tpbed.tp.blackbox import frame_text
from tpbed.tp.ledger import WORLD, CollectiveRecord, Ledger, MessageRecord, State
from tpbed.tp.world import Liveness

GLOO = "gloo"
_COALESCED = "coalesced"  # the entry that ends a batch, and alone of it has a state
_OPS = {
    "_all_gather_base": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_v": "all_gather",
    "all_reduce_sparse": "all_reduce",
    "sparse_all_reduce": "all_reduce",
    "all_reduce_barrier": "barrier",
    "allreduce_coalesced": "all_reduce_coalesced",
    "all_gather_into_tensor_coalesced": "all_gather_coalesced",
    "ALLGATHER_coalesced": "all_gather_coalesced",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_v": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_coalesced",
    "REDUCE_SCATTER_coalesced": "reduce_scatter_coalesced",
    "all_to_all_single": "all_to_all",
    "all_to_all_v_single": "all_to_all",
}  # the recorder's name of an op to that of ledgers, where they differ
_FROM_ROOT = ("scatter",)  # ops to which the root alone brings something, so that what comes out is compared
_MEETINGS = frozenset({"all_reduce", "all_gather", "barrier", "reduce_scatter", "all_to_all"})  # nobody leaves early
_DTYPES = {
    "Float": ("float32", 4),
    "Double": ("float64", 8),
    "Half": ("float16", 2),
    "BFloat16": ("bfloat16", 2),
    "Long": ("int64", 8),
    "Int": ("int32", 4),
    "Short": ("int16", 2),
    "Char": ("int8", 1),
    "Byte": ("uint8", 1),
    "Bool": ("bool", 1),
    "ComplexFloat": ("complex64", 8),
    "ComplexDouble": ("complex128", 16),
    "UInt16": ("uint16", 2),
    "UInt32": ("uint32", 4),
    "UInt64": ("uint64", 8),
}  # C++'s name to Python's, and bytes; others (Float8_e4m3fn) are a byte, and named alike
_OF_TORCH = re.compile(r"(^|/)(torch|tpbed/tp)/")
_MEMBER = re.compile(r"(?:->|<-)(\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightRun:
    """Ledgers and liveness, by rank, as far as dumps tell; a rank without a dump has an empty ledger."""

    ledgers: tuple[Ledger, ...]
    liveness: tuple[Liveness, ...]
    proof_ms: None = None  # a dump does not say when it was written


def read_flight(dumps: Sequence[FlightDump], world_size: int) -> FlightRun:
    """Fold dumps into ledgers.

    dumps: of one run, at most one for each rank. Where a ring has lost its beginning, what peers did before it is left
    out, so that nobody seems to lack what was overwritten.
    """
    labels = _labels(dumps)
    by_rank = {dump.rank: _ledger(dump, dumps, labels, world_size) for dump in map(_without_cut_batch, dumps)}
    kept = _what_all_kept(by_rank)
    sound = {rank: _without_failed(ledger, kept) for rank, ledger in kept.items()} if is_gloo(dumps) else kept
    absent = [rank for rank in range(world_size) if rank not in sound]
    empty = {rank: Ledger(rank=rank, world_size=world_size, groups={}) for rank in absent}
    return FlightRun(
        ledgers=tuple((sound | empty)[rank] for rank in range(world_size)),
        liveness=tuple(
            Liveness(state="unknown", detail="left no dump" if rank in empty else "in no recorded call")
            for rank in range(world_size)
        ),
    )


def is_gloo(dumps: Sequence[FlightDump]) -> bool:
    """Whether gloo recorded them: it lists no members of groups and no messages, and failed looks like done."""
    return any(entry.backend == GLOO for dump in dumps for entry in dump.entries)


def _labels(dumps: Sequence[FlightDump]) -> dict[str, str]:
    """What groups are called in the ledgers, by name: by their description, where only one has it."""
    named = {entry.process_group for dump in dumps for entry in dump.entries}
    named |= {(group.name, group.desc) for dump in dumps for group in dump.pg_config.values() if group.name}
    descriptions = [desc for _, desc in named]
    return {name: _label(name, desc, unique=descriptions.count(desc) == 1) for name, desc in named}


def _label(name: str, desc: str, *, unique: bool) -> str:
    if desc == DEFAULT_GROUP or (name == "0" and desc in ("", UNDESCRIBED)):
        return WORLD
    if desc in ("", UNDESCRIBED):
        return name
    return desc if unique else f"{desc}/{name}"


def _ledger(dump: FlightDump, dumps: Sequence[FlightDump], labels: dict[str, str], world_size: int) -> Ledger:
    calls = [entry for entry in dump.entries if not _is_message(entry)]
    messages = [entry for entry in dump.entries if _is_message(entry)]
    return Ledger(
        rank=dump.rank,
        world_size=world_size,
        groups=_groups(dump, dumps, labels, world_size),
        collectives=tuple(_collectives(calls, labels)),
        messages=tuple(_messages(messages, labels)),
        truncated=dump.has_lost_entries,
    )


def _groups(
    dump: FlightDump, dumps: Sequence[FlightDump], labels: dict[str, str], world_size: int
) -> dict[str, tuple[int, ...]]:
    """As the dump lists them; of a group without a list, who has used it."""
    used = {entry.process_group[0] for entry in dump.entries}
    listed = {labels[group.name]: group.ranks for group in dump.pg_config.values() if group.name and group.ranks}
    guessed = {labels[name]: _users(name, dumps) for name in used}
    return (
        {WORLD: tuple(range(world_size))} | {name: ranks for name, ranks in guessed.items() if name != WORLD} | listed
    )


def _users(name: str, dumps: Sequence[FlightDump]) -> tuple[int, ...]:
    return tuple(dump.rank for dump in dumps if any(entry.process_group[0] == name for entry in dump.entries))


def _is_message(entry: FlightEntry) -> bool:
    return entry.op in ("send", "recv") or (entry.op == _COALESCED and entry.is_p2p)


def _collectives(entries: Iterable[FlightEntry], labels: dict[str, str]) -> Iterable[CollectiveRecord]:
    """One record for each number in a group: calls that were coalesced share theirs, and one state."""
    batches: dict[tuple[str, int], list[FlightEntry]] = {}
    for entry in entries:
        batches.setdefault((labels[entry.process_group[0]], entry.collective_seq_id), []).append(entry)
    for (group, seq), batch in batches.items():
        yield _collective(group, seq, batch)


def _collective(group: str, seq: int, batch: list[FlightEntry]) -> CollectiveRecord:
    parts = [entry for entry in batch if entry.op != _COALESCED] or batch
    first, last = parts[0], batch[-1]
    op = _op(parts)
    dtype, shape, payload_bytes = ("", (), 0) if op == "barrier" else _brought(op, parts)
    state = _state(last)
    return CollectiveRecord(
        group=group,
        seq=seq,
        op=op,
        dtype=dtype,
        shape=shape,
        stride=_contiguous(shape),
        payload_bytes=payload_bytes,
        site=_site(first),
        state=state,
        started_ns=first.time_created_ns,
        ended_ns=last.time_discovered_completed_ns if state == "completed" else None,
    )


def _op(parts: list[FlightEntry]) -> str:
    ops = {_OPS.get(entry.op, entry.op) for entry in parts}
    if len(parts) == 1:
        return ops.pop()
    return f"{ops.pop()}_{_COALESCED}" if len(ops) == 1 else _COALESCED


def _brought(op: str, parts: list[FlightEntry]) -> tuple[str, tuple[int, ...], int]:
    """dtype, shape and bytes of what the rank brings; of several tensors the elements of all."""
    sizes = [size for entry in parts for size in (entry.output_sizes if op in _FROM_ROOT else entry.input_sizes)]
    dtypes = [dtype for entry in parts for dtype in (entry.output_dtypes if op in _FROM_ROOT else entry.input_dtypes)]
    if not dtypes:
        return "", (), 0
    dtype, item_bytes = _DTYPES.get(dtypes[0], (dtypes[0].lower(), 1))
    elements = sum(map(prod, sizes))
    return dtype, sizes[0] if len(sizes) == 1 else (elements,), elements * item_bytes


def _messages(entries: Iterable[FlightEntry], labels: dict[str, str]) -> Iterable[MessageRecord]:
    """Numbered as they were issued; those of a batch have the state of the entry that ends it."""
    seqs: dict[str, int] = {}
    for (name, _), batch in groupby(entries, key=lambda entry: (entry.process_group[0], entry.p2p_seq_id)):
        *_, last = parts = list(batch)
        for entry in parts:
            if entry.op != _COALESCED:
                group = labels[name]
                seqs[group] = seqs.get(group, 0) + 1
                yield _message(group, seqs[group], entry, last if last.op == _COALESCED else entry)


def _message(group: str, seq: int, entry: FlightEntry, end: FlightEntry) -> MessageRecord:
    dtype, shape, payload_bytes = _brought(entry.op, [entry])
    peer = _MEMBER.search(entry.profiling_name)
    state = _state(end)
    return MessageRecord(
        group=group,
        seq=seq,
        op="send" if entry.op == "send" else "recv",
        peer=int(peer[1]) if peer else None,
        tag=0,
        dtype=dtype,
        shape=shape,
        stride=_contiguous(shape),
        payload_bytes=payload_bytes,
        site=_site(entry),
        state=state,
        waited=True,
        started_ns=entry.time_created_ns,
        ended_ns=end.time_discovered_completed_ns if state == "completed" else None,
        anysource=peer is None,
    )


def _state(entry: FlightEntry) -> State:
    """gloo retires what is over, and records no other state."""
    return "completed" if entry.backend == GLOO and entry.retired else cast("State", entry.state)


def _site(entry: FlightEntry) -> str:
    """As in a ledger: the innermost frame outside torch and tpbed.tp."""
    frames = (frame for frame in entry.frames if not _OF_TORCH.search(frame.filename))
    return next((frame_text(frame.filename, frame.line, frame.name) for frame in frames), "")


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(reversed(shape[1:]), lambda stride, size: stride * size, initial=1))[::-1][: len(shape)]


def _without_cut_batch(dump: FlightDump) -> FlightDump:
    """Without the oldest entries, where the ring has lost some of a batch that they belong to."""
    if not dump.has_lost_entries:
        return dump
    oldest = _batch(dump.entries[0])
    members = [entry for entry in dump.entries if _batch(entry) == oldest]
    if members[-1].op != _COALESCED:
        return dump
    return replace(dump, entries=tuple(entry for entry in dump.entries if _batch(entry) != oldest))


def _batch(entry: FlightEntry) -> tuple[str, bool, int, int]:
    return entry.process_group[0], _is_message(entry), entry.collective_seq_id, entry.p2p_seq_id


def _what_all_kept(ledgers: dict[int, Ledger]) -> dict[int, Ledger]:
    """Without what a ring has lost; messages have no common numbers, so that only open ones can be compared then."""
    lossy = [ledger for ledger in ledgers.values() if ledger.truncated]
    if not lossy:
        return ledgers
    floors: dict[str, int] = {}
    for ledger in lossy:
        for group, first in _first_seqs(ledger).items():
            floors[group] = max(floors.get(group, 0), first)
    return {rank: _above(ledger, floors) for rank, ledger in ledgers.items()}


def _first_seqs(ledger: Ledger) -> dict[str, int]:
    return {record.group: record.seq for record in reversed(ledger.collectives)}


def _above(ledger: Ledger, floors: dict[str, int]) -> Ledger:
    collectives = tuple(record for record in ledger.collectives if record.seq >= floors.get(record.group, 0))
    messages = tuple(record for record in ledger.messages if record.state != "completed")
    return replace(ledger, collectives=collectives, messages=messages)


def _without_failed(ledger: Ledger, ledgers: dict[int, Ledger]) -> Ledger:
    """With the rank's last call still open, if a member that is one call behind never made it: gloo says done of it."""
    last = ledger.collectives[-1] if ledger.collectives else None
    if last is None or last.state != "completed" or last.op not in _MEETINGS:
        return ledger
    peers = [ledgers[rank] for rank in ledger.groups[last.group] if rank in ledgers]
    if not any(_is_behind(peer, last) for peer in peers):
        return ledger
    return replace(ledger, collectives=(*ledger.collectives[:-1], replace(last, state="started", ended_ns=None)))


def _is_behind(peer: Ledger, last: CollectiveRecord) -> bool:
    return max((record.seq for record in peer.in_group(last.group)), default=0) == last.seq - 1
