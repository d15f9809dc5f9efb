"""SimulatedGroup: one rank's end of a process group, and the channel in which the ends meet.

Members meet at the same place in the same group's order of calls. If they differ there in op, root or payload bytes,
that collective never completes, as with gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tpbed.tp import data_movement as move
from tpbed.tp.isolation import quietly
from tpbed.tp.mailbox import Mailbox, MessageWork, require_message
from tpbed.tp.payload import (
    is_channels_last,
    payload_bytes,
    require_alike,
    require_each_alike,
    require_one_dtype,
)
from tpbed.tp.simulated_rank import SimulatedRank
from tpbed.tp.simulated_run import SimulatedRun
from tpbed.tp.simulated_work import SimulatedPart, SimulatedWork

_WRONG_LENGTH = "{0}: Incorrect {1} list size {{1}}. {2} list size should be {{0}}, same as size of the process group."


class Channel:
    """Where the members of one group meet: those that are equally far in their own order of calls belong together."""

    def __init__(self, size: int) -> None:
        self.size, self.mailbox = size, Mailbox()
        self._meetings: dict[int, tuple[list[Any], set[int]]] = {}

    def company(self, seq: int) -> list[SimulatedPart | None]:
        """The parts of those who have come to a meeting that is not over, in group order."""
        return self._meetings.setdefault(seq, ([None] * self.size, set(range(self.size))))[0]

    def arrive(self, seq: int, place: int, part: SimulatedPart) -> list[SimulatedPart] | None:
        """All parts in group order, once the last is there."""
        meeting = self._meetings.get(seq)
        if meeting is None:
            meeting = self._meetings[seq] = [None] * self.size, set(range(self.size))
        parts, missing = meeting
        parts[place] = part
        missing.discard(place)
        if missing:
            return None
        del self._meetings[seq]
        return parts


def _settle(parts: list[SimulatedPart]) -> None:
    """Move the data, if the members agree; if not, the collective stays incomplete for ever, as with gloo."""
    first = parts[0]
    for part in parts:
        if part.terms != first.terms:
            return
    if first.splits is not None and not _splits_fit(parts):
        return
    if first.stream is not None:
        _move_on_cuda(parts)
    elif first.move is not None:
        quietly(first.move, parts)
    for part in parts:
        part.complete()


def _splits_fit(parts: list[SimulatedPart]) -> bool:
    """Whether each member expects from each other what that one sends."""
    sent, expected = zip(*(part.splits for part in parts if part.splits is not None), strict=True)
    return all(row == tuple(column) for row, column in zip(zip(*sent, strict=True), expected, strict=True))


def _move_on_cuda(parts: list[SimulatedPart]) -> None:
    """After what every rank has queued on its stream, and before what it queues when it has waited."""
    stream = torch.cuda.current_stream()
    for part in parts:
        stream.wait_stream(part.stream)
    if parts[0].move is not None:
        quietly(parts[0].move, parts)
    moved = stream.record_event()
    for part in parts:
        part.moved = moved


class SimulatedGroup:
    """One rank's end of a simulated group, under the names that process groups give their collectives.

    A call checks what gloo checks, says what is wrong in gloo's words, and returns a handle; nothing waits here.
    """

    def __init__(self, run: SimulatedRun, rank: SimulatedRank, channel: Channel, place: int) -> None:
        self._run, self._rank, self._channel, self._place = run, rank, channel, place
        self._size, self._seq = channel.size, 0

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SimulatedPart:
        """dist.all_gather."""
        (given,) = outputs
        if len(given) != self._size:
            message = "all_gather: invalid output tensor list at index 0 (expected length {}, got {})"
            self._require_length(given, message)
        require_alike("all_gather", given, inputs[0])
        return self._join(opts, "all_gather", payload_bytes(inputs[0]), move.all_gather, inputs, given)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> SimulatedPart:
        """dist.all_gather_single; all_gather_into_tensor before torch 2.13."""
        fits = input.dim() > 0 and output.shape == (self._size * input.shape[0], *input.shape[1:])
        if not fits or output.dtype is not input.dtype:
            return self.allgather([list(output.chunk(self._size))], [input], opts)  # which says what is wrong
        return self._join(opts, "all_gather", payload_bytes(input), move.all_gather, [input], [output], whole=True)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> SimulatedPart:
        """dist.all_reduce."""
        opts = opts or c10d.AllreduceOptions()
        size, fold = payload_bytes(tensors[0], in_memory=True), move.fold_of(opts, tensors[0])
        return self._join(opts, "all_reduce", size, move.all_reduce, tensors, fold=fold)

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> SimulatedPart:
        """dist.reduce."""
        opts = opts or c10d.ReduceOptions()
        size, fold = payload_bytes(tensors[0], in_memory=True), move.fold_of(opts, tensors[0])
        return self._join(opts, "reduce", size, move.reduce, tensors, root=opts.rootRank, fold=fold)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> SimulatedPart:
        """dist.all_reduce_coalesced: one collective over all, laid end to end."""
        require_one_dtype(tensors)
        opts = opts or c10d.AllreduceCoalescedOptions()
        size, fold = sum(map(payload_bytes, tensors)), move.fold_of(opts, tensors[0])
        return self._join(opts, "all_reduce", size, move.all_reduce, tensors, fold=fold)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SimulatedPart:
        """dist.all_gather_coalesced. outputs: by member, and then as inputs."""
        self._require_length(outputs, "allgather_coalesced: output lists should be equal to world size")
        for given in outputs:
            require_each_alike("allgather_coalesced", given, inputs)
        by_input = [tensor for column in zip(*outputs, strict=True) for tensor in column]
        size = sum(map(payload_bytes, inputs))
        return self._join(opts, "all_gather_coalesced", size, move.all_gather_coalesced, inputs, by_input)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> SimulatedPart:
        """Several of dist.all_gather_single at once."""
        chunks = [output.chunk(self._size) for output in outputs]
        by_member = [[chunk[place] for chunk in chunks if place < len(chunk)] for place in range(self._size)]
        return self.allgather_coalesced(by_member, inputs, opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> SimulatedPart:
        """Several of dist.reduce_scatter_single at once."""
        for output, input in zip(outputs, inputs, strict=True):
            self._require_share(output, input)
        opts = opts or c10d.ReduceScatterOptions()
        shares, fold = [payload_bytes(output) for output in outputs], move.fold_of(opts, outputs[0])
        moves = move.reduce_scatter_coalesced
        return self._join(opts, "reduce_scatter_coalesced", shares, moves, inputs, outputs, fold=fold)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> SimulatedPart:
        """dist.broadcast."""
        root = (opts or c10d.BroadcastOptions()).rootRank
        size = payload_bytes(tensors[0], in_memory=True)
        return self._join(opts, "broadcast", size, move.broadcast, tensors, root=root)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> SimulatedPart:
        """dist.reduce_scatter."""
        (given,) = inputs
        self._require_length(given, "invalid input tensor list size, must be world size")
        require_alike("reduce_scatter", outputs, given[self._place])
        payload_bytes(outputs[0], in_memory=True)
        opts = opts or c10d.ReduceScatterOptions()
        shares, fold = [payload_bytes(tensor) for tensor in given], move.fold_of(opts, outputs[0])
        return self._join(opts, "reduce_scatter", shares, move.reduce_scatter, given, outputs, fold=fold)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> SimulatedPart:
        """dist.reduce_scatter_single; reduce_scatter_tensor before torch 2.13."""
        self._require_share(output, input)
        opts = opts or c10d.ReduceScatterOptions()
        shares, fold = [payload_bytes(output)] * self._size, move.fold_of(opts, output)
        return self._join(opts, "reduce_scatter", shares, move.reduce_scatter, [input], [output], fold=fold, whole=True)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> SimulatedPart:
        """dist.all_to_all."""
        self._require_length(outputs, "all_to_all: output tensor list size {1} does not match world size {0}")
        self._require_length(inputs, "all_to_all: input tensor list size {1} does not match world size {0}")
        require_alike("all_to_all", outputs, outputs[0])
        require_alike("all_to_all", inputs, inputs[0])
        splits = [payload_bytes(tensor) for tensor in inputs], [tensor.nbytes for tensor in outputs]
        return self._join(opts, "all_to_all", None, move.all_to_all, inputs, outputs, splits=splits)

    def alltoall_base(
        self, output: Tensor, input: Tensor, out_splits: list[int], in_splits: list[int], opts: Any = None
    ) -> SimulatedPart:
        """dist.all_to_all_single."""
        if not input.is_contiguous() and not is_channels_last(input):
            raise ValueError("Tensors must be contiguous")
        even = not out_splits and not in_splits
        if even and input.nbytes != output.nbytes:
            raise RuntimeError(f"all_to_all: {input.nbytes} bytes go in and {output.nbytes} out: they must be as many")
        payload_bytes(output, in_memory=True)
        splits = self._split(input, in_splits, even), self._split(output, out_splits, even)
        return self._join(opts, "all_to_all", None, move.all_to_all, [input], [output], splits=splits, whole=True)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> SimulatedPart:
        """dist.gather."""
        root = (opts or c10d.GatherOptions()).rootRank
        given: list[Tensor] = outputs[0] if root == self._place else []
        if root == self._place:
            self._require_length(given, _WRONG_LENGTH.format("gather", "output", "Output"))
            require_alike("gather", given, inputs[0])
        return self._join(opts, "gather", payload_bytes(inputs[0]), move.all_gather, inputs, given, root=root)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> SimulatedPart:
        """dist.scatter."""
        root = (opts or c10d.ScatterOptions()).rootRank
        given: list[Tensor] = inputs[0] if root == self._place else []
        if root == self._place:
            self._require_length(given, _WRONG_LENGTH.format("scatter", "input", "Input"))
            require_alike("scatter", given, outputs[0])
        size = max(payload_bytes(tensor, in_memory=True) for tensor in (*outputs, *given))
        return self._join(opts, "scatter", size, move.scatter, given, outputs, root=root)

    def barrier(self, opts: Any = None) -> SimulatedPart:
        """dist.barrier. Its time-out counts, unlike the group's."""
        work = self._join(opts, "barrier", 0, None)
        if opts is not None:
            work.timeout_s = max(opts.timeout.total_seconds(), 0.0)
        return work

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """dist.monitored_barrier: its time-out counts, and place 0 says who has not come."""
        timeout = timedelta(minutes=30) if timeout is None else timeout
        company = self._channel.company(self._seq + 1)
        work = self._join(None, "monitored_barrier", 0, None)
        try:
            work.wait(max(timeout, timedelta(microseconds=1)))
        except RuntimeError:
            absent = [place for place, part in enumerate(company) if part is None or part.terms != work.terms]
            work.terms = ("nothing", self._place, None)  # whoever comes later does not meet it
            raise RuntimeError(self._told_absent(absent, timeout, wait_all_ranks)) from None

    def _told_absent(self, absent: list[int], timeout: timedelta, tells_all: bool) -> str:
        if self._place:
            return (
                f"Rank {self._place} successfully reached monitoredBarrier, but received errors while waiting for "
                "send/recv from rank 0. Please check rank 0 logs for faulty rank."
            )
        who = f"Ranks {', '.join(map(str, absent))}" if tells_all else f"Rank {absent[0]}"
        return f"[Rank 0]: {who} failed to pass monitoredBarrier in {timeout // timedelta(milliseconds=1)} ms"

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> MessageWork:
        """dist.isend, and dist.send, which waits."""
        work = self._message("send", tensors, peer, tag)
        self._channel.mailbox.send(work)
        return work

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> MessageWork:
        """dist.irecv, and dist.recv, which waits."""
        work = self._message("recv", tensors, peer, tag)
        self._channel.mailbox.receive(work)
        return work

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> MessageWork:
        """The same without a source."""
        work = self._message("recv", tensors, None, tag)
        self._channel.mailbox.receive(work)
        return work

    def _message(self, op: str, tensors: list[Tensor], peer: int | None, tag: int) -> MessageWork:
        run, place = self._run, self._place
        tensor = require_message(tensors, peer, tag, place, self._size)
        work = MessageWork(run, run.here(self._rank, waits=False), op, tensor, place=place, peer=peer, tag=tag)
        if tensor.is_cuda:
            work.stream = torch.cuda.current_stream()
        run.progress += 1
        return work

    def _join(
        self,
        opts: Any,
        op: str,
        payload: Any,
        moves: move.Move | None,
        inputs: Sequence[Tensor] = (),
        outputs: Sequence[Tensor] = (),
        *,
        root: int = -1,
        **more: Any,
    ) -> SimulatedPart:
        """more: of the part's fields."""
        run, waits = self._run, not getattr(opts, "asyncOp", True)
        meets = waits and self._size > 1
        rank = run.here(self._rank, meets)
        if root >= self._size:
            raise RuntimeError(f"{op}: invalid root rank: {root}")
        part = (SimulatedPart if meets else SimulatedWork)(run, rank, (op, root, payload), moves, inputs, outputs)
        part.vetted, part.called = waits, len(rank.events)
        for name, value in more.items():
            setattr(part, name, value)
        tensors = outputs or inputs
        if tensors and tensors[0].is_cuda:
            part.stream = torch.cuda.current_stream()
        self._seq += 1
        run.progress += 1
        parts = self._channel.arrive(self._seq, self._place, part)
        if parts is not None:
            _settle(parts)
        return part

    def _require_share(self, output: Tensor, input: Tensor) -> None:
        if not output.dim() or input.shape != (output.shape[0] * self._size, *output.shape[1:]):
            raise RuntimeError(
                f"reduce_scatter: the input must be as long as {self._size} outputs (output {tuple(output.shape)}, "
                f"input {tuple(input.shape)})"
            )
        require_alike("reduce_scatter", [input], input, of=output)

    def _require_length(self, tensors: Sequence[Any], message: str) -> None:
        if len(tensors) != self._size:
            raise RuntimeError(message.format(self._size, len(tensors)))

    def _split(self, tensor: Tensor, splits: list[int], even: bool) -> list[int]:
        """Bytes of each member's share; torch counts splits in rows."""
        if even:
            return [tensor.nbytes // self._size] * self._size
        rows = tensor.shape[0]
        if not splits and rows % self._size:
            raise RuntimeError("Tensor's dim 0 does not divide equally across group size")
        splits = splits or [rows // self._size] * self._size
        if len(splits) != self._size:
            raise RuntimeError("Number of tensor splits not equal to group size")
        if sum(splits) != rows:
            raise RuntimeError("Split sizes doesn't match total dim 0 size")
        return [count * (tensor.nbytes // max(rows, 1)) for count in splits]
