"""Data movement: what each collective does to the tensors of its members, once the last has arrived.

It follows gloo (torch 2.13, measured), which real runs use, and is nowhere kinder:
- A tensor that is sent is read when the last member arrives, so writing to it before an asynchronous call has completed
  is the same race as in the field; outputs are written at that moment too.
- Where the members' dtypes differ, with equal bytes, each reads the others' bytes as its own dtype; where their reduce
  ops differ, each gets the result of its own.
- Reductions go in rank order, one rounding per addition. Minimum and maximum keep the earlier value unless the later
  one compares as better, so NaN wins or loses by its place. A rank that is not the root of a reduce is left with
  scratch in the last world_size-th of its tensor.
- all_reduce, reduce, broadcast and scatter take the memory of a tensor from its first element on, whatever its strides;
  reduce_scatter does so with what it gets from the peers; all_gather, gather and all_to_all go by index;
  all_to_all_single refuses what is not contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tpbed.tp.refusal import UnsupportedCollectiveError


class Part(Protocol):
    """What one member brings to a collective. Parts that move are in group order, and agree in their terms."""

    terms: tuple[str, int, Any]  # op, root, payload in bytes
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    fold: Fold | None  # how its rank wants the parts reduced
    whole: bool  # its one tensor stands for a list of equal parts
    splits: tuple[list[int], list[int]] | None  # bytes to each member, and from each


Move = Callable[[Sequence[Part]], None]


class Fold:
    """A reduce op: how a total takes up the next value.

    bits: of integers alone. mean: of floating-point values alone; the total is divided by how many there are.
    """

    def __init__(self, take: Callable[[Tensor, Tensor], Tensor], *, bits: bool = False, mean: bool = False) -> None:
        self.take, self.bits, self.mean = take, bits, mean


_FOLDS = {
    "SUM": Fold(Tensor.add_),
    "AVG": Fold(Tensor.add_, mean=True),
    "PRODUCT": Fold(Tensor.mul_),
    "MIN": Fold(lambda total, value: torch.where(value < total, value, total)),
    "MAX": Fold(lambda total, value: torch.where(total < value, value, total)),
    "BAND": Fold(Tensor.bitwise_and_, bits=True),
    "BOR": Fold(Tensor.bitwise_or_, bits=True),
    "BXOR": Fold(Tensor.bitwise_xor_, bits=True),
}
_FOLD_OF = {kind: _FOLDS.get(name) for name, kind in dist.ReduceOp.RedOpType.__members__.items()}


def fold_of(opts: Any, tensor: Tensor) -> Fold:
    """The op that the options of a call name, if the values of `tensor` can be reduced so."""
    kind = opts.reduceOp.op
    fold = _FOLD_OF[kind]
    if fold is None:
        raise UnsupportedCollectiveError(f"ReduceOp.{kind.name} is not simulated: use another one, or a real world.")
    if fold.bits and tensor.is_floating_point():
        raise RuntimeError(f"Cannot use ReduceOp.{kind.name} with non-integral dtype")
    if fold.mean and not tensor.is_floating_point():
        raise RuntimeError(f"result type Float can't be cast to the desired output type {tensor.dtype}")
    return fold


def _total(fold: Fold | None, dtype: torch.dtype, values: Sequence[Tensor]) -> Tensor:
    """The values folded in their order."""
    assert fold is not None
    total = _read_as(dtype, values[0]).clone()
    for value in values[1:]:
        total = fold.take(total, _read_as(dtype, value))
    if fold.mean:
        total.div_(len(values))
    return total


def _totals(parts: Sequence[Part], values: list[Tensor]) -> list[Tensor]:
    """What each part gets: all values folded by its own op, in its own dtype."""
    totals: dict[Any, Tensor] = {}
    for part, value in zip(parts, values, strict=True):
        if (part.fold, value.dtype) not in totals:
            totals[part.fold, value.dtype] = _total(part.fold, value.dtype, values)
    return [totals[part.fold, value.dtype] for part, value in zip(parts, values, strict=True)]


def all_reduce(parts: Sequence[Part]) -> None:
    """Every part's input becomes the total."""
    tensors = [_memory(part.inputs[0]) if len(part.inputs) == 1 else _row(part.inputs) for part in parts]
    torch._foreach_copy_(tensors, _totals(parts, tensors))
    for part, row in zip(parts, tensors, strict=True):
        if len(part.inputs) > 1:
            _share_out(row, part.inputs)


def _row(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _share_out(row: Tensor, tensors: Sequence[Tensor]) -> None:
    for tensor, values in zip(tensors, row.split_with_sizes([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(values.view(tensor.shape))


def reduce(parts: Sequence[Part]) -> None:
    """The root's input becomes the total, and the end of the others' is scratch."""
    root = parts[0].terms[1]
    tensors = [_memory(part.inputs[0]) for part in parts]
    for place, (tensor, total) in enumerate(zip(tensors, _totals(parts, tensors), strict=True)):
        kept = 0 if place == root else tensor.numel() - tensor.numel() // len(parts)
        tensor[kept:].copy_(total[kept:])


def reduce_scatter(parts: Sequence[Part]) -> None:
    """Every part's output becomes its share of the total."""
    if not all(part.whole for part in parts):
        _reduce_scatter_lists(parts)
        return
    dense = [_dense(part.inputs[0]) for part in parts]
    totals = _totals(parts, [_memory(tensor) for tensor in dense])
    for place, (part, tensor, total) in enumerate(zip(parts, dense, totals, strict=True)):
        rows = part.outputs[0].shape[0]
        part.outputs[0].copy_(total.as_strided(tensor.shape, tensor.stride(), 0).narrow(0, place * rows, rows))


def _reduce_scatter_lists(parts: Sequence[Part]) -> None:
    shares = [part.inputs[0].chunk(len(parts)) if part.whole else part.inputs for part in parts]
    totals = []
    for place, part in enumerate(parts):
        values = [_memory(_dense(given[place])) for given in shares]
        values[place] = _own_share(part.outputs[0], shares[place][place])
        totals.append(_total(part.fold, part.outputs[0].dtype, values))
    for part, total in zip(parts, totals, strict=True):
        _memory(part.outputs[0]).copy_(total)


def _own_share(output: Tensor, share: Tensor) -> Tensor:
    """A rank's own share goes by index to its output, and from there by memory, as the peers' shares do."""
    if output.is_contiguous():
        return share.reshape(-1)
    output.copy_(share)
    return _memory(output)


def all_gather(parts: Sequence[Part]) -> None:
    """Every part's input to all outputs; of a gather, only the root has outputs."""
    sent = [part.inputs[0] for part in parts]
    if [tensor.shape for tensor in sent[1:]] != [sent[0].shape] * (len(sent) - 1) or len({t.dtype for t in sent}) > 1:
        _all_gather_bytes(parts, sent)
        return
    lists = [part.outputs for part in parts if part.outputs and not part.whole]
    if lists:
        torch._foreach_copy_(list(chain.from_iterable(lists)), sent * len(lists))
    if len(lists) < len(parts):
        _all_gather_rows(parts, sent)


def _all_gather_rows(parts: Sequence[Part], sent: list[Tensor]) -> None:
    row = torch.cat(sent) if any(part.whole for part in parts) else None
    for part in parts:
        if part.whole and row is not None:
            part.outputs[0].copy_(row)


def _all_gather_bytes(parts: Sequence[Part], sent: list[Tensor]) -> None:
    flat = [tensor.reshape(-1) for tensor in sent]
    for part in parts:
        outputs = part.outputs[0].chunk(len(parts)) if part.whole else part.outputs
        for output, values in zip(outputs, flat, strict=False):
            _deliver(output, values)


@dataclass
class _Piece:
    """What one member brings to one of several collectives that go as one."""

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    fold: Fold | None
    whole: bool
    terms: tuple[str, int, Any] = ("", -1, None)
    splits: tuple[list[int], list[int]] | None = None


def all_gather_coalesced(parts: Sequence[Part]) -> None:
    """One all_gather after the other; the outputs of each are as many as there are members."""
    size = len(parts)
    for number in range(len(parts[0].inputs)):
        ours = slice(number * size, (number + 1) * size)
        all_gather([_Piece([part.inputs[number]], part.outputs[ours], None, False) for part in parts])


def reduce_scatter_coalesced(parts: Sequence[Part]) -> None:
    """One reduce_scatter after the other."""
    for number in range(len(parts[0].inputs)):
        reduce_scatter([_Piece([part.inputs[number]], [part.outputs[number]], part.fold, True) for part in parts])


def broadcast(parts: Sequence[Part]) -> None:
    """The root's input to all others."""
    root = parts[parts[0].terms[1]]
    for part in parts:
        if part is not root:
            _deliver(_memory(part.inputs[0]), _memory(root.inputs[0]))


def scatter(parts: Sequence[Part]) -> None:
    """The root's inputs to the outputs, one each."""
    root = parts[parts[0].terms[1]]
    for part, values in zip(parts, root.inputs, strict=True):
        _deliver(_memory(part.outputs[0]), _memory(values))


def all_to_all(parts: Sequence[Part]) -> None:
    """Through copies: an output may be an input of the same rank."""
    sent = []
    for part in parts:
        flat = [_memory(tensor) if part.whole else tensor.reshape(-1) for tensor in part.inputs]
        sent.append(_shares(torch.cat(flat), part, 0))
    for place, part in enumerate(parts):
        outputs = _shares(_memory(part.outputs[0]), part, 1) if part.whole else part.outputs
        for shares, output in zip(sent, outputs, strict=True):
            _deliver(output, shares[place])


def _shares(flat: Tensor, part: Part, direction: int) -> list[Tensor]:
    """Each member's bytes; what is left over where nothing says how to split belongs to nobody."""
    assert part.splits is not None
    sizes = part.splits[direction]
    shares: Sequence[Tensor] = flat.view(torch.uint8).split_with_sizes([*sizes, flat.nbytes - sum(sizes)])
    return list(shares[: len(sizes)])


def _memory(tensor: Tensor) -> Tensor:
    """As many elements in a row as it has, from its first one on, whatever its strides; autograd does not see it."""
    data = tensor.data
    return data.view(-1) if data.is_contiguous() else data.as_strided((data.numel(),), (1,))


def _dense(tensor: Tensor) -> Tensor:
    """Without gaps; the order of its memory stays."""
    return tensor if tensor.is_contiguous() else tensor.clone()


def _read_as(dtype: torch.dtype, flat: Tensor) -> Tensor:
    if flat.dtype is dtype:
        return flat
    aligned = flat.storage_offset() * flat.element_size() % dtype.itemsize == 0
    return (flat if aligned else flat.clone()).view(dtype)


def _deliver(output: Tensor, flat: Tensor) -> None:
    """The bytes of `flat` to `output`, by its index."""
    output.copy_(_read_as(output.dtype, flat).view(output.shape))
