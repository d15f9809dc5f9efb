"""DraftSampler: hidden states to a draft, from static buffers and CUDA graphs where it can, eagerly where it must."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbed.selector.admission import AdmissionError, Path, admit
from tpbed.selector.candidates import Candidates, Merge, choose_local, merge_candidates, takes_keys
from tpbed.selector.errors import SelectionError
from tpbed.selector.head import LmHead
from tpbed.selector.lattice import TransitionTables, lattice_scores
from tpbed.selector.packet import agree_on_draft
from tpbed.selector.project import project_candidate_logits
from tpbed.selector.sampler_inputs import SamplerInputs
from tpbed.selector.select import check_choice, check_hidden, check_shard
from tpbed.selector.shard import is_whole
from tpbed.selector.topk import TopK, default_topk
from tpbed.selector.unary import check_unary, unary_transform
from tpbed.selector.vote import agree_admission
from tpbed.selector.walk import Draft, DraftParams, Noise, NoiseRule, check_rule, draft_distribution, walk

EAGER_VARIABLE = "TPBED_EAGER_DRAFT_SAMPLER"  # of the environment: anything but "" and "0" forbids graphs
LEAST_FREE_BYTES = 1 << 30
_WARM_UPS = 3  # calls before a capture: kernels load, and caches are made outside the graph's memory


class Eager(Enum):
    """Why a proposal is computed without a graph, on every rank if on one; the value is the message."""

    ASKED = f"the caller or {EAGER_VARIABLE} asked for it on some rank"
    NO_CUDA = "the head is not on a CUDA device"
    NO_SLOTS = "a block of one token leaves no slot to draft"
    UNSUPPORTED_HEAD = "a head can be projected in no way, or not alike on all ranks, so that every proposal raises"
    LOW_MEMORY = "less than 1 GiB of device memory is free on some rank"
    TOO_LARGE = "the batch has more requests than the largest that was captured"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Proposal:
    """A draft, the candidates it was drawn from (requests, slots, K), and why no graph made it; None if one did."""

    draft: Draft
    ids: Tensor
    eager: Eager | None


class DraftSampler:
    """Proposes `slots` tokens for each request: head, top-k, merge, lattice, walk; greedy and sampled requests mixed.

    head, k, group, topk, merge: as compute_candidates takes them. tables, multiplier, softcap: of the draft model.
    noise: the rule of all sampled requests. agree: broadcast the first rank's draft at the end, as agree_on_draft.
    sizes: numbers of requests to capture a graph for; a batch runs in the smallest that it fits in. On TP=1 one graph
    holds everything; on more ranks one holds what comes before the collectives and one what comes after, so that no
    transport is captured. `reasons` says why nothing was captured; on the CPU the same buffers are used uncaptured.
    Not for two streams at a time. Every rank makes one at the same time, and they vote, on how their heads are
    projected (512 bytes a rank) and on what speaks against graphs (20 bytes), so that none captures or raises alone.
    Raises SelectionError on every rank alike for what no proposal could be made with: sizes, noise rule, multiplier
    and softcap before any collective; k, merge, group and tables, which the head decides on, after the first vote.
    """

    def __init__(
        self,
        head: LmHead,
        tables: TransitionTables,
        *,
        k: int,
        slots: int,
        sizes: Sequence[int] = (1, 2, 4, 8),
        group: dist.ProcessGroup | None = None,
        topk: TopK | None = None,
        merge: Merge = "packed",
        noise: NoiseRule = "gumbel",
        multiplier: float = 1.0,
        softcap: float | None = None,
        agree: bool = False,
        eager: bool = False,
    ) -> None:
        _check_sizes(sizes, slots)
        check_rule(noise)
        check_unary(multiplier, softcap)
        shard = check_shard(head)
        self._path, self._refusal = _agreed_path(head, group, tables.projection.device)
        if self._path is not None:  # or heads are not alike, and one of them may fail in what the others pass
            check_choice(shard, k=k, group=group, merge=merge)
            _check_tables(tables, head)
        self._head, self._tables, self._k, self._slots = head, tables, k, slots
        self._group, self._merge_rule, self._noise = group, merge, noise
        self._topk = topk or default_topk(tables.projection.device)
        self._multiplier, self._softcap, self._agree = multiplier, softcap, agree
        self._sizes = tuple(sorted(set(sizes)))
        self._device = tables.projection.device
        self._buffers = SamplerInputs.blank(self._sizes[-1], slots, tables)
        self.reasons = self._reasons_against_graphs(eager)
        self._stages = {size: self._stages_for(size) for size in self._sizes}

    @property
    def captured(self) -> bool:
        """Whether there are graphs."""
        return not self.reasons

    @torch.no_grad()
    def propose(self, hidden: Tensor, anchor: Tensor, params: DraftParams, noise: Noise) -> Proposal:
        """Draft for each request. Every rank calls this with as many requests.

        hidden: (requests, slots, hidden units) float16, bfloat16 or float32, read in the tables' dtype. anchor:
        (requests,) int64, token ids that the tables have. params, noise: of as many requests, noise of the sampler's
        rule. All from any device; values are looked at where they are on the CPU.
        Returns tensors of the caller's own: the next proposal does not write to them.
        Raises SelectionError for inputs that the sampler was not made for, whatever its sizes, and AdmissionError if
        the vote refused the heads, both on every rank alike, before any collective.
        """
        given, requests = self._given(hidden, anchor, params, noise), len(hidden)
        size = next((size for size in self._sizes if size >= requests), None)
        if size is None:
            draft, ids = _in_turn(self._eager_stages(given))
            return self._finish(draft, ids, requests, Eager.TOO_LARGE)
        self._buffers.first(size).take(given)
        draft, ids = _in_turn(self._stages[size])
        return self._finish(draft, ids, requests, self.reasons[0] if self.reasons else None)

    def _finish(self, draft: Draft, ids: Tensor, requests: int, eager: Eager | None) -> Proposal:
        draft = Draft(tokens=draft.tokens[:requests].clone(), q_rows=draft.q_rows[:requests].clone())
        ids = ids[:requests].clone()
        if self._agree:
            draft, ids = agree_on_draft(draft, ids, group=self._group)
        return Proposal(draft=draft, ids=ids, eager=eager)

    def _given(self, hidden: Tensor, anchor: Tensor, params: DraftParams, noise: Noise) -> SamplerInputs:
        given = SamplerInputs.of(hidden, anchor, params, noise, slots=self._slots, tables=self._tables)
        if noise.rule != self._noise:
            raise SelectionError(f"noise={noise.rule!r}, but the sampler was made for {self._noise!r}: give that.")
        if self._path is None:
            raise AdmissionError(self._refusal)
        check_hidden(hidden.flatten(0, 1), None)
        return given

    @torch.no_grad()
    def _stages_for(self, size: int) -> list[_Stage]:
        """What makes a draft of the first `size` requests in the buffers."""
        stages = self._eager_stages(self._buffers.first(size))
        if not self.captured:
            return stages
        if self._world_size() == 1:
            return [_Graph(lambda _: _in_turn(stages), None)]
        before, merge, after = stages
        local = _Graph(before, None)
        merged = _copied(merge(local.answer))  # a place of its own for what the transport delivers
        tail = _Graph(after, merged)
        return [local, lambda answer: _written(merged, merge(answer)), tail]

    def _eager_stages(self, given: SamplerInputs) -> list[_Stage]:
        return [lambda _: self._local(given), self._merge, lambda merged: self._tail(given, merged)]

    def _local(self, given: SamplerInputs) -> tuple[Tensor, ...]:
        mask = not takes_keys(self._topk, self._merge_rule)
        logits = project_candidate_logits(given.hidden.flatten(0, 1), self._head, path=self._path, mask=mask)
        return choose_local(logits, self._head.shard, k=self._k, topk=self._topk, merge=self._merge_rule)

    def _merge(self, local: tuple[Tensor, ...]) -> Candidates:
        return merge_candidates(
            local, self._head.shard, k=self._k, group=self._group, merge=self._merge_rule, topk=self._topk
        )

    def _tail(self, given: SamplerInputs, merged: Candidates) -> tuple[Draft, Tensor]:
        ids, values = (t.view(len(given.anchor), self._slots, self._k) for t in (merged.ids, merged.values))
        unary = unary_transform(values, multiplier=self._multiplier, softcap=self._softcap)
        q = draft_distribution(lattice_scores(ids, unary, given.hidden, given.anchor, self._tables), given.params)
        return walk(ids, q, given.params, given.noise(self._noise)), ids

    def _world_size(self) -> int:
        return self._head.shard.world_size

    def _reasons_against_graphs(self, eager: bool) -> tuple[Eager, ...]:
        """All that hold on some rank: a rank that captures joins collectives in which one that does not is missing."""
        cuda = self._device.type == "cuda"
        holds = {
            Eager.ASKED: eager or os.environ.get(EAGER_VARIABLE, "0") not in ("", "0"),
            Eager.NO_CUDA: not cuda,
            Eager.NO_SLOTS: self._slots == 0,
            Eager.UNSUPPORTED_HEAD: self._path is None,
            Eager.LOW_MEMORY: cuda and torch.cuda.mem_get_info(self._device)[0] < LEAST_FREE_BYTES,
        }
        votes = torch.tensor(list(holds.values()), dtype=torch.int32, device=self._device)
        if self._world_size() > 1:
            dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group)
        return tuple(reason for reason, vote in zip(holds, votes.tolist(), strict=True) if vote)


_Stage = Callable[[Any], Any]


def _in_turn(stages: Sequence[_Stage]) -> Any:
    answer = None
    for stage in stages:
        answer = stage(answer)
    return answer


def _check_sizes(sizes: Sequence[int], slots: int) -> None:
    if not sizes or not all(map(is_whole, (*sizes, slots))) or min(sizes) < 1 or slots < 0:
        raise SelectionError(f"sizes={list(sizes)}, slots={slots}: give 1 or more requests each, 0 or more slots.")


def _check_tables(tables: TransitionTables, head: LmHead) -> None:
    tokens, units = len(tables.predecessor), tables.projection.shape[1]
    org, wanted = head.shard.org_vocab_size, getattr(head, "hidden_size", units)
    if tokens < org or units != wanted:
        raise SelectionError(
            f"tables of {tokens} tokens and {units} hidden units do not serve a head of {org} tokens and {wanted} "
            f"hidden units: give the tables of the model that the head belongs to."
        )


def _agreed_path(head: LmHead, group: dist.ProcessGroup | None, device: torch.device) -> tuple[Path | None, str]:
    """How all ranks project their heads, or None, and why."""
    try:
        return admit(head) if head.shard.world_size == 1 else agree_admission(head, group=group, device=device)
    except AdmissionError as error:
        return None, str(error)


def _copied(merged: Candidates) -> Candidates:
    return Candidates(ids=merged.ids.clone(), values=merged.values.clone())


def _written(place: Candidates, merged: Candidates) -> Candidates:
    place.ids.copy_(merged.ids)
    place.values.copy_(merged.values)
    return place


class _Graph:
    """A stage as a CUDA graph: it reads where its argument lay when it was captured, and writes where `answer` lies."""

    def __init__(self, stage: _Stage, argument: Any) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                stage(argument)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.answer = stage(argument)

    def __call__(self, _argument: Any) -> Any:
        self._graph.replay()
        return self.answer
