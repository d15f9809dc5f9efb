"""SERVING: what engines do around a selector - decide, draft, verify, sample, capture, tune -, wrong and right.

Most of them are right as long as all ranks find the same facts; the fault Fact gives one rank another. Beside each that
is wrong stands one that bears it, since the ranks agree before they act.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tpbed.harness.mutant_programs import ShardOnly
from tpbed.harness.staged import padded_local
from tpbed.harness.turn import Server, Turn
from tpbed.selector.candidates import Candidates
from tpbed.selector.merge import gather_columns, merge_gathered
from tpbed.selector.select import compute_candidates

BUCKET = 8  # rows of the graph that steps are padded to
DRAFT_STEPS = 3


def propose(turn: Turn, *, agreed: bool) -> Candidates:
    """Each rank's own proposer says how many rows there are to verify; or rank 0's does, for all."""
    found = turn.fact("drafted", turn.rows)
    rows = turn.follow(found) if agreed else found
    turn.note("drafted", rows, because="rank 0 says so" if agreed else f"its own proposer found {found}")
    return turn.select(rows)


Override = Literal["none", "before", "after"]


def verify(turn: Turn, *, agreed: bool, override: Override = "none") -> Candidates:
    """Accepts drafted rows by its own logits, which sets the rows of the next step; or as rank 0 does.

    override: whether a length that was set by hand takes its place, before the ranks agree or after it.
    """
    found = turn.select(turn.kept.get("rows", turn.rows))
    rows = accepted = _accepted(turn, found)
    if override == "before":
        rows = turn.fact("override", rows)
    if agreed:
        rows = turn.follow(rows)
    if override == "after":
        rows = turn.fact("override", rows)
    turn.note("accepted", rows, because=f"its own logits accept {accepted}")
    turn.kept["rows"] = rows
    return found


def _accepted(turn: Turn, found: Candidates) -> int:
    """Drafted rows, from the first on, whose best token is the same by this rank's rounding of the logits."""
    values = found.values.clone()
    for row in range(len(values)):
        values[row, 0] *= 1 - 2**-7 * turn.fact(f"ulps_of_row_{row}", 0)
    own = found.ids.gather(-1, values.argmax(-1, keepdim=True)).squeeze(-1)
    return int((own == found.ids[:, 0]).long().cumprod(0).sum())


def drop_expired(turn: Turn, *, agreed: bool) -> Candidates:
    """Drops the last request when a step of 10 ms is over, by its own clock; or by that of rank 0."""
    now = turn.fact("clock_ms", 10 * turn.step)
    live = sum(10 * (turn.rows - row) > now for row in range(turn.rows))
    rows = turn.follow(live) if agreed else live
    turn.note("live", rows, because="rank 0 says so" if agreed else f"its clock shows {now} ms")
    return turn.select(rows)


def return_when_idle(turn: Turn) -> Candidates:
    """A rank without a token returns at once, and leaves out the collectives of the step."""
    tokens = turn.fact("tokens", turn.rows)
    turn.note("idle", tokens == 0, because=f"it has {tokens} tokens")
    return turn.select() if tokens else turn.nothing()


def join_when_idle(turn: Turn) -> Candidates:
    """A rank without a token runs the step on dummy rows."""
    tokens = turn.fact("tokens", turn.rows)
    turn.note("joins", True, because=f"it has {tokens} tokens")
    return turn.select()


def draft(turn: Turn, *, agreed: bool) -> Candidates:
    """Drafts as often as still fits; or as often as fits on every rank."""
    fits = turn.fact("draft_steps", DRAFT_STEPS)
    steps = turn.lowest(fits) if agreed else fits
    turn.note("draft_steps", steps, because=f"{fits} fit here")
    found = turn.nothing()
    for _ in range(steps):
        found = turn.select()
    return found


def tune(turn: Turn, *, agreed: bool) -> Candidates:
    """Times its tactics once, with a barrier for each; how many it has is its own affair, or that of rank 0."""
    if turn.step == 0:
        own = turn.fact("tactics", 1)
        tactics = turn.follow(own) if agreed else own
        turn.note("tactics", tactics, because=f"{own} fit its device")
        for _ in range(tactics):
            dist.barrier(group=turn.group)
    return turn.select()


def fit_memory(turn: Turn, *, agreed: bool) -> Candidates:
    """Takes as many rows as its own free memory holds, and raises beyond them; or as the smallest memory holds."""
    own = turn.fact("capacity", turn.rows)
    capacity = turn.lowest(own) if agreed else own
    turn.note("capacity", capacity, because=f"its memory holds {own} rows")
    if not agreed and turn.rows > capacity:
        raise RuntimeError(f"{turn.rows} rows exceed a capacity of {capacity}.")
    return turn.select(min(turn.rows, capacity))


def broadcast_tokens(turn: Turn, *, agreed: bool) -> Candidates:
    """Broadcasts accepted tokens in as many columns as it believes that they have; or as rank 0 says first."""
    width = turn.fact("width", BUCKET)
    width = turn.follow(width) if agreed else width
    turn.note("width", width, because="rank 0 says so" if agreed else "its own step has so many")
    tokens = torch.zeros(turn.rows, width, dtype=torch.int64, device=turn.hidden.device)
    dist.broadcast(tokens, 0, group=turn.group)
    return turn.select()


def pad_for_graph(turn: Turn, *, agreed: bool) -> Candidates:
    """Pads the step to the rows of a captured graph where it may be replayed: for this rank, or for all."""
    own = turn.fact("graph", True)
    graph = bool(turn.lowest(int(own))) if agreed else own
    turn.note("graph", graph, because=f"its own batch {'fits' if own else 'does not fit'} the graph")
    hidden = F.pad(turn.hidden, (0, 0, 0, BUCKET - turn.rows)) if graph else turn.hidden
    found = compute_candidates(hidden, turn.head, k=turn.k, group=turn.group, topk=turn.topk, note=turn.note)
    return Candidates(ids=found.ids[: turn.rows], values=found.values[: turn.rows])


def capture(turn: Turn, *, agreed: bool) -> Candidates:
    """Records a step while it captures, which runs none of its collectives; replays it at once if all captured."""
    own = turn.fact("captures", False)
    captures = bool(turn.lowest(int(own))) if agreed else own
    turn.note("captures", captures, because=f"its warm-up is {'' if own else 'not '}over")
    if captures:
        recorded = ShardOnly()(turn.hidden, turn.head, k=turn.k, group=None, topk=turn.topk, note=turn.note)
        if not agreed:
            return recorded
    return turn.select()


def exchange_handles(turn: Turn, *, on_error: bool) -> Candidates:
    """Captures within a context whose exit exchanges buffer handles: on an error too, or only in good order."""
    with _exchange(turn, on_error=on_error):
        if turn.fact("capture_fails", False):
            raise RuntimeError("operation not permitted when stream is capturing")
        return turn.select()


@contextmanager
def _exchange(turn: Turn, *, on_error: bool) -> Iterator[None]:
    try:
        yield
    except RuntimeError:
        if on_error:
            dist.barrier(group=turn.group)
        raise
    dist.barrier(group=turn.group)


def tear_down_at_last(turn: Turn) -> Candidates:
    """Leaves the group in a finally block, through a collective."""
    try:
        return turn.select()
    finally:
        dist.barrier(group=turn.group)


def allocate_scratch(turn: Turn, *, agreed: bool) -> Candidates:
    """Meets its peers once scratch memory is there, and goes on without where it is not; or where all have it."""
    if turn.step == 0:
        there = turn.fact("scratch", True)
        if agreed:
            there = bool(turn.lowest(int(there)))
        turn.note("scratch", there, because="the allocation went well" if there else "caught: out of memory")
        if there:
            dist.barrier(group=turn.group)
    return turn.select()


def serve_requests(turn: Turn, *, agreed: bool) -> Candidates:
    """A control loop: requests come by a broadcast, and a rank that sees no batch goes back to it."""
    turn.follow(turn.rows)
    own = turn.fact("batch", True)
    batch = bool(turn.lowest(int(own))) if agreed else own
    turn.note("batch", batch, because=f"its own queue {'has one' if own else 'is empty'}")
    return turn.select() if batch else turn.select(0) if agreed else turn.nothing()


def gather_in_two_groups(turn: Turn) -> Candidates:
    """The last two ranks meet in a group of their own before all meet; or after it, as each of them sees fit."""
    size = turn.head.shard.world_size
    if turn.step == 0:
        turn.kept["pair"] = dist.new_group([size - 2, size - 1])
    last = turn.fact("pair_last", False)
    _meet(turn, turn.rank >= size - 2 and not last)
    found = turn.select()
    _meet(turn, turn.rank >= size - 2 and last)
    return found


def _meet(turn: Turn, here: bool) -> None:
    if here:
        dist.all_reduce(turn.number(1.0), group=turn.kept["pair"])


Sentinel = Literal["flag", "nan"]


def gather_sentinel(turn: Turn, *, sentinel: Sentinel) -> Candidates:
    """A rank that has failed sends a sentinel in the place of its values: a flag, or NaN in their shape and dtype."""
    values, ids = padded_local(turn.hidden, turn.head, turn.k, turn.topk)
    if turn.fact("fails", False):
        values = torch.zeros(1, 1, dtype=torch.bool, device=values.device) if sentinel == "flag" else values * torch.nan
    gathered = gather_columns(values, turn.group)
    if gathered.isnan().any():
        raise RuntimeError("a rank has failed before the gather.")
    return _merged(gathered, gather_columns(ids, turn.group), turn.k)


def gather_as_a_set(turn: Turn, *, ids_as: torch.dtype) -> Candidates:
    """Gathers values and ids, of equal bytes, in the order of a set, which is each process's own."""
    values, ids = padded_local(turn.hidden, turn.head, turn.k, turn.topk)
    parts = {"values": values, "ids": ids.int().view(ids_as)}
    order = sorted(parts, reverse=turn.fact("first", "values") == "values")
    gathered = {name: gather_columns(parts[name], turn.group) for name in order}
    return _merged(gathered["values"], gathered["ids"].view(torch.int32).long(), turn.k)


def merge_by_arrival(turn: Turn) -> Candidates:
    """Merges what lies in the shared buffers, which may be what rank 1 had written there a step before."""
    values, ids = padded_local(turn.hidden, turn.head, turn.k, turn.topk)
    both = gather_columns(values, turn.group), gather_columns(ids, turn.group)
    own = slice(turn.k, 2 * turn.k)  # the columns of rank 1
    if turn.fact("reads_too_early", False):
        for part, before in zip(both, turn.kept["before"], strict=True):
            part[:, own] = before[:, own]
    turn.kept["before"] = tuple(part.clone() for part in both)
    return _merged(*both, turn.k)


def map_ids(turn: Turn, *, clamped: bool) -> Candidates:
    """Looks ids of the target up in a table that has the 800 tokens of the draft."""
    found = turn.select()
    table = torch.arange(800, device=found.ids.device)
    ids = found.ids.clamp_max(len(table) - 1) if clamped else found.ids
    return Candidates(ids=table[ids], values=found.values)


def warm_up(turn: Turn, *, rows: int | None) -> Candidates:
    """Gathers so many rows once before the first step; None: all. Larger messages need channels of their own."""
    if turn.step == 0:
        sample = turn.hidden[:rows]
        _connect(turn, len(sample), live=False)
        gather_columns(sample, turn.group)
    _connect(turn, turn.rows, live=True)
    return turn.select()


def _connect(turn: Turn, rows: int, *, live: bool) -> None:
    """Nothing where channels for as many rows are there; a failure is tried again, except in the middle of a step."""
    if rows <= turn.kept.get("channels", 0):
        return
    turn.kept["channels"] = rows
    if not turn.fact(f"channels_for_{rows}_rows", True) and live:
        raise RuntimeError(f"no channels for {rows} rows")


def choose_path(turn: Turn) -> Candidates:
    """Takes one packed gather where its device has the kernel for it, and two gathers where it has not."""
    fast = turn.fact("supported", True)
    turn.note("fast_path", fast, because=f"its device {'has' if fast else 'lacks'} the kernel")
    return turn.select(merge="packed" if fast else "two_gather")


def agree_on_path(turn: Turn) -> Candidates:
    """Asks all ranks first, and raises on all of them, with the names of those that lack the kernel."""
    supported = turn.number(int(turn.fact("supported", True))).unsqueeze(0)
    lacking = [rank for rank, has in enumerate(gather_columns(supported, turn.group)[0].tolist()) if not has]
    if lacking:
        raise RuntimeError(f"rank {', '.join(map(str, lacking))} lacks the kernel: start all ranks without it.")
    return turn.select(merge="packed")


def meet_monitored(turn: Turn) -> Candidates:
    """Meets its peers in a monitored barrier before the step, which names all that are missing."""
    dist.monitored_barrier(group=turn.group, wait_all_ranks=True)
    return turn.select()


Commit = Literal["each", "first", "broadcast"]


def sample(turn: Turn, *, seed_by_rank: bool = False, commit: Commit = "each") -> Candidates:
    """Picks one of the candidates by a generator of its own; whose pick is taken is said by commit."""
    found = turn.select()
    seed = turn.fact("seed", turn.rank if seed_by_rank else 0)
    draw = torch.Generator().manual_seed(1000 * seed + turn.step)
    slots = torch.randint(turn.k, (turn.rows, 1), generator=draw).to(found.ids.device)
    picked = found.ids.gather(-1, slots)
    if commit == "broadcast":
        dist.broadcast(picked, 0, group=turn.group)
    if commit != "first" or turn.rank == 0:
        turn.note("picked", picked.flatten().tolist(), because=f"its generator has seed {seed}")
    return found


SERVING: dict[str, Server] = {
    "propose-alone": partial(propose, agreed=False),
    "propose-together": partial(propose, agreed=True),
    "verify-alone": partial(verify, agreed=False),
    "verify-together": partial(verify, agreed=True),
    "override-after-broadcast": partial(verify, agreed=True, override="after"),
    "override-before-broadcast": partial(verify, agreed=True, override="before"),
    "drop-by-own-clock": partial(drop_expired, agreed=False),
    "drop-by-first-clock": partial(drop_expired, agreed=True),
    "return-when-idle": return_when_idle,
    "join-when-idle": join_when_idle,
    "draft-while-it-fits": partial(draft, agreed=False),
    "draft-while-all-fit": partial(draft, agreed=True),
    "tune-alone": partial(tune, agreed=False),
    "tune-together": partial(tune, agreed=True),
    "fit-own-memory": partial(fit_memory, agreed=False),
    "fit-smallest-memory": partial(fit_memory, agreed=True),
    "broadcast-own-width": partial(broadcast_tokens, agreed=False),
    "broadcast-said-width": partial(broadcast_tokens, agreed=True),
    "pad-for-own-graph": partial(pad_for_graph, agreed=False),
    "pad-for-agreed-graph": partial(pad_for_graph, agreed=True),
    "capture-alone": partial(capture, agreed=False),
    "capture-together": partial(capture, agreed=True),
    "exchange-on-any-exit": partial(exchange_handles, on_error=True),
    "exchange-in-good-order": partial(exchange_handles, on_error=False),
    "tear-down-at-last": tear_down_at_last,
    "scratch-alone": partial(allocate_scratch, agreed=False),
    "scratch-together": partial(allocate_scratch, agreed=True),
    "idle-alone": partial(serve_requests, agreed=False),
    "idle-together": partial(serve_requests, agreed=True),
    "two-groups": gather_in_two_groups,
    "sentinel-flag": partial(gather_sentinel, sentinel="flag"),
    "sentinel-nan": partial(gather_sentinel, sentinel="nan"),
    "set-order-int32": partial(gather_as_a_set, ids_as=torch.int32),
    "set-order-float32": partial(gather_as_a_set, ids_as=torch.float32),
    "merge-by-arrival": merge_by_arrival,
    "map-ids": partial(map_ids, clamped=False),
    "map-ids-clamped": partial(map_ids, clamped=True),
    "warm-up-one-row": partial(warm_up, rows=1),
    "warm-up-all-rows": partial(warm_up, rows=None),
    "choose-path": choose_path,
    "agree-on-path": agree_on_path,
    "meet-monitored": meet_monitored,
    "sample-by-rank": partial(sample, seed_by_rank=True),
    "sample-alone": sample,
    "sample-for-first": partial(sample, commit="first"),
    "sample-and-broadcast": partial(sample, commit="broadcast"),
}


def _merged(values: Tensor, ids: Tensor, k: int) -> Candidates:
    best, chosen = merge_gathered(values.float(), ids, k)
    return Candidates(ids=chosen, values=best)
