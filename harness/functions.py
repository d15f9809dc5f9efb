"""find_function: `package.module:function` in, the function out; from the working folder or what is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

from tpbed.tp.errors import TestbedError


class FunctionError(TestbedError):
    """A name behind which there is no function, or none that can be called as it will be."""


def find_function(target: str, *, is_no: str) -> Callable[..., Any]:
    """Import the module and take the function from it; `module:Class.method` is found too.

    is_no: how an error says what was looked for, as in "is no function of a rank".
    Raises FunctionError, with the error of an import.
    """
    module, _, name = target.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        function: Callable[..., Any] = attrgetter(name)(import_module(module))
    except (Exception, SystemExit) as error:  # a module may raise anything while it is imported
        raise FunctionError(
            f"{target} {is_no} ({type(error).__name__}: {error}): give package.module:function, from the "
            "working folder or what is installed."
        ) from error
    if not callable(function):
        raise FunctionError(f"{target} {is_no}: it is a {type(function).__name__}: give package.module:function.")
    return function
