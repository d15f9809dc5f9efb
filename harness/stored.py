"""load: a JSON file in, the dataclass that it holds out, or an error that names the file and what is wrong in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tpbed.harness.scenario import ScenarioError
from tpbed.tp.errors import TestbedError


def save(adapter: TypeAdapter[Any], value: Any, path: Path, *, indent: int | None = None) -> None:
    """Write a value as JSON (NaN and infinities as JavaScript writes them); parents are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(adapter.dump_python(value), indent=indent) + "\n", encoding="utf-8")


def load(
    adapter: TypeAdapter[Any], path: Path, *, noun: str, advice: str, error: type[TestbedError], whole: bool = False
) -> Any:
    """Read what `save` wrote.

    noun: what the file should hold, as in "run record". advice: what to do where it does not.
    whole: refuse a field that is not known, too; a misspelt one would be its default in silence.
    Raises `error` for a file that is missing, cut short, or not of this kind.
    """
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        value = adapter.validate_python(given)
    except OSError as wrong:
        raise error(f"cannot read {path}: {wrong.strerror}. {advice}") from wrong
    except ValidationError as wrong:
        first = wrong.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise error(f"{path} is no {noun} of this version: {place or 'it'} - {first['msg']}. {advice}") from wrong
    except ScenarioError as wrong:
        raise error(f"{path} is no {noun}: {wrong}") from wrong
    except ValueError as wrong:
        raise error(f"{path} is not whole JSON ({wrong}): it may have been cut short. {advice}") from wrong
    strangers = list(_strangers(given, adapter.dump_python(value))) if whole else []
    if strangers:
        raise error(f"{path} is no {noun} of this version: {strangers[0]} is not known. {advice}")
    return value


def _strangers(given: Any, kept: Any, place: str = "") -> Iterator[str]:
    """Fields that were given and are in no dataclass."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for name, value in given.items():
            here = f"{place}.{name}".lstrip(".")
            yield from _strangers(value, kept[name], here) if name in kept else [here]
    if isinstance(given, list) and isinstance(kept, list | tuple):
        for index, pair in enumerate(zip(given, kept, strict=False)):
            yield from _strangers(*pair, f"{place}.{index}")
