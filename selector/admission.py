"""Who may be projected, and how: a head is multiplied as dense, or handed to its own quant method, or refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tpbed.selector.errors import SelectionError
from tpbed.selector.head import DENSE_DTYPES

Path = Literal["quantized", "dense"]
_SIZES = ("input_size_per_partition", "output_size_per_partition")


class AdmissionError(SelectionError):
    """A head that is neither dense nor servable by its quant method."""


@dataclass(frozen=True, slots=True)
class Ruling:
    """An answer with its reason; true if the answer is yes."""

    admitted: bool
    because: str

    def __bool__(self) -> bool:
        return self.admitted


@dataclass(frozen=True, slots=True)
class Form:
    """A parameter layout that a method's kernel can read: the weight's dtype and what must stand beside it."""

    weight_dtype: torch.dtype
    attributes: tuple[str, ...]


_MARLIN_FP4 = Form(torch.int32, ("weight_scale", "weight_global_scale", "workspace", *_SIZES))
_NATIVE_FP4 = Form(torch.uint8, ("weight_scale_interleaved", "alpha", "input_scale_inv", *_SIZES))
_FP8 = Form(torch.float8_e4m3fn, ("weight_scale", "input_scale"))

UNQUANTIZED_METHODS = frozenset({"UnquantizedEmbeddingMethod", "UnquantizedLinearMethod", "PackWeightMethod"})
FORMS_OF_METHOD: Mapping[str, tuple[Form, ...]] = {
    "ModelOptFp4LinearMethod": (_MARLIN_FP4, _NATIVE_FP4),
    "ModelOptNvFp4A16LinearMethod": (_MARLIN_FP4,),
    "ModelOptFp8LinearMethod": (_FP8,),
}


def admit(head: object) -> tuple[Path, str]:
    """The path that head takes and the reason; its quant method goes first, even before a dense weight.

    Looks at class name, dtypes and attributes only: ranks that have loaded alike all admit or all refuse.
    Raises AdmissionError, naming what speaks against either path.
    Source: should_apply_lm_head_quant_method of SGLang (pull request 35496).
    """
    by_method = admits_quant_method(head)
    if by_method:
        return "quantized", by_method.because
    as_dense = is_dense_head(head)
    if as_dense:
        return "dense", as_dense.because
    raise AdmissionError(
        f"{type(head).__name__} can be projected neither by its quant_method ({by_method.because}) nor as a dense "
        f"matrix ({as_dense.because}): load the parameters that its method reads, or give it a float16, bfloat16 "
        f"or float32 weight."
    )


def is_dense_head(head: object) -> Ruling:
    """Whether head's weight can be multiplied as it is: float16, bfloat16 or float32, by name of the dtype."""
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor):
        return Ruling(False, "head has no weight")
    return Ruling(weight.dtype in DENSE_DTYPES, f"weight is {weight.dtype}")


def admits_quant_method(head: object) -> Ruling:
    """Whether head's own quant method can be trusted with the projection.

    A method may be stale: an engine that shares an unquantized tensor can leave a ModelOpt method on the head. Methods
    listed in FORMS_OF_METHOD must find one of their layouts; methods that are not known are believed.
    """
    name = type(getattr(head, "quant_method", None)).__name__
    refusal = _refusal(head, name)
    if refusal is not None:
        return Ruling(False, refusal)
    forms = FORMS_OF_METHOD.get(name, ())
    if forms and not any(_has_form(head, form) for form in forms):
        return Ruling(False, f"{name} finds no layout that it can read: {_missing(head, forms)}")
    return Ruling(True, f"{name} serves it")


def _refusal(head: object, method_name: str) -> str | None:
    method = getattr(head, "quant_method", None)
    apply: Callable[..., Tensor] | None = getattr(method, "apply", None)
    if method is None:
        return "head has no quant_method"
    if not isinstance(getattr(head, "weight", None), Tensor):
        return "head has no weight"
    if not callable(apply):
        return f"{method_name} has no apply"
    return f"{method_name} leaves the weight unquantized" if method_name in UNQUANTIZED_METHODS else None


def _has_form(head: object, form: Form) -> bool:
    return _weight_dtype(head) is form.weight_dtype and not _absent(head, form)


def _missing(head: object, forms: tuple[Form, ...]) -> str:
    wants = (f"{form.weight_dtype} needs {', '.join(_absent(head, form)) or 'nothing more'}" for form in forms)
    return f"weight is {_weight_dtype(head)}; {'; '.join(wants)}"


def _absent(head: object, form: Form) -> list[str]:
    return [name for name in form.attributes if getattr(head, name, None) is None]


def _weight_dtype(head: object) -> torch.dtype | None:
    return getattr(getattr(head, "weight", None), "dtype", None)
