"""DraftSampler: hidden states to a draft, from static buffers and CUDA graphs where it can, eagerly where it must."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbed.selector.admission import AdmissionError, admit
from tpbed.selector.candidates import Candidates, Merge, choose_local, merge_candidates, takes_keys
from tpbed.selector.errors import SelectionError
from tpbed.selector.head import LmHead
from tpbed.selector.lattice import TransitionTables, lattice_scores
from tpbed.selector.packet import agree_on_draft
from tpbed.selector.project import project_candidate_logits
from tpbed.selector.select import check_request
from tpbed.selector.topk import TopK, default_topk
from tpbed.selector.unary import unary_transform
from tpbed.selector.walk import Draft, DraftParams, Noise, NoiseRule, draft_distribution, walk

EAGER_VARIABLE = "TPBED_EAGER_DRAFT_SAMPLER"  # of the environment: anything but "" and "0" forbids graphs
LEAST_FREE_BYTES = 1 << 30
_WARM_UPS = 3  # calls before a capture: kernels load, and caches are made outside the graph's memory


class Eager(Enum):
    """Why a proposal is computed without a graph; the value is the message."""

    ASKED = f"the caller or {EAGER_VARIABLE} asked for it"
    NO_CUDA = "the head is not on a CUDA device"
    NO_SLOTS = "a block of one token leaves no slot to draft"
    UNSUPPORTED_HEAD = "the head is neither dense nor can its quant_method be trusted, so that every proposal raises"
    LOW_MEMORY = "less than 1 GiB of device memory is free on some rank"
    TOO_LARGE = "the batch has more requests than the largest that was captured"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Proposal:
    """A draft, the candidates it was drawn from (requests, slots, K), and why no graph made it; None if one did."""

    draft: Draft
    ids: Tensor
    eager: Eager | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Inputs:
    """All that a proposal depends on; in a graph, at the addresses that it was captured with."""

    hidden: Tensor  # (requests, slots, hidden units)
    anchor: Tensor  # (requests,) int64
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    uniforms: Tensor  # (requests, slots)
    seeds: Tensor
    positions: Tensor

    def first(self, requests: int) -> _Inputs:
        """Views of the first requests."""
        return _Inputs(**{field.name: getattr(self, field.name)[:requests] for field in fields(self)})

    def take(self, given: _Inputs) -> None:
        """Copy what is given over the first requests; those after them become zeros, and greedy."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(given, field.name)
            mine[: len(theirs)].copy_(theirs)
            mine[len(theirs) :].zero_()


class DraftSampler:
    """Proposes `slots` tokens for each request: head, top-k, merge, lattice, walk; greedy and sampled requests mixed.

    head, k, group, topk, merge: as compute_candidates takes them. tables, multiplier, softcap: of the draft model.
    noise: the rule of all sampled requests. agree: broadcast the first rank's draft at the end, as agree_on_draft.
    sizes: numbers of requests to capture a graph for; a batch runs in the smallest that it fits in. On TP=1 one graph
    holds everything; on more ranks one holds what comes before the collectives and one what comes after, so that no
    transport is captured. `reasons` says why nothing was captured; on the CPU the same buffers are used uncaptured.
    Not for two streams at a time. Raises SelectionError for sizes that are no sizes.
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
        if not sizes or min(sizes) < 1 or slots < 0:
            raise SelectionError(f"sizes={list(sizes)}, slots={slots}: give 1 or more requests each, 0 or more slots.")
        self._head, self._tables, self._k, self._slots = head, tables, k, slots
        self._group, self._merge_rule, self._noise = group, merge, noise
        self._topk = topk or default_topk(tables.projection.device)
        self._multiplier, self._softcap, self._agree = multiplier, softcap, agree
        self._sizes = tuple(sorted(set(sizes)))
        self._device = tables.projection.device
        self._buffers = self._inputs_of(self._sizes[-1])
        self.reasons = self._reasons_against_graphs(eager)
        self._stages = {size: self._stages_for(size) for size in self._sizes}

    @property
    def captured(self) -> bool:
        """Whether there are graphs."""
        return not self.reasons

    def propose(self, hidden: Tensor, anchor: Tensor, params: DraftParams, noise: Noise) -> Proposal:
        """Draft for each request. Every rank calls this with as many requests.

        hidden: (requests, slots, hidden units), any floating dtype of the head. anchor: (requests,) int64.
        Returns tensors of the caller's own: the next proposal does not write to them.
        Raises SelectionError for shapes or a noise rule that the sampler was not made for, and AdmissionError for a
        head that cannot be projected, both on every rank alike.
        """
        given, requests = self._given(hidden, anchor, params, noise), len(hidden)
        check_request(hidden.flatten(0, 1), self._head, k=self._k, group=self._group)
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

    def _given(self, hidden: Tensor, anchor: Tensor, params: DraftParams, noise: Noise) -> _Inputs:
        requests, units = len(hidden), self._tables.projection.shape[1]
        if hidden.shape != (requests, self._slots, units) or anchor.shape != (requests,):
            raise SelectionError(
                f"hidden {tuple(hidden.shape)} and anchor {tuple(anchor.shape)} are not (requests, {self._slots}, "
                f"{units}) and (requests,): give what the sampler was made for."
            )
        if noise.rule != self._noise:
            raise SelectionError(f"noise={noise.rule!r}, but the sampler was made for {self._noise!r}: give that.")
        empty = self._inputs_of(requests)
        drawn = {name: getattr(noise, name) for name in ("uniforms", "seeds", "positions")}
        return _Inputs(
            hidden=hidden,
            anchor=anchor,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            **{name: getattr(empty, name) if value is None else value for name, value in drawn.items()},
        )

    def _inputs_of(self, requests: int) -> _Inputs:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(requests, *shape, dtype=dtype, device=self._device)

        real = torch.float32
        units = self._tables.projection.shape[1]
        return _Inputs(
            hidden=zeros(self._slots, units, dtype=self._tables.projection.dtype),
            anchor=zeros(),
            temperature=zeros(dtype=real),
            top_k=zeros(),
            top_p=zeros(dtype=real),
            uniforms=zeros(self._slots, dtype=real),
            seeds=zeros(),
            positions=zeros(),
        )

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

    def _eager_stages(self, given: _Inputs) -> list[_Stage]:
        return [lambda _: self._local(given), self._merge, lambda merged: self._tail(given, merged)]

    def _local(self, given: _Inputs) -> tuple[Tensor, ...]:
        mask = not takes_keys(self._topk, self._merge_rule)
        logits = project_candidate_logits(given.hidden.flatten(0, 1), self._head, mask=mask)
        return choose_local(logits, self._head.shard, k=self._k, topk=self._topk, merge=self._merge_rule)

    def _merge(self, local: tuple[Tensor, ...]) -> Candidates:
        return merge_candidates(
            local, self._head.shard, k=self._k, group=self._group, merge=self._merge_rule, topk=self._topk
        )

    def _tail(self, given: _Inputs, merged: Candidates) -> tuple[Draft, Tensor]:
        ids, values = (t.view(len(given.anchor), self._slots, self._k) for t in (merged.ids, merged.values))
        unary = unary_transform(values, multiplier=self._multiplier, softcap=self._softcap)
        params = DraftParams(temperature=given.temperature, top_k=given.top_k, top_p=given.top_p)
        noise = Noise(rule=self._noise, uniforms=given.uniforms, seeds=given.seeds, positions=given.positions)
        q = draft_distribution(lattice_scores(ids, unary, given.hidden, given.anchor, self._tables), params)
        return walk(ids, q, params, noise), ids

    def _world_size(self) -> int:
        return self._head.shard.world_size

    def _reasons_against_graphs(self, eager: bool) -> tuple[Eager, ...]:
        """All that hold, on every rank alike: devices and heads are, and memory is asked of all."""
        return tuple(
            reason
            for reason, holds in (
                (Eager.ASKED, eager or os.environ.get(EAGER_VARIABLE, "0") not in ("", "0")),
                (Eager.NO_CUDA, self._device.type != "cuda"),
                (Eager.NO_SLOTS, self._slots == 0),
                (Eager.UNSUPPORTED_HEAD, not _is_admitted(self._head)),
                (Eager.LOW_MEMORY, self._device.type == "cuda" and self._least_free() < LEAST_FREE_BYTES),
            )
            if holds
        )

    def _least_free(self) -> int:
        free = torch.tensor([torch.cuda.mem_get_info(self._device)[0]], device=self._device)
        if self._world_size() > 1:
            dist.all_reduce(free, op=dist.ReduceOp.MIN, group=self._group)
        return int(free)


_Stage = Callable[[Any], Any]


def _in_turn(stages: Sequence[_Stage]) -> Any:
    answer = None
    for stage in stages:
        answer = stage(answer)
    return answer


def _is_admitted(head: object) -> bool:
    try:
        admit(head)
    except AdmissionError:
        return False
    return True


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
