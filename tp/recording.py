"""RecordingGroup: a process group that writes every collective to the rank's ledger before it is issued."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tpbed.tp.rank import Call, RankContext
from tpbed.tp.recorder import Recorder

BACKEND = "tpbed"  # the name under which worlds register their groups with torch.distributed
Watch = Callable[[dist.Work, str, int], None]


class RecordedWork(dist.Work):
    """A handle of a recorded collective: waiting on it, or asking whether it is done, is written to the ledger."""

    def __init__(self, inner: dist.Work, recorder: Recorder, group: str, seq: int, *, waited: bool) -> None:
        super().__init__()
        self._inner, self._recorder, self._place = inner, recorder, (group, seq)
        self._waited, self._done = waited, False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the collective completes, or raise what the transport raises."""
        if not self._waited:
            self._waited = True
            self._recorder.wait(*self._place)
        try:
            answer = bool(self._inner.wait(timeout) if timeout else self._inner.wait())
        except BaseException as error:
            self._finish("failed", f"{type(error).__name__}: {error}")
            raise
        self._finish("completed")
        return answer

    def is_completed(self) -> bool:
        """True once the transport says so."""
        done = bool(self._inner.is_completed())
        if done:
            self._finish("completed")
        return done

    def is_success(self) -> bool:
        """As the transport's own handle."""
        return bool(self._inner.is_success())

    def exception(self) -> Any:
        """As the transport's own handle."""
        return self._inner.exception()

    def result(self) -> Any:
        """As the transport's own handle."""
        return self._inner.result()

    def synchronize(self) -> None:
        """As the transport's own handle."""
        self._inner.synchronize()

    def get_future(self) -> Any:
        """As the transport's own handle; its completion is written to the ledger."""
        return self._inner.get_future()

    def _finish(self, state: Any, error: str = "") -> None:
        if not self._done:
            self._done = True
            self._recorder.state(*self._place, state, error)


class SwallowedWork(dist.Work):
    """The handle of a collective that a hook swallowed: done at once."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True


class RecordingGroup(dist.ProcessGroup):
    """Wraps `inner` (a gloo or NCCL backend, or a simulated group) for one rank.

    Takes the calls that torch.distributed makes, which are one form each of the overloads of its base class.
    label: the group's name in the ledger, the same on all its members.
    ranks: global ranks of the members, in group order.
    asynchronous: `wait` does not block the host (NCCL); `watch` is then given each handle to find its completion.
    """

    def __init__(
        self,
        inner: Any,
        context: RankContext,
        *,
        label: str,
        ranks: tuple[int, ...],
        asynchronous: bool = False,
        watch: Watch | None = None,
    ) -> None:
        super().__init__(ranks.index(context.rank), len(ranks))  # type: ignore[call-arg]
        self.inner, self._context, self.label = inner, context, label
        self._asynchronous, self._watch = asynchronous, watch
        context.recorder.group(label, ranks)

    def getBackendName(self) -> str:
        """The name that torch.distributed.get_backend reports."""
        return BACKEND

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """dist.all_gather."""
        return self._issue("allgather", "all_gather", outputs, inputs, inputs[0], opts)

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """dist.all_gather_into_tensor, up to torch 2.12."""
        return self._issue("_allgather_base", "all_gather", output, input, input, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """dist.all_gather_single, from torch 2.13."""
        return self._issue("_allgather_base", "all_gather", output, input, input, opts)

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        """dist.all_reduce."""
        return self._issue("allreduce", "all_reduce", None, tensors, tensors[0], opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        """dist.broadcast."""
        return self._issue("broadcast", "broadcast", None, tensors, tensors[0], opts)

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        """dist.reduce."""
        return self._issue("reduce", "reduce", None, tensors, tensors[0], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        """dist.reduce_scatter."""
        return self._issue("reduce_scatter", "reduce_scatter", outputs, inputs, inputs[0][0], opts)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """dist.reduce_scatter_tensor, up to torch 2.12."""
        return self._issue("_reduce_scatter_base", "reduce_scatter", output, input, input, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """dist.reduce_scatter_single, from torch 2.13."""
        return self._issue("_reduce_scatter_base", "reduce_scatter", output, input, input, opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """dist.all_to_all."""
        return self._issue("alltoall", "all_to_all", outputs, inputs, inputs[0], opts)

    def alltoall_base(self, output: Tensor, input: Tensor, outs: Any, ins: Any, opts: Any = None) -> dist.Work:
        """dist.all_to_all_single."""
        return self._issue("alltoall_base", "all_to_all", output, input, input, outs, ins, opts)

    def all_to_all_single(self, output: Tensor, input: Tensor, *rest: Any) -> dist.Work:
        """dist.all_to_all_single, from torch 2.13."""
        return self.alltoall_base(output, input, *rest)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        """dist.gather."""
        return self._issue("gather", "gather", outputs, inputs, inputs[0], opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:  # type: ignore[override]
        """dist.scatter."""
        return self._issue("scatter", "scatter", outputs, inputs, outputs[0], opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        """dist.barrier."""
        return self._issue("barrier", "barrier", None, None, None, opts)

    def _issue(self, method: str, op: str, outputs: Any, inputs: Any, payload: Tensor | None, *extra: Any) -> dist.Work:
        seq = self._context.recorder.seqs[self.label] + 1
        call = Call(
            method=method,
            op=op,
            group=self.label,
            seq=seq,
            outputs=outputs,
            inputs=inputs,
            payload=payload,
            extra=extra,
        )
        for hook in self._context.hooks:
            changed = hook(call)
            if changed is None:
                return SwallowedWork()
            call = changed
        return self._record(call)

    def _record(self, call: Call) -> dist.Work:
        opts, recorder = call.extra[-1], self._context.recorder
        waited = not getattr(opts, "asyncOp", False) and not self._asynchronous
        seq = recorder.start(
            self.label,
            call.op,
            call.payload,
            reduce_op=_reduce_op(opts),
            root=getattr(opts, "rootRank", None),
            waited=waited,
            state="scheduled" if self._asynchronous else "started",
        )
        try:
            work = getattr(self.inner, call.method)(*_arguments(call))
        except BaseException as error:
            recorder.state(self.label, seq, "failed", f"{type(error).__name__}: {error}")
            raise
        return self._handle(work, seq, waited)

    def _handle(self, work: dist.Work, seq: int, waited: bool) -> dist.Work:
        if self._watch is not None:
            self._watch(work, self.label, seq)
            return work
        return RecordedWork(work, self._context.recorder, self.label, seq, waited=waited)


def _arguments(call: Call) -> list[Any]:
    tensors = [t for t in (call.outputs, call.inputs) if t is not None]
    return [*tensors, *(argument for argument in call.extra if argument is not None)]


def _reduce_op(opts: Any) -> str:
    reduce_op = getattr(opts, "reduceOp", None)
    return "" if reduce_op is None else _NAMES_OF_REDUCE_OPS[hash(reduce_op)]


_NAMES_OF_REDUCE_OPS = {hash(getattr(dist.ReduceOp, name)): name for name in dist.ReduceOp.RedOpType.__members__}
