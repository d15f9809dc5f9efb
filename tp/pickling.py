"""Pickling: rank programs and their results, by cloudpickle, with what that leaves out or cannot do."""

from __future__ import annotations

import functools
import io
import marshal
import sys
import sysconfig
from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from types import CodeType, ModuleType
from typing import Any, ClassVar

import cloudpickle
import torch

from tpbed.tp.errors import TestbedError
from tpbed.tp.world import RankProgram


class ProgramError(TestbedError):
    """A rank program cannot be sent to its ranks."""


class ResultError(TestbedError):
    """A rank program returned something that cannot be sent to its world."""


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    return marshal.loads, (marshal.dumps(code),)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Code keeps its file, so that tracebacks and call sites name it; CUDA tensors travel as CPU tensors."""

    dispatch_table: ClassVar[ChainMap[type, Any]] = ChainMap(
        {CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table
    )

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            return value.detach().cpu().__reduce_ex__(self.proto)  # type: ignore[no-untyped-call]
        return super().reducer_override(value)


def pickle_program(program: RankProgram) -> bytes:
    """The program; by value where it is defined in a script or a test, which the ranks may not be able to import.

    Raises ProgramError.
    """
    try:
        with _by_value(_loose_module(program)):
            return _dumps(program)
    except Exception as error:
        raise ProgramError(
            f"the rank program {program!r} cannot be pickled ({type(error).__name__}: {error}): "
            "keep open files, locks and running things out of its closure."
        ) from error


@contextmanager
def _by_value(module: ModuleType | None) -> Iterator[None]:
    """Pickle what this module defines by value; cloudpickle keeps one register for all threads."""
    with _REGISTER:
        if module is None or module.__name__ in cloudpickle.list_registry_pickle_by_value():
            yield
            return
        cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            cloudpickle.unregister_pickle_by_value(module)


_REGISTER = RLock()


def pickle_result(result: Any) -> bytes:
    """What a rank program returned.

    Raises ResultError.
    """
    try:
        return _dumps(result)
    except Exception as error:
        raise ResultError(
            f"the program returned a {type(result).__name__} that cannot be pickled ({type(error).__name__}: {error}): "
            "return tensors and plain values."
        ) from error


def _dumps(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _loose_module(program: Any) -> ModuleType | None:
    """The module of a program that is no part of a package and not installed; __main__ goes by value anyway."""
    while isinstance(program, functools.partial):
        program = program.func
    module = sys.modules.get(getattr(program, "__module__", None) or type(program).__module__)
    if module is None or module.__name__ == "__main__" or _is_packaged(module) or _is_installed(module):
        return None
    return module


def _is_packaged(module: ModuleType) -> bool:
    package = sys.modules.get(module.__package__ or "")
    return getattr(package, "__file__", None) is not None


def _is_installed(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is None or "site-packages" in file or file.startswith(sysconfig.get_path("stdlib"))
