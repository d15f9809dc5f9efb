"""Rank programs that are wrong by one change: who joins what, when it is read, who decides, and how others learn."""

from __future__ import annotations

import os
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpbed.harness.staged import Broadcast, Staged
from tpbed.selector.candidates import Candidates
from tpbed.selector.errors import SelectionError
from tpbed.selector.shard import NO_TOKEN

BUCKET = 8  # rows of a captured graph


class RefuseShortShard(Staged):
    """Guards k against the real columns of its own shard, which holds on one rank and not on another (sglang#35580)."""

    def check(self, hidden: Tensor) -> None:
        if self.k > self.shard.num_org:
            raise SelectionError(f"k={self.k} exceeds the {self.shard.num_org} real columns of this shard.")


class SkipEmptyShard(Staged):
    """Returns early where its shard holds no real token, and leaves its peers (bo-ke/llm-internal-medicine#45)."""

    def run(self, hidden: Tensor) -> Candidates:
        empty = self.shard.num_org == 0
        self.note("empty_shard", empty, because=f"num_org={self.shard.num_org}")
        return _nothing(hidden, self.k) if empty else super().run(hidden)


class ClipKToShard(Staged):
    """Gathers as many candidates as its shard has real tokens, one at least (vllm-project/vllm-ascend#16628)."""

    def prepare(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = super().prepare(hidden)
        own_k = max(min(self.k, self.shard.num_org), 1)
        return values[:, :own_k], ids[:, :own_k]


class LocalFastPath(Staged):
    """Takes one packed gather where its own shard has no padding, and two where it has (flashinfer#5345)."""

    def gather(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        fast = self.shard.num_org == self.shard.width
        self.note("fast_path", fast, because=f"num_org={self.shard.num_org}, width={self.shard.width}")
        if not fast or self.shard.world_size == 1:
            return super().gather(values, ids)
        both = self.gather_one(torch.cat([values.double(), ids.double()], dim=-1)).view(len(values), -1, 2, self.k)
        return both[..., 0, :].flatten(-2).float(), both[..., 1, :].flatten(-2).long()


class SwappedGathers(Staged):
    """Gathers ids before values on odd ranks: the order of a set, which differs by process (radixark/miles#3194)."""

    def gather(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        if self.rank % 2 == 0:
            return super().gather(values, ids)
        ids, values = super().gather(ids, values)
        return values, ids


class ShardOnly(Staged):
    """Answers from its own shard and never gathers (ggml-org/llama.cpp#27858)."""

    def gather(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return values, ids


class RaiseOnUnmaskedNan(Staged):
    """Looks for NaN before it masks: garbage in padding is enough to raise on one rank (flashinfer#2402)."""

    def project(self, hidden: Tensor) -> Tensor:
        logits = super().project(hidden)
        if logits.isnan().any():
            raise ValueError(f"NaN among the logits of rank {self.rank}.")
        return logits


class RescoreLocally(Staged):
    """Rounds the merged values on rank 1, as another kernel there would, and agrees with nobody (sglang#31071)."""

    def finish(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = super().finish(values, ids)
        return values.bfloat16().float() if self.rank == 1 else values, ids


class LastRankSwapsTwo(Staged):
    """Swaps the first two candidates, on the last rank only (sgl-project/sglang#40246)."""

    def finish(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        values, ids = super().finish(values, ids)
        order = torch.arange(self.k)
        order[:2] = order[:2].flip(0) if self.is_last else order[:2]
        return values[:, order], ids[:, order]


class LastRankRaisesAfterwards(Staged):
    """Raises on the last rank, after the last collective (vllm-project/vllm#23985)."""

    def run(self, hidden: Tensor) -> Candidates:
        right = super().run(hidden)
        if self.is_last:
            raise ValueError("the answer cannot be written out.")
        return right


class IdleRankSkipsStep(Staged):
    """Has no rows on the last rank in the second step, and answers without its collectives (vllm#43547)."""

    def run(self, hidden: Tensor) -> Candidates:
        idle = self.is_last and self.step == 1
        self.note("idle", idle, because="no request is left" if idle else "requests are there")
        return _nothing(hidden[:0], self.k) if idle else super().run(hidden)


class OwnClock(Staged):
    """Drops the row of a late request by its own clock, ahead on the last rank (sgl-project/sglang#27221)."""

    def run(self, hidden: Tensor) -> Candidates:
        late = self.is_last and self.step > 0
        self.note("past_deadline", late, because=f"its clock is {1.0 * late} s ahead")
        return super().run(hidden[:-1] if late else hidden)


class PadsToItsBucket(Staged):
    """Pads its rows to those of a captured graph on the first rank, while the others run eagerly (sglang#32196)."""

    def run(self, hidden: Tensor) -> Candidates:
        missing = max(BUCKET - len(hidden), 0) if self.rank == 0 else 0
        self.note("captured", self.rank == 0, because=f"{missing} rows of padding")
        found = super().run(torch.nn.functional.pad(hidden, (0, 0, 0, missing)))
        return Candidates(values=found.values[: len(hidden)], ids=found.ids[: len(hidden)])


class ReadsBeforeWait(Staged):
    """Reads what it gathers before it waits for it: whoever comes last finds it there (vllm-project/vllm#17929)."""

    def gather_one(self, local: Tensor) -> Tensor:
        parts = [torch.zeros_like(local) for _ in range(self.shard.world_size)]
        work = dist.all_gather(parts, local, group=self.group, async_op=True)
        gathered = torch.cat(parts, dim=-1)
        work.wait()
        return gathered


class GathersOnceMore(Staged):
    """Gathers the values twice on the last rank, which tunes its kernels still (flashinfer-ai/flashinfer#3186)."""

    def gather(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        if self.is_last and self.step == 0:
            self.gather_one(values)
        return super().gather(values, ids)


class KeepsOldIds(Staged):
    """Saves the gather of ids on the last rank, and takes those of the step before (vllm-project/vllm#44954)."""

    old: Tensor

    def gather(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        if not self.is_last or self.step == 0:
            values, self.old = super().gather(values, ids)
            return values, self.old
        return self.gather_one(values), self.old


class BarrierOnTheFirstRank(Staged):
    """Calls a barrier on rank 0 alone, around what only it writes out (local-inference-lab/vllm#618)."""

    def run(self, hidden: Tensor) -> Candidates:
        if self.rank == 0 and self.shard.world_size > 1:
            dist.barrier(self.group)
        return super().run(hidden)


class LeavesGroupEarly(Staged):
    """Destroys its group on the last rank before the gather of ids (sgl-project/SpecForge#781)."""

    def gather(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        values = self.gather_one(values) if self.shard.world_size > 1 else values
        if self.is_last:
            dist.destroy_process_group()
        return values, self.gather_one(ids) if self.shard.world_size > 1 else ids


class GroupsInAnotherOrder(Staged):
    """Makes its two groups in another order on the last rank (radixark/miles#3194: the order of a set)."""

    def run(self, hidden: Tensor) -> Candidates:
        if self.step == 0 and self.shard.world_size > 1:
            everybody = list(range(self.shard.world_size))
            order = [everybody, everybody[:-1]]
            made = {len(ranks): dist.new_group(ranks) for ranks in (order[::-1] if self.is_last else order)}
            self.whole = made[len(everybody)]
        self.group = self.whole if self.shard.world_size > 1 else self.group
        return super().run(hidden)

    whole: dist.ProcessGroup | None = None


class CrossedGroups(Staged):
    """Reduces in a group of ranks 0 and 1, then in that of all; rank 1 the other way round (NVIDIA/nccl#195)."""

    pair: dist.ProcessGroup | None = None

    def run(self, hidden: Tensor) -> Candidates:
        if self.shard.world_size > 1:
            self.pair = self.pair or dist.new_group([0, 1])
            groups = [self.pair, self.group] if self.rank < 2 else [self.group]
            for group in groups[::-1] if self.rank == 1 else groups:
                dist.all_reduce(torch.ones(1, device=hidden.device), group=group)
        return super().run(hidden)


class GathersInItsHalf(Staged):
    """Gathers among the ranks of its half: the group of another layout (vllm-project/vllm#17929)."""

    half: dist.ProcessGroup | None = None

    def gather_one(self, local: Tensor) -> Tensor:
        size = self.shard.world_size
        if self.half is None:
            halves = [list(range(size // 2)), list(range(size // 2, size))]
            groups = [dist.new_group(ranks) for ranks in halves]
            self.half = groups[self.rank >= size // 2]
        self.group = self.half
        return super().gather_one(local)


class OwnSeed(Staged):
    """Breaks off equal chances by a generator that each rank seeds for itself (openai/gpt-oss#270)."""

    def run(self, hidden: Tensor) -> Candidates:
        found = super().run(hidden)
        draw = torch.Generator().manual_seed(100 * self.step + self.rank)
        slots = torch.randperm(self.k, generator=draw)
        picked = torch.cat([slots[:1], torch.arange(self.k)[torch.arange(self.k) != slots[0]]])
        return Candidates(values=found.values[:, picked], ids=found.ids[:, picked])


class OnlyTheFirstRankMerges(Broadcast):
    """Merges on rank 0, and hands nothing out: the others keep what they brought (vllm-project/vllm#17929)."""

    def hand_out(self, part: Tensor) -> Tensor:
        return part


class BroadcastFromTheLast(Broadcast):
    """Merges on rank 0 and broadcasts from the last one, which has its own shard only (SGLang's SPEC_TP_SYNC sites)."""

    def root(self) -> int:
        return self.shard.world_size - 1


class OwnRoot(Broadcast):
    """Takes itself for the root on the last rank, as ranks do that have each one visible device (sglang-omni#2156)."""

    def root(self) -> int:
        return self.rank if self.is_last else 0


class SendsOneColumn(Broadcast):
    """Broadcasts one column from rank 0, where the others expect k (vllm-project/vllm#46994)."""

    def hand_out(self, part: Tensor) -> Tensor:
        return super().hand_out(part[:, :1].contiguous() if self.rank == 0 else part)


class ErrorSwallowed(Staged):
    """Catches an error of its top-k and answers with nothing, past the gathers (local-inference-lab/vllm#618)."""

    def run(self, hidden: Tensor) -> Candidates:
        try:
            if self.k > self.shard.num_org:
                raise RuntimeError(f"selected index k={self.k} out of range")
        except RuntimeError:
            return _nothing(hidden, self.k)
        return super().run(hidden)


class BarrierInFinally(Staged):
    """Raises on the last rank before the gather of ids, and calls a barrier on its way out (SpecForge#781)."""

    def gather(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        try:
            return self.gather_values(values), self.gather_ids(ids)
        finally:
            if self.shard.world_size > 1:
                dist.barrier(self.group)

    def gather_values(self, values: Tensor) -> Tensor:
        return self.gather_one(values) if self.shard.world_size > 1 else values

    def gather_ids(self, ids: Tensor) -> Tensor:
        if self.is_last:
            raise ValueError("the ids cannot be read")
        return self.gather_one(ids) if self.shard.world_size > 1 else ids


class FlagForValues(Staged):
    """Sends one flag for its values where its shard has no token (NVIDIA/TensorRT-LLM#7507)."""

    def gather_one(self, local: Tensor) -> Tensor:
        failed = self.shard.num_org == 0
        return super().gather_one(torch.zeros(1, 1, dtype=torch.bool) if failed else local)


class SendsAView(Staged):
    """Gathers the first k columns of a wider tensor without making them contiguous (flashinfer-ai/flashinfer#1866)."""

    def gather_one(self, local: Tensor) -> Tensor:
        view = torch.cat([local, local], dim=-1)[:, : self.k]
        parts = [torch.empty_like(local) for _ in range(self.shard.world_size)]
        dist.all_gather(parts, view, group=self.group)
        return torch.cat(parts, dim=-1)


class OwnDtype(Staged):
    """Sends values in float64 from the last rank, whose fallback kernel gives these (pytorch/pytorch#117617)."""

    def gather(self, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        gathered, ids = super().gather(values.double() if self.is_last else values, ids)
        return gathered.float(), ids


class OwnReduceOp(Staged):
    """Votes by MIN for what all can do, and by MAX on the last rank (flashinfer-ai/flashinfer#5345)."""

    def run(self, hidden: Tensor) -> Candidates:
        if self.shard.world_size > 1:
            can = torch.ones(1, dtype=torch.int64)
            dist.all_reduce(can, dist.ReduceOp.MAX if self.is_last else dist.ReduceOp.MIN, group=self.group)
        return super().run(hidden)


class VoteByAny(Staged):
    """Leaves the mask out where any shard is without padding, by a vote with MAX for MIN (sgl-project/sglang#32196)."""

    def mask(self, logits: Tensor) -> Tensor:
        full = torch.tensor(int(self.shard.num_org == self.shard.width))
        if self.shard.world_size > 1:
            dist.all_reduce(full, dist.ReduceOp.MAX, group=self.group)
        return logits if full else super().mask(logits)


class IdsByMax(Staged):
    """Reduces values and ids by MAX, each for itself: the best value beside the highest id."""

    def gather_one(self, local: Tensor) -> Tensor:
        dist.all_reduce(local, dist.ReduceOp.MAX, group=self.group)
        return local


class ChainOneShort(Staged):
    """Passes the answer on from rank to rank and stops one too early: the last one waits (radixark/miles#3194)."""

    def run(self, hidden: Tensor) -> Candidates:
        found, rank = super().run(hidden), self.rank
        if rank > 0:
            dist.recv(found.ids, rank - 1, self.group)
        if rank < self.shard.world_size - 2:
            dist.send(found.ids, rank + 1, self.group)
        return found


class MessageOfAnotherSize(Staged):
    """Sends k - 1 ids to the next rank, which expects k (NVIDIA/nccl#1417)."""

    def run(self, hidden: Tensor) -> Candidates:
        found, rank, size = super().run(hidden), self.rank, self.shard.world_size
        if rank == 0 and size > 1:
            dist.send(found.ids[:, 1:].contiguous(), 1, self.group)
        if rank == 1:
            dist.recv(found.ids, 0, self.group)
        return found


class MessageNobodyReads(Staged):
    """Sends its ids ahead and does not wait, and no rank receives them (pytorch/pytorch#49383)."""

    def run(self, hidden: Tensor) -> Candidates:
        found = super().run(hidden)
        if self.is_last:
            self.sent = dist.isend(found.ids, 0, self.group)
        return found


class ReplaysCapturedInput(Staged):
    """Multiplies the hidden states of the first step for ever: a graph that nobody copies new ones into (vllm#2147)."""

    def prepare(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        self.captured = hidden if self.step == 0 else self.captured
        return super().prepare(self.captured)

    captured: Tensor


class ExitsWithStatusZero(Staged):
    """Ends its process with status 0 on the last rank after a step, as if all was well (sgl-project/sglang#27221)."""

    def run(self, hidden: Tensor) -> Candidates:
        found = super().run(hidden)
        if self.is_last:
            os._exit(0)
        return found


def _nothing(hidden: Tensor, k: int) -> Candidates:
    rows = len(hidden)
    return Candidates(values=torch.full((rows, k), -inf), ids=torch.full((rows, k), NO_TOKEN))


PROGRAMS: dict[str, type[Staged]] = {
    "refuse-short-shard": RefuseShortShard,
    "skip-empty-shard": SkipEmptyShard,
    "clip-k-to-shard": ClipKToShard,
    "local-fast-path": LocalFastPath,
    "swapped-gathers": SwappedGathers,
    "shard-only": ShardOnly,
    "raise-on-unmasked-nan": RaiseOnUnmaskedNan,
    "rescore-locally": RescoreLocally,
    "last-rank-swaps-two": LastRankSwapsTwo,
    "last-rank-raises-afterwards": LastRankRaisesAfterwards,
    "idle-rank-skips-step": IdleRankSkipsStep,
    "own-clock": OwnClock,
    "pads-to-its-bucket": PadsToItsBucket,
    "reads-before-wait": ReadsBeforeWait,
    "gathers-once-more": GathersOnceMore,
    "keeps-old-ids": KeepsOldIds,
    "barrier-on-the-first-rank": BarrierOnTheFirstRank,
    "leaves-group-early": LeavesGroupEarly,
    "groups-in-another-order": GroupsInAnotherOrder,
    "crossed-groups": CrossedGroups,
    "gathers-in-its-half": GathersInItsHalf,
    "own-seed": OwnSeed,
    "only-the-first-rank-merges": OnlyTheFirstRankMerges,
    "broadcast-from-the-last": BroadcastFromTheLast,
    "own-root": OwnRoot,
    "sends-one-column": SendsOneColumn,
    "error-swallowed": ErrorSwallowed,
    "barrier-in-finally": BarrierInFinally,
    "flag-for-values": FlagForValues,
    "sends-a-view": SendsAView,
    "own-dtype": OwnDtype,
    "own-reduce-op": OwnReduceOp,
    "vote-by-any": VoteByAny,
    "ids-by-max": IdsByMax,
    "chain-one-short": ChainOneShort,
    "message-of-another-size": MessageOfAnotherSize,
    "message-nobody-reads": MessageNobodyReads,
    "replays-captured-input": ReplaysCapturedInput,
    "exits-with-status-zero": ExitsWithStatusZero,
}
_HANDED_OUT = {"selector": "broadcast"}
NEEDS: dict[str, dict[str, Any]] = dict.fromkeys(
    ("only-the-first-rank-merges", "broadcast-from-the-last", "own-root", "sends-one-column"), _HANDED_OUT
)
