"""find_selector: a name in, the selector out - one of ours, or anybody's as `package.module:function`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from tpbed.harness.foreign import Chosen, ForeignSelector
from tpbed.harness.mutants import SELECTORS
from tpbed.harness.timed import TIMED
from tpbed.selector.candidates import Candidates
from tpbed.tp.errors import TestbedError

Selector = Callable[..., Candidates | Chosen]


class SelectorError(TestbedError):
    """A name that no selector has."""


def find_selector(name: str) -> Selector:
    """The selector of that name in harness.mutants.SELECTORS or harness.timed.TIMED, or the function that it imports.

    Returns what is called as compute_candidates is, with topk and note; it can be pickled for the ranks of any world.
    Raises SelectorError for a name that there is not, FunctionError or ForeignError for a function that cannot serve.
    """
    if ":" in name:
        return ForeignSelector.named(name)
    found = SELECTORS.get(name) or TIMED.get(name)
    if found is None:
        near = difflib.get_close_matches(name, [*SELECTORS, *TIMED], n=3)
        told = f" (near: {', '.join(near)})" if near else ""
        raise SelectorError(
            f"there is no selector {name!r}{told}: give package.module:function, or one of "
            f"{', '.join([*SELECTORS, *TIMED])}."
        )
    return found


def check_selectors(names: Iterable[str]) -> None:
    """Raise what find_selector raises, before anything is run."""
    for name in dict.fromkeys(names):
        find_selector(name)
