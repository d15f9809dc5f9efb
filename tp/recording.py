"""RecordingGroup: a process group that writes every collective to the rank's ledger before it is issued."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from operator import is_not
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tpbed.tp.coalesced import method_of
from tpbed.tp.ledger import DROPPED, State
from tpbed.tp.rank import Call, RankContext
from tpbed.tp.recorder import Recorder

BACKEND = "tpbed"  # the name under which worlds register their groups with torch.distributed
Watch = Callable[[dist.Work, str, int], None]
Issued = Callable[[dist.Work | None], None]  # to be told that a message was issued, with its handle


class Entry:
    """The place in the ledger of a collective that was issued: what its handle comes to is written there."""

    __slots__ = ("_asked", "_done", "_group", "_recorder", "_seq", "waited")

    def __init__(self, recorder: Recorder, group: str, seq: int, waited: bool) -> None:
        self._recorder, self._group, self._seq = recorder, group, seq
        self.waited, self._done, self._asked = waited, False, False

    def ask(self) -> None:
        """The rank asks whether it has completed, and may do so for ever."""
        if not (self._asked or self._done or self.waited):
            self._asked = True
            self._recorder.ask(self._group, self._seq)

    def wait(self) -> None:
        """The rank blocks until it completes."""
        if not self.waited:
            self.waited = True
            self._recorder.wait(self._group, self._seq)

    def complete(self) -> None:
        """It has."""
        if not self._done:
            self._done = True
            self._recorder.state(self._group, self._seq, "completed")

    def fail(self, error: BaseException) -> None:
        """It has not, and the rank was told so."""
        if not self._done:
            self._done = True
            self._recorder.state(self._group, self._seq, "failed", f"{type(error).__name__}: {error}")


class RecordedWork(dist.Work):
    """A handle of a recorded collective: waiting on it, or asking whether it is done, is written to the ledger."""

    def __init__(self, inner: dist.Work, entry: Entry) -> None:
        super().__init__()
        self._inner, self._entry = inner, entry

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the collective completes, or raise what the transport raises."""
        self._entry.wait()
        try:
            answer = bool(self._inner.wait(timeout) if timeout else self._inner.wait())
        except BaseException as error:
            self._entry.fail(error)
            raise
        self._entry.complete()
        return answer

    def is_completed(self) -> bool:
        """True once the transport says so. That it was asked in vain is written before a rank may ask for ever."""
        self._entry.ask()
        done = bool(self._inner.is_completed())
        if done:
            self._entry.complete()
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


class RecordedMessage(dist.Work):
    """A handle of a recorded message, as RecordedWork is of a collective; unless waited on, it is never seen to end."""

    def __init__(self, inner: dist.Work, recorder: Recorder, group: str, seq: int, *, anysource: bool) -> None:
        super().__init__()
        self._inner, self._recorder, self._place = inner, recorder, (group, seq)
        self._anysource, self._done, self._failed = anysource, False, False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the peer has taken or sent the message, or raise what the transport raises."""
        if self._done:
            return True
        self._recorder.message_wait(*self._place)
        try:
            answer = bool(self._inner.wait(timeout) if timeout else self._inner.wait())
        except BaseException as error:
            self._failed = True
            self._recorder.message_state(*self._place, "failed", f"{type(error).__name__}: {error}")
            raise
        self._finish()
        return answer

    def __del__(self) -> None:
        """gloo takes a message back whose handle is dropped before its other end has come."""
        if not self._failed and getattr(self._inner, "done", True) is False:
            self._recorder.message_state(*self._place, "failed", DROPPED)

    def _finish(self) -> None:
        self._done = True
        if self._anysource:
            self._recorder.message_from(*self._place, self._source_rank())
        self._recorder.message_state(*self._place, "completed")

    def is_completed(self) -> bool:
        """As the transport's own handle; gloo's says so only once it was waited on."""
        return bool(self._inner.is_completed())

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
        """As the transport's own handle."""
        return self._inner.get_future()

    def source_rank(self) -> int:
        """Who sent it, as a rank within the group."""
        return int(self._inner._source_rank())

    _source_rank = source_rank  # the name that torch.distributed uses


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
    ranks: global ranks of the members, in group order. place: the rank's own among them, looked up where not given.
    asynchronous: `wait` does not block the host (NCCL); `watch` is then given each handle to find its completion, and
        `watch_message` hears of each message before it is issued.
    """

    def __init__(
        self,
        inner: Any,
        context: RankContext,
        *,
        label: str,
        ranks: tuple[int, ...],
        place: int | None = None,
        asynchronous: bool = False,
        watch: Watch | None = None,
        watch_message: Callable[[str, int], Issued] | None = None,
    ) -> None:
        own = ranks.index(context.rank) if place is None else place
        super().__init__(own, len(ranks))  # type: ignore[call-arg]
        self.inner, self._context, self.label = inner, context, label
        self._asynchronous, self._watch, self._watch_message = asynchronous, watch, watch_message
        self.batch: list[Issued] | None = None  # while messages are issued that have one handle for all
        context.recorder.group(label, ranks)

    registered_name = ""  # in torch's C++ registry, by which functional collectives find it

    @property
    def group_name(self) -> Any:
        """The same; a group of a Python class does not remember it by itself."""
        return self.registered_name

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

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        """dist.all_reduce_coalesced; all_reduce under a coalescing manager."""
        return self._issue(
            "allreduce_coalesced", "all_reduce_coalesced", None, tensors, next(iter(tensors), None), opts
        )

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """dist.all_gather_coalesced."""
        return self._issue(
            "allgather_coalesced", "all_gather_coalesced", outputs, inputs, next(iter(inputs), None), opts
        )

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """all_gather_into_tensor under a coalescing manager, up to torch 2.12."""
        method = "allgather_into_tensor_coalesced"
        return self._issue(method, "all_gather_coalesced", outputs, inputs, next(iter(inputs), None), opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """all_gather_single under a coalescing manager, from torch 2.13."""
        return self.allgather_into_tensor_coalesced(outputs, inputs, opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """reduce_scatter_tensor under a coalescing manager, up to torch 2.12."""
        method = "reduce_scatter_tensor_coalesced"
        return self._issue(method, "reduce_scatter_coalesced", outputs, inputs, next(iter(inputs), None), opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """reduce_scatter_single under a coalescing manager, from torch 2.13."""
        return self.reduce_scatter_tensor_coalesced(outputs, inputs, opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """dist.monitored_barrier; it waits where it is called."""
        recorder = self._context.recorder
        seq = recorder.start(self.label, "monitored_barrier", None)
        try:
            self.inner.monitored_barrier(timeout, wait_all_ranks)
        except BaseException as error:
            recorder.state(self.label, seq, "failed", f"{type(error).__name__}: {error}")
            raise
        recorder.state(self.label, seq, "completed")

    def send(self, tensors: Any, peer: int, tag: int) -> dist.Work:
        """dist.send and dist.isend."""
        return self._pass_on("send", tensors, peer, tag)

    def recv(self, tensors: Any, peer: int, tag: int) -> dist.Work:
        """dist.recv and dist.irecv."""
        return self._pass_on("recv", tensors, peer, tag)

    def recv_anysource(self, tensors: Any, tag: int) -> dist.Work:
        """dist.recv and dist.irecv without a source."""
        return self._pass_on("recv", tensors, None, tag)

    def _pass_on(self, op: str, tensors: Any, peer: int | None, tag: int) -> dist.Work:
        """A message; hooks, which count collectives, do not see it."""
        recorder = self._context.recorder
        seq = recorder.message(self.label, op, peer, 0 if self._asynchronous else tag, tensors[0])  # NCCL has no tags
        issued = None if self._watch_message is None else self._watch_message(self.label, seq)
        method = getattr(self.inner, "recv_anysource" if peer is None else op)
        try:
            work = method(tensors, tag) if peer is None else method(tensors, peer, tag)
        except BaseException as error:
            recorder.message_state(self.label, seq, "failed", f"{type(error).__name__}: {error}")
            raise
        if issued is None:
            return RecordedMessage(work, recorder, self.label, seq, anysource=peer is None)
        self.batch.append(issued) if self.batch is not None else issued(work)
        return work  # type: ignore[no-any-return]

    def _issue(self, method: str, op: str, outputs: Any, inputs: Any, payload: Tensor | None, *extra: Any) -> dist.Work:
        if not self._context.hooks:
            return self._record(method, op, outputs, inputs, payload, extra)
        return self._show_to_hooks(
            Call(
                method=method,
                op=op,
                group=self.label,
                seq=self._context.recorder.seqs[self.label] + 1,
                outputs=outputs,
                inputs=inputs,
                payload=payload,
                extra=extra,
            )
        )

    def _show_to_hooks(self, call: Call) -> dist.Work:
        for hook in self._context.hooks:
            changed = hook(call)
            if changed is None:
                return SwallowedWork()
            call = changed
        return self._record(call.method, call.op, call.outputs, call.inputs, call.payload, call.extra)

    def _record(
        self, method: str, op: str, outputs: Any, inputs: Any, payload: Tensor | None, extra: tuple[Any, ...]
    ) -> dist.Work:
        asynchronous, reduce_op, root = _given(extra[-1])
        waited = not (asynchronous or self._asynchronous)
        state: State = "scheduled" if self._asynchronous else "started"
        recorder = self._context.recorder
        seq = recorder.start(self.label, op, payload, reduce_op, root, waited, state)
        issue = getattr(self.inner, method, None) or method_of(self.inner, method)
        try:
            work = issue(*filter(_IS_GIVEN, (outputs, inputs, *extra)))
        except BaseException as error:
            recorder.state(self.label, seq, "failed", f"{type(error).__name__}: {error}")
            raise
        return self._handle(work, seq, waited)

    def _handle(self, work: dist.Work, seq: int, waited: bool) -> dist.Work:
        if self._watch is not None:
            self._watch(work, self.label, seq)
            return work
        return RecordedWork(work, Entry(self._context.recorder, self.label, seq, waited))


_IS_GIVEN = partial(is_not, None)


def _given(opts: Any) -> tuple[bool, str, int | None]:
    """What the options of a call say: whether it is asynchronous, the reduce op, the root.

    Asking options for what their class does not have is dear, so that is asked once.
    """
    kind: Any = type(opts)
    asynchronous, reduces, rooted = _fields(kind)
    return (
        asynchronous and opts.asyncOp,
        _NAMES_OF_REDUCE_OPS[hash(opts.reduceOp)] if reduces else "",
        opts.rootRank if rooted else None,
    )


@cache
def _fields(kind: type) -> tuple[bool, ...]:
    return tuple(hasattr(kind, name) for name in ("asyncOp", "reduceOp", "rootRank"))


_NAMES_OF_REDUCE_OPS = {hash(getattr(dist.ReduceOp, name)): name for name in dist.ReduceOp.RedOpType.__members__}
