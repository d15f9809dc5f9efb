"""ForeignSelector: anybody's selector, called as its own engine would call it, and its answer in our terms.

It is given what the names of its parameters ask for:

    hidden, hidden_states   (rows, hidden units), the same on every rank
    lm_head, head           this rank's head, an EngineHead: weight, quant_method, shard_indices, org_vocab_size, ...
    k                       tokens per row
    group                   the process group that shares the vocabulary, for torch.distributed
    all_gather              all_gather(tensor, dim=-1) over that group: the parts of all ranks side by side, as engines
    topk                    topk(logits, k) -> values, columns: a kernel with flashinfer's demands, on any device
    note                    note(name, value, because): write down a choice that ranks must make alike

and returns, best first, the ids (rows, k) of an integer dtype: alone, or in a pair with their values (rows, k) of a
floating dtype, or in an object with `ids` and `values`. Values that are not returned are not judged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor

from tpbed.harness.engine_head import EngineHead
from tpbed.harness.functions import find_function
from tpbed.tp.errors import TestbedError
from tpbed.tp.pickling import pickle_program

GIVEN = ("hidden", "hidden_states", "lm_head", "head", "k", "group", "all_gather", "topk", "note")
RETURNS = (
    "return ids (rows, k) of an integer dtype, best first: alone, or in a pair with their values (rows, k) of a "
    "floating dtype, or in an object with ids and values"
)


class ForeignError(TestbedError):
    """A selector that asks for what there is not, or returns what is no answer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chosen:
    """The answer of a selector. ids: (rows, k) int64. values: (rows, k) float32, or None where it gave none."""

    ids: Tensor
    values: Tensor | None


@dataclass(frozen=True, slots=True)
class ForeignSelector:
    """A selector by name, and the function behind it, which travels to ranks that may not be able to import it."""

    name: str
    function: Callable[..., Any]
    asks: tuple[str, ...]  # of GIVEN

    @classmethod
    def named(cls, name: str) -> ForeignSelector:
        """The function that `package.module:function` names.

        Raises FunctionError where there is none, ForeignError for a parameter that nobody can give it.
        """
        return cls.of(name, find_function(name, is_no="is no selector"))

    @classmethod
    def of(cls, name: str, function: Callable[..., Any]) -> ForeignSelector:
        """A function as a selector that reports call by this name."""
        return cls(name, function, _asked(name, function))

    def __call__(self, hidden: Tensor, head: Any, *, k: int, group: Any, topk: Any, note: Any) -> Chosen:
        """Call it with what it asks for.

        Raises ForeignError for an answer that is none, and what the function raises.
        """
        engine_head = EngineHead(head, disturb=getattr(topk, "disturb", None))
        given = {
            **dict.fromkeys(("hidden", "hidden_states"), hidden),
            **dict.fromkeys(("lm_head", "head"), engine_head),
            "k": k,
            "group": group,
            "all_gather": partial(all_gather, group),
            "topk": topk,
            "note": note,
        }
        return _answer(self.name, self.function(**{name: given[name] for name in self.asks}))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.name, pickle_program(self.function), self.asks)


def _unpickled(name: str, function: bytes, asks: tuple[str, ...]) -> ForeignSelector:
    return ForeignSelector(name, cloudpickle.loads(function), asks)


def _asked(name: str, function: Callable[..., Any]) -> tuple[str, ...]:
    """The parameters that it shall be given; those with a default of their own keep it unless they are known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ForeignError(f"{name} shows no parameters ({error}): wrap it in a plain function.") from None
    named = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    for one in named:
        if one.kind is one.POSITIONAL_ONLY or (one.name not in GIVEN and one.default is one.empty):
            raise ForeignError(
                f"{name} asks for {one.name!r}, which a selector is not given by name: it can ask for "
                f"{', '.join(GIVEN)}; wrap it in a function that does."
            )
    return tuple(one.name for one in named if one.name in GIVEN)


def all_gather(group: Any, tensor: Tensor, dim: int = -1) -> Tensor:
    """The tensors of all ranks, side by side along `dim`, rank 0 first, as tensor_model_parallel_all_gather of engines.

    The tensor is handed to torch.distributed as it is, strides and all.
    """
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    if len(parts) == 1:
        return tensor
    dist.all_gather(parts, tensor, group=group)
    return torch.cat(parts, dim=dim)


def _answer(name: str, returned: Any) -> Chosen:
    ids, values = _ids_and_values(name, returned)
    if ids.ndim != 2 or (values is not None and values.shape != ids.shape):
        shapes = f"ids {tuple(ids.shape)}" + ("" if values is None else f" and values {tuple(values.shape)}")
        raise ForeignError(f"{name} returned {shapes}: {RETURNS}.")
    return Chosen(ids=ids.long(), values=None if values is None else values.float())


def _ids_and_values(name: str, returned: Any) -> tuple[Tensor, Tensor | None]:
    parts = [returned.ids, getattr(returned, "values", None)] if hasattr(returned, "ids") else returned
    tensors = [one for one in (parts if isinstance(parts, tuple | list) else [parts]) if one is not None]
    kinds = [_kind(one) for one in tensors]
    if kinds == ["ids"]:
        return tensors[0], None
    if sorted(kinds) == ["ids", "values"]:
        return tensors[kinds.index("ids")], tensors[kinds.index("values")]
    told = ", ".join(_told(one) for one in tensors) or "nothing"
    raise ForeignError(f"{name} returned {told}: {RETURNS}.")


def _kind(value: Any) -> str:
    """Whether this holds ids or values, which its dtype says; or neither."""
    if not isinstance(value, Tensor) or value.is_complex() or value.dtype == torch.bool:
        return "neither"
    return "values" if value.is_floating_point() else "ids"


def _told(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
