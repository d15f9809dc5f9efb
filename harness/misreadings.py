"""MISREADINGS: selectors that misread a head, a mask, an adapter or a gathered block, each as seen in the field."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tpbed.harness.staged import padded_local
from tpbed.harness.turn import Server, Turn
from tpbed.selector.admission import AdmissionError
from tpbed.selector.candidates import Candidates
from tpbed.selector.merge import gather_columns, merge_gathered, pad_candidates, two_gather_merge
from tpbed.selector.project import project_candidate_logits

ADMITTED_CLASS = "UnquantizedEmbeddingMethod"


def multiply_as_dense(turn: Turn) -> Candidates:
    """Multiplies the stored weight as it is, packed or not."""
    logits = F.linear(turn.hidden.float(), turn.head.weight.float())
    return _choose(turn, logits)


def buffer_of_weight_dtype(turn: Turn) -> Candidates:
    """Writes logits into a buffer of the weight's dtype, which says nothing about them where it is packed."""
    logits = project_candidate_logits(turn.hidden, turn.head)
    return _choose(turn, logits.to(turn.head.weight.dtype))


def guard_by_class(turn: Turn) -> Candidates:
    """Admits heads whose method is of one class, and no other that leaves the weight alone too."""
    found = type(turn.head.quant_method).__name__
    if found != ADMITTED_CLASS:
        raise AdmissionError(f"{found} is not {ADMITTED_CLASS}: the head is taken for quantized.")
    return turn.select()


def offset_by_embedding(turn: Turn) -> Candidates:
    """Numbers the columns of the head by the shares of the embedding, which is padded to 64 and not as the head is."""
    values, ids = padded_local(turn.hidden, turn.head, turn.k, turn.topk)
    shard = turn.head.shard
    share = -(-shard.org_vocab_size // 64) * 64 // shard.world_size
    return _merge(turn, values, ids - shard.org_start + shard.rank * share)


def allow_by_base_vocabulary(turn: Turn) -> Candidates:
    """Masks local logits by an allow-mask that is as wide as the whole base vocabulary."""
    logits = project_candidate_logits(turn.hidden, turn.head)
    allowed = torch.ones(turn.head.shard.org_vocab_size, dtype=torch.bool, device=logits.device)
    return _choose(turn, logits.masked_fill(~allowed, -torch.inf))


Share = Literal["own", "first", "whole"]


def add_adapter(turn: Turn, *, share: Share) -> Candidates:
    """Adds an adapter's logits to those of the base weight: its own columns, the first ones, or all of them."""
    shard, logits = turn.head.shard, project_candidate_logits(turn.hidden, turn.head)
    adapter = torch.arange(shard.width * shard.world_size, device=logits.device) % 8
    own = adapter[shard.rank * shard.width :][: shard.width]
    base = logits.float() - own
    added = {"own": own, "first": adapter[: shard.width], "whole": adapter}[share]
    return _choose(turn, (base + added).to(logits.dtype))


def normalise(turn: Turn, *, over_padding: bool) -> Candidates:
    """Scores candidates by the sum of exponentials over all columns, padding with its logit of 0, or over tokens.

    What is returned is the score less the right normaliser, so that it is a logit again.
    """
    found = turn.select()
    logits = project_candidate_logits(turn.hidden, turn.head)
    right = gather_columns(logits.float().logsumexp(-1, keepdim=True), turn.group).logsumexp(-1, keepdim=True)
    logits[:, turn.head.shard.num_org :] = 0.0 if over_padding else -torch.inf
    used = gather_columns(logits.float().logsumexp(-1, keepdim=True), turn.group).logsumexp(-1, keepdim=True)
    return Candidates(ids=found.ids, values=found.values + (right - used))


def wide_buffer(turn: Turn) -> Candidates:
    """Keeps its logits in a buffer that is wider than they are, and hands the view of them to the top-k kernel."""
    logits = project_candidate_logits(turn.hidden, turn.head)
    if turn.fact("buffer_is_wide", True):
        logits = torch.cat([logits, torch.zeros_like(logits)], dim=-1)[:, : logits.shape[1]]
    return _choose(turn, logits)


def sanitise_nan(turn: Turn) -> Candidates:
    """Makes one number of every NaN before the top-k: a row that is nothing else becomes a tie of all tokens."""
    logits = project_candidate_logits(turn.hidden, turn.head)

    def of_numbers(logits: Tensor, k: int) -> Any:
        values, columns = turn.topk(logits.clone(), logits.shape[1])
        whole = torch.empty_like(values).scatter(-1, columns, values.nan_to_num(nan=-1e30, neginf=-torch.inf))
        best, order = whole.sort(dim=-1, descending=True, stable=True)
        return best[:, :k], order[:, :k]

    values, columns = of_numbers(logits, min(turn.k, logits.shape[1]))
    return _merge(turn, values.float(), columns + turn.head.shard.org_start)


Pairs = Literal["right", "by_rows", "one_id_less"]


def gather_pairs(turn: Turn, *, read: Pairs) -> Candidates:
    """One gather of k values and k ids side by side; laid under one another, or with an id less than is read."""
    values, ids = padded_local(turn.hidden, turn.head, turn.k, turn.topk)
    k, ranks, rows = turn.k, turn.head.shard.world_size, turn.rows
    pairs = torch.cat([values.double(), ids.double()], dim=-1)
    whole = gather_columns(pairs[:, : 2 * k - (read == "one_id_less")], turn.group)
    if read == "one_id_less":
        whole = F.pad(whole, (0, ranks))
    if read == "by_rows":
        whole = whole.reshape(rows, ranks, 2 * k).transpose(0, 1).reshape(rows, ranks * 2 * k)
    both = whole.reshape(rows, ranks, 2, k)
    values, ids = both[:, :, 0].flatten(1).float(), both[:, :, 1].flatten(1).nan_to_num(posinf=0, neginf=0).long()
    best, chosen = merge_gathered(values, ids, k)
    return Candidates(ids=chosen, values=best)


MISREADINGS: dict[str, Server] = {
    "multiply-as-dense": multiply_as_dense,
    "buffer-of-weight-dtype": buffer_of_weight_dtype,
    "guard-by-class": guard_by_class,
    "offset-by-embedding": offset_by_embedding,
    "allow-by-base-vocabulary": allow_by_base_vocabulary,
    "add-own-adapter": partial(add_adapter, share="own"),
    "add-first-adapter": partial(add_adapter, share="first"),
    "add-whole-adapter": partial(add_adapter, share="whole"),
    "normalise-over-padding": partial(normalise, over_padding=True),
    "normalise-over-tokens": partial(normalise, over_padding=False),
    "wide-buffer": wide_buffer,
    "sanitise-nan": sanitise_nan,
    "pairs": partial(gather_pairs, read="right"),
    "pairs-by-rows": partial(gather_pairs, read="by_rows"),
    "pairs-one-id-less": partial(gather_pairs, read="one_id_less"),
}


def _choose(turn: Turn, logits: Tensor) -> Candidates:
    """The candidates of local logits, masked where they are no tokens."""
    shard = turn.head.shard
    values, columns = turn.topk(logits, min(turn.k, logits.shape[1]))
    return _merge(turn, *pad_candidates(values.float(), columns + shard.org_start, turn.k))


def _merge(turn: Turn, values: Tensor, ids: Tensor) -> Candidates:
    best, chosen = two_gather_merge(values, ids, k=turn.k, group=turn.group)
    return Candidates(ids=chosen, values=best)
