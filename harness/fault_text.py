"""read_fault: `raise@rank=2,seq=3` in, the fault out; the notation of `--fault` and of reports, for every fault.

KIND@FIELD=VALUE,...: kinds and fields are those of the dataclasses in tpbed.harness.faults. A value is JSON; a text
needs no quotes unless it has a comma. `ms=50` stands for `seconds=0.05`. `tpbed.harness.faults.describe` writes it.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from tpbed.harness.faults import Fault
from tpbed.tp.errors import TestbedError

_VALUE = r'"(?:[^"\\]|\\.)*"|\[[^\]]*\]|[^,]*'
_PAIR = re.compile(rf"\s*(\w+)\s*=\s*({_VALUE})\s*(?:,|$)")
_WORDS = {"none": "null", "nan": "NaN", "inf": "Infinity", "-inf": "-Infinity", "true": "true", "false": "false"}


class FaultTextError(TestbedError):
    """A text that says no fault."""


def read_fault(text: str) -> Fault:
    """The fault that a text says.

    Raises FaultTextError, naming the faults or fields that there are, those like what was given first.
    """
    kind, _, rest = text.strip().partition("@")
    if kind not in _kinds():
        raise FaultTextError(
            f"{text!r} says no fault{_near(kind, _kinds())}: write KIND@FIELD=VALUE,... such as raise@rank=2,seq=3, "
            f"with one of {', '.join(_kinds())}."
        )
    given = dict(_pairs(text, kind, rest))
    values = {name: _read(text, kind, name, value) for name, value in given.items()}
    missing = [name for name, needed in _fields(kind).items() if needed and name not in values]
    if missing:
        raise FaultTextError(f"{text!r} does not say {' and '.join(missing)}: {_takes(kind)}")
    fault: Fault = _kinds()[kind](**values)
    return fault


@cache
def _kinds() -> dict[str, Any]:
    """Every fault there is, by its kind."""
    return {str(field.default): one for one in get_args(Fault) for field in fields(one) if field.name == "kind"}


def _fields(kind: str) -> dict[str, bool]:
    """The fields of a fault, and whether each must be given."""
    return {field.name: field.default is MISSING for field in fields(_kinds()[kind]) if field.name != "kind"}


def _pairs(text: str, kind: str, rest: str) -> Iterator[tuple[str, str]]:
    place, seen = 0, set[str]()
    while place < len(rest):
        pair = _PAIR.match(rest, place)
        if pair is None:
            raise FaultTextError(f"{text!r}: {rest[place:]!r} is no FIELD=VALUE: {_takes(kind)}")
        name, value = _in_seconds(text, kind, pair[1], pair[2].strip())
        if name in seen:
            raise FaultTextError(f"{text!r} gives {name} twice: give it once.")
        seen.add(name)
        yield name, value
        place = pair.end()


def _in_seconds(text: str, kind: str, name: str, value: str) -> tuple[str, str]:
    """`ms` of a fault that takes seconds, as seconds; anything else as it is."""
    if name != "ms" or "seconds" not in _fields(kind):
        return name, value
    try:
        return "seconds", repr(float(value) / 1000)
    except ValueError:
        raise FaultTextError(f"{text!r}: ms={value} is no number of milliseconds: write ms=50.") from None


def _takes(kind: str) -> str:
    told = [name if needed else f"[{name}]" for name, needed in _fields(kind).items()]
    return f"{kind} takes {', '.join(told)}."


def _read(text: str, kind: str, name: str, value: str) -> Any:
    """The value as JSON, or else as a text, whichever the field can hold; no number is rounded, no 1 is a true."""
    if name not in _fields(kind):
        raise FaultTextError(f"{text!r}: {kind} has no {name}{_near(name, _fields(kind))}: {_takes(kind)}")
    hint = get_type_hints(_kinds()[kind])[name]
    adapter: TypeAdapter[Any] = TypeAdapter(hint)
    for word in (_WORDS.get(value.lower(), value), json.dumps(value)):
        try:
            return adapter.validate_json(word, strict=True)
        except ValidationError:
            continue
    raise FaultTextError(f"{text!r}: {name} cannot be {value!r}: give {_type(hint)}.")


def _type(hint: Any) -> str:
    """What a field holds, in a word or its choices."""
    choices = [str(choice) for choice in get_args(hint) if isinstance(choice, str)]
    if choices:
        return f"one of {', '.join(choices)}"
    return " or ".join(one.__name__ for one in get_args(hint)) or hint.__name__


def _near(given: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(given, list(known), n=3, cutoff=0.5)
    return f" (near: {', '.join(near)})" if near else ""
