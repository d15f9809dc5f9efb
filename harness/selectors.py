"""find_selector: a name in, the selector out - one of ours, or anybody's as `package.module:function`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable

from tpbed.harness.foreign import Chosen, ForeignSelector
from tpbed.harness.misreadings import MISREADINGS
from tpbed.harness.mutants import SELECTORS
from tpbed.harness.serving import SERVING
from tpbed.harness.staged import Staged
from tpbed.harness.timed import TIMED
from tpbed.harness.turn import Serving
from tpbed.selector.candidates import Candidates
from tpbed.tp.errors import TestbedError

Selector = Callable[..., Candidates | Chosen]


class SelectorError(TestbedError):
    """A name that no selector has."""


def find_selector(name: str) -> Selector | type[Staged] | Serving:
    """The selector of that name in mutants.SELECTORS or timed.TIMED, or the function that it imports.

    Or the program of that name in serving.SERVING or misreadings.MISREADINGS, of which each run makes a selector.
    A selector is called as compute_candidates is, with topk and note. Both can be pickled for the ranks of any world.
    Raises SelectorError for a name that there is not, FunctionError or ForeignError for a function that cannot serve.
    """
    if ":" in name:
        return ForeignSelector.named(name)
    if served := (SERVING | MISREADINGS).get(name):
        return Serving(served)
    found = (SELECTORS | TIMED).get(name)
    if found is None:
        ours = [*(SELECTORS | TIMED | SERVING | MISREADINGS)]
        near = difflib.get_close_matches(name, ours, n=3)
        told = f" (near: {', '.join(near)})" if near else ""
        raise SelectorError(
            f"there is no selector {name!r}{told}: give package.module:function, or one of {', '.join(ours)}."
        )
    return found


def made(selector: Selector | type[Staged]) -> Selector:
    """A selector for one rank and run, which may keep what a step left behind."""
    return selector() if isinstance(selector, type) else selector


def check_selectors(names: Iterable[str]) -> None:
    """Raise what find_selector raises, before anything is run."""
    for name in dict.fromkeys(names):
        find_selector(name)
