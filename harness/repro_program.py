"""The parts of a reproduction that are the same for every case: harness.repro copies those that a case needs.

Plain torch and torch.distributed. The names in WRITTEN_OUT are each case's own.
"""

from __future__ import annotations

import ctypes  # noqa: F401 - for what is written out
import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from math import inf, isnan
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from tpbed.selector.merge import two_gather_merge

RANK, WORLD_SIZE, K, TOKENS, ORG_VOCAB_SIZE, HIDDEN_SIZE = 0, 1, 1, 1, 1, 1
DEVICE, DTYPE, PADDING = torch.device("cpu"), torch.float32, 0.0
TIMEOUT_S, TOLERANCE, SAME_TIES = 20.0, 0.0, True
OVERWRITES: list[tuple[int, int, float]] = []
SHARDS: list[dict[str, Any]] = []


def full_weight() -> Tensor:
    """The whole head, a row for each token."""
    return torch.zeros(TOKENS, HIDDEN_SIZE)


def befall(seq: int, issue: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What befalls this rank as it issues its collective number seq, from 1."""
    return issue(*arguments, **options)


WRITTEN_OUT = {  # for each case, instead of what stands above
    *("RANK", "WORLD_SIZE", "K", "TOKENS", "ORG_VOCAB_SIZE", "HIDDEN_SIZE", "DEVICE", "DTYPE", "PADDING", "TIMEOUT_S"),
    *("TOLERANCE", "SAME_TIES", "OVERWRITES", "SHARDS", "full_weight", "befall"),
}
COLLECTIVES = ("all_gather", "all_gather_into_tensor", "all_reduce", "barrier", "broadcast", "reduce_scatter_tensor")
CALLS: list[str] = []  # what this rank has issued
STEP = [0]
BEFALLEN: dict[int, int] = {}
WHERE = ["before any collective"]
SINCE = [time.monotonic()]
NOTES: list[str] = []


def say(text: str) -> None:
    """One line of this rank."""
    print(f"rank {RANK}: {text}\n", end="", flush=True)  # in one piece, since ranks share the screen


def note(name: str, value: object, because: str) -> None:
    """A choice that this rank takes from facts of its own."""
    NOTES.append(f"{name} = {value} ({because})")


def watch(name: str, store: Store) -> Callable[..., Any]:
    """The collective of torch.distributed, written down, and with what befalls this rank as it issues it."""
    collective = getattr(dist, name)

    def issue(*arguments: Any, **options: Any) -> Any:
        told = [f"{t.dtype} {tuple(t.shape)} strides {t.stride()}" for t in arguments[-1:] if isinstance(t, Tensor)]
        CALLS.append(" ".join([name, *told]))
        store.set(f"calls/{RANK}", json.dumps(CALLS))  # now, since gloo ends a process that is sent too much
        WHERE[0], SINCE[0] = f"in {name} {len(CALLS)}", time.monotonic()
        result = collective(*arguments, **options)
        WHERE[0] = f"after {name} {len(CALLS)}"
        return result

    return lambda *arguments, **options: befall(len(CALLS) + 1, issue, arguments, options)


def current() -> SimpleNamespace:
    """This rank, and how a kernel of its own can end."""
    return SimpleNamespace(rank=RANK, world_size=WORLD_SIZE, device=DEVICE, die=spin)


def spin(death: str, reason: str) -> None:
    """Be busy for ever, as a kernel that does not come back."""
    say(f"{death} {reason}")
    while True:
        time.sleep(1)


def contribute(arguments: tuple[Any, ...], change: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
    """The arguments of an all_gather with another contribution, and buffers of its dtype and shape."""
    payload = change(arguments[1])
    return [torch.empty(payload.shape, dtype=payload.dtype, device=DEVICE) for _ in arguments[0]], payload


def all_gather(tensor: Tensor, dim: int = -1) -> Tensor:
    """The tensors of all ranks, side by side, as engines gather them."""
    if WORLD_SIZE == 1:
        return tensor
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(WORLD_SIZE)]
    dist.all_gather(parts, tensor)
    return torch.cat(parts, dim=dim)


def start() -> Store:
    """Form the group, over NCCL where there is a GPU for each rank; whatever hangs in it ends after TIMEOUT_S."""
    if (given := int(os.environ["WORLD_SIZE"])) != WORLD_SIZE:
        sys.exit(f"{given} ranks are given, and this needs {WORLD_SIZE}: torchrun --nproc-per-node {WORLD_SIZE}")
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(TIMEOUT_S + 15, exit=True)  # of a rank that is busy for ever
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, when a rank has ended: the rest have something to say
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # so that NCCL too raises in the collective that hangs
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    store: Store = next(rendezvous("env://"))[0]
    dist.init_process_group(
        "nccl" if DEVICE.type == "cuda" else "gloo",
        store=PrefixStore("group", store),
        rank=RANK,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    for name in COLLECTIVES:
        setattr(dist, name, watch(name, store))
    return store


class UnquantizedEmbeddingMethod:
    """The projection of a dense head."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits of all rows that the head holds, padding too."""
        return F.linear(x, layer.weight, bias)


class WeightOnlyMethod:
    """The projection of a quantized head: its rows widened to float32, one rounding at the end."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits of all rows that the head holds, padding too."""
        return F.linear(x.float(), layer.weight).to(layer.logits_dtype)


class StaleMethod:
    """What another head's format left behind: it reads a scale that a dense head does not have."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Read the scale, as if it were there."""
        return F.linear(x.float(), layer.weight.float() * layer.weight_scale)


def build_head(method: Any, whole: Tensor) -> SimpleNamespace:
    """This rank's rows of the head, and the names that engines give to what it holds."""
    shard = SimpleNamespace(**SHARDS[RANK])
    weight = torch.full((shard.width, HIDDEN_SIZE), PADDING).to(whole.dtype)
    weight[: shard.num_org] = whole[shard.org_start :][: shard.num_org]
    added = slice(shard.num_org_padded, shard.num_org_padded + shard.num_added)
    weight[added] = whole[shard.added_start :][: shard.num_added]
    return SimpleNamespace(
        weight=weight.to(DEVICE),
        quant_method=method,
        bias=None,
        logits_dtype=DTYPE,
        hidden_size=HIDDEN_SIZE,
        shard=shard,
        shard_indices=shard,
        org_vocab_size=ORG_VOCAB_SIZE,
        num_embeddings=TOKENS,
        num_embeddings_per_partition=shard.width,
        tp_size=WORLD_SIZE,
        tp_rank=shard.rank,
    )


def plant(logits: Tensor) -> Tensor:
    """Overwrite those of this rank's logits that the case plants."""
    for row, token, value in OVERWRITES:
        column = token - SHARDS[RANK]["org_start"]
        if 0 <= column < SHARDS[RANK]["num_org"]:
            logits[row, column] = value
    return logits


class SelectionError(ValueError):
    """A request that cannot be served."""


def disturbed(method: Any, disturb: Callable[[Tensor], None]) -> Any:
    """A method of the same name, and what befalls its logits."""

    def apply(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        logits: Tensor = method.apply(layer, x, bias)
        disturb(logits)
        return logits

    return type(type(method).__name__, (), {"apply": apply})()


def befallen(number: int, times: int) -> bool:
    """Whether a fault strikes once more."""
    BEFALLEN[number] = BEFALLEN.get(number, 0) + 1
    return BEFALLEN[number] <= times


@dataclass(frozen=True)
class Candidates:
    """ids and values of the k best tokens of each row, best first."""

    ids: Tensor
    values: Tensor


def project_candidate_logits(hidden: Tensor, head: Any, *, path: str | None = None, mask: bool = True) -> Tensor:
    """Logits of the whole padded shard; mask: -inf in every column that is no org token."""
    if head.quant_method is None and head.weight.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise SelectionError(f"the head is {head.weight.dtype}, and has no quant_method that could project it.")
    method = head.quant_method or UnquantizedEmbeddingMethod()
    logits: Tensor = method.apply(head, hidden).to(head.logits_dtype).contiguous()
    if mask:
        logits[:, head.shard.num_org :] = -inf
    return logits


def check_shard(head: Any) -> Any:
    """The head's shard."""
    return head.shard


def compute_candidates(hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any = None) -> Candidates:
    """Project, local top-k, offset, two gathers, merge: the k best tokens of the whole vocabulary."""
    if not 1 <= k <= head.shard.org_vocab_size:
        raise SelectionError(f"k={k} tokens cannot be chosen from org_vocab_size={head.shard.org_vocab_size}.")
    logits = project_candidate_logits(hidden, head)
    if 0 in logits.shape:  # nothing to rank: the gathers are joined all the same
        values, columns = logits[:, :0], torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    else:
        values, columns = topk(logits, min(k, logits.shape[1]))
    best, ids = two_gather_merge(values, columns.long() + head.shard.org_start, k=k, group=group)
    return Candidates(ids=ids, values=best)


def answer_of(returned: Any) -> tuple[list[list[int]], list[list[float]] | None]:
    """What a selector returned, as lists: ids, and values if it gave any."""
    parts = [returned.ids, returned.values] if hasattr(returned, "ids") else returned
    tensors = list(parts) if isinstance(parts, tuple | list) else [parts]
    ids = next(t for t in tensors if not t.is_floating_point())
    values = next((t for t in tensors if t.is_floating_point()), None)
    return ids.tolist(), None if values is None else values.float().tolist()


def finish(store: Store, error: BaseException | None, answers: list[Any], hidden: list[Tensor]) -> None:
    """Say how this rank ended and what is wrong with its answers; the first to end compares all. Ends the process."""
    seen = [] if error is None else [_told_end(error)]
    say(seen[0] if seen else f"returned {WHERE[0]}")
    seen += [text for step, answer in enumerate(answers) for text in _wrong(step, hidden[step], *answer)][:1]
    for text in [*seen[error is not None :], *dict.fromkeys(NOTES)]:
        say(text)
    store.set(f"answers/{RANK}", json.dumps(answers))
    if store.add("ended", 1) == 1:
        seen += _differences(store)
    store.set(f"done/{RANK}", "")
    _wait(store, [f"done/{rank}" for rank in range(WORLD_SIZE)])  # torchrun ends all when one has ended
    os._exit(1 if seen else 0)


def _told_end(error: BaseException) -> str:
    told = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if WHERE[0].startswith("in "):
        return f"waited {WHERE[0]} for {time.monotonic() - SINCE[0]:.0f} s, then {told}"
    return f"raised {WHERE[0]}: {told}"


def _wait(store: Store, keys: list[str]) -> bool:
    """Whether the keys come while others may still be waiting for this rank's last collective."""
    left_s = max(SINCE[0] + TIMEOUT_S + 5 - time.monotonic(), 1)
    try:
        store.wait(keys, timedelta(seconds=left_s))
    except (RuntimeError, ValueError):
        return False
    return True


def _differences(store: Store) -> list[str]:
    """Ranks that do not say how they ended, and what ranks did otherwise than the first: a collective, an answer."""
    ended = [rank for rank in range(WORLD_SIZE) if _wait(store, [f"answers/{rank}"])]
    calls = [
        json.loads(store.get(key)) if store.check([key]) else [] for key in map("calls/{}".format, range(WORLD_SIZE))
    ]
    found = [
        f"rank {rank} has not reported; its last collective is {', '.join(calls[rank][-1:]) or 'none'}"
        for rank in range(WORLD_SIZE)
        if rank not in ended
    ]
    for rank in range(1, WORLD_SIZE):
        unlike = [n for n, (first, own) in enumerate(zip(calls[0], calls[rank], strict=False), 1) if first != own]
        found += [
            f"rank {rank} issued {calls[rank][n - 1]} as number {n}, rank 0 {calls[0][n - 1]}" for n in unlike[:1]
        ]
    first, *others = [(rank, json.loads(store.get(f"answers/{rank}"))) for rank in ended]
    for rank, answers in others:
        steps = [step for step, (a, b) in enumerate(zip(first[1], answers, strict=False)) if repr(a) != repr(b)]
        found += [f"rank {rank} holds other candidates than rank {first[0]} in step {step}" for step in steps[:1]]
    for text in found:
        print(f"{text}\n", end="", flush=True)
    return found


def _wrong(step: int, hidden: Tensor, ids: list[list[int]], values: list[list[float]] | None) -> list[str]:
    """Where an answer is not that of the whole head in float64."""
    logits = hidden.cpu().double() @ full_weight()[:ORG_VOCAB_SIZE].double().T
    for row, token, value in OVERWRITES:
        logits[row, token] = value
    best, order = logits.sort(dim=-1, descending=True, stable=True)
    found = []
    for row, listed in enumerate(ids[: len(logits)]):
        for slot, token in enumerate(listed):
            told = f"step {step}, row {row}, slot {slot}: id {token}"
            right = int(order[row, slot]) if slot < ORG_VOCAB_SIZE and best[row, slot] > -inf else -1
            scores = float(logits[row, token]) if 0 <= token < ORG_VOCAB_SIZE else -inf
            should = float(best[row, slot]) if right >= 0 else -inf
            value = scores if values is None else values[row][slot]
            known = 0 <= token < ORG_VOCAB_SIZE or token == right == -1
            if not known or (token in listed[:slot] and token >= 0):
                found.append(f"{told}, which is no token or was listed before; the whole head gives id {right}")
            elif token != right and (SAME_TIES or not _close(scores, should)):
                found.append(f"{told} with logit {scores}; the whole head gives id {right} with {should}")
            elif not _close(value, scores):
                found.append(f"{told} with value {value}; its logit is {scores}")
    return found


def _close(one: float, other: float) -> bool:
    return one == other or isnan(one) or isnan(other) or abs(one - other) <= TOLERANCE * (1 + abs(other))
