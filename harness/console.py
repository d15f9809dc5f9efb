"""How subcommands print what they measured, and what they say meanwhile."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # rich is imported by the commands that need it
    from rich.table import Table

Progress = Callable[[str], None]
WIDTH = 120  # columns of a table, where no terminal says otherwise


def print_json(values: Sequence[dict[str, Any]]) -> None:
    """One value a line."""
    for value in values:
        print(json.dumps(value, allow_nan=False), flush=True)


def print_table(table: Table, width: int = WIDTH) -> None:
    """As wide as the terminal; width, in columns, where there is none."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else width).print(table)


@contextmanager
def telling() -> Iterator[Progress]:
    """Says on stderr what is being done: on a terminal as one live line, else a line each."""
    if not sys.stderr.isatty():
        yield lambda message: print(f"{message} ...", file=sys.stderr, flush=True)
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield status.update


def use_one_thread() -> None:
    """What torch does from here on takes one core, so that the figures of two runs can be compared."""
    import torch

    torch.set_num_threads(1)
