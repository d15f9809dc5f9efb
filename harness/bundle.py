"""Bundle: functions in, the source of all that they need out: ours and the user's written out, the rest imported."""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from inspect import getsource
from types import ModuleType
from typing import Any

from tpbed.tp.errors import TestbedError

WORLDS = "tpbed.tp."
Place = tuple[str, str]  # a module, and a name in it


class BundleError(TestbedError):
    """Code that cannot be copied into one file."""


@dataclass(slots=True, kw_only=True)
class Bundle:
    """Definitions of modules, in an order in which they can be executed.

    substitutes: what is taken instead of a definition. given: what the file has already.
    """

    substitutes: dict[Place, Place] = field(default_factory=dict)
    given: frozenset[Place] = frozenset()
    imports: dict[str, set[str]] = field(default_factory=dict)  # by module: names, "" for itself, "name as other"
    sources: dict[Place, str] = field(default_factory=dict)
    _names: dict[str, Place] = field(default_factory=dict)

    def add(self, module: str, name: str) -> None:
        """Add a definition and all that it names.

        Raises BundleError for two definitions of one name, for a module that is used as a whole, and for what only
        ranks of tpbed can ask for.
        """
        place = self.substitutes.get((module, name), (module, name))
        if place in self.sources or place in self.given:
            return
        if place[0].startswith(WORLDS):
            raise BundleError(f"{name} of {module} means something in tpbed's worlds alone: do without it.")
        node = _parsed(place[0]).definitions.get(place[1])
        if node is None:
            raise BundleError(f"{place[0]} does not define {place[1]} at its top: define it there with def or class.")
        if self._names.setdefault(place[1], place) != place:
            other = self._names[place[1]][0]
            raise BundleError(f"{place[0]} and {other} both define {place[1]}: give one of them another name.")
        self.sources[place] = ""
        for used in _names_in(node):
            self._need(place[0], used)
        for used in _names_annotated(node):
            self._need(place[0], used, read=False)
        source = self.sources.pop(place) or _source_of(place[0], node)
        self.sources[place] = source

    def add_names_of(self, text: str, module: str) -> None:
        """Add what a piece of code names, as if it stood in `module`."""
        for name in dict.fromkeys(_names_in(ast.parse(text))):
            self._need(module, name)

    def text(self, since: int = 0) -> str:
        """The definitions; but for the first `since`."""
        return "\n\n\n".join(list(self.sources.values())[since:])

    def import_lines(self) -> list[str]:
        """The imports, sorted; of what is neither ours nor the user's."""
        plain = [
            f"import {module}{name}" for module, names in self.imports.items() for name in names if name[:1] in " "
        ]
        some = {module: sorted(n for n in names if n[:1] not in " ") for module, names in self.imports.items()}
        return sorted(plain) + [
            f"from {module} import {', '.join(some[module])}" for module in sorted(some) if some[module]
        ]

    def _need(self, module: str, name: str, *, read: bool = True) -> None:
        """A name that code of a module has; one that it does not read stands in an annotation."""
        parsed = _parsed(module)
        if name in parsed.imports:
            self._import(module, name, *parsed.imports[name], read=read)
        elif read and name in parsed.definitions:
            self.add(module, name)

    def _import(self, module: str, name: str, source: str, original: str, *, read: bool) -> None:
        """An imported name: written out where it is ours or the user's, else imported as it was."""
        if not _is_written_out(source):
            bound = original or source.partition(".")[0]
            self.imports.setdefault(source, set()).add(original if bound == name else f"{original} as {name}")
        elif read and original == name:
            self.add(source, original)
        elif read:
            raise BundleError(
                f"{module} imports {source} as a whole or under another name: import its functions by their own names, "
                "so that they can be copied."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parsed:
    source: str
    definitions: dict[str, ast.stmt]
    imports: dict[str, tuple[str, str]]  # by the name that is bound: the module, and the name in it if any


@cache
def _parsed(module: str) -> _Parsed:
    source = getsource(import_module(module))
    definitions: dict[str, ast.stmt] = {}
    imports: dict[str, tuple[str, str]] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            imports |= {_bound(one): (one.name, "") for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imports |= {one.asname or one.name: (node.module, one.name) for one in node.names}
        else:
            definitions |= dict.fromkeys(_defined(node), node)
    return _Parsed(source=source, definitions=definitions, imports=imports)


def _bound(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]


def _names_in(node: ast.AST) -> Iterator[str]:
    """The names that it reads when it runs; annotations are never evaluated in the file."""
    annotations = {id(one) for one in _annotations(node)}
    todo = [node]
    while todo:
        here = todo.pop(0)
        if isinstance(here, ast.Name):
            yield here.id
        todo += [child for child in ast.iter_child_nodes(here) if id(child) not in annotations]


def _names_annotated(node: ast.AST) -> Iterator[str]:
    return (one.id for part in _annotations(node) for one in ast.walk(part) if isinstance(one, ast.Name))


def _annotations(node: ast.AST) -> list[ast.AST]:
    parts = [(getattr(one, "annotation", None), getattr(one, "returns", None)) for one in ast.walk(node)]
    return [part for pair in parts for part in pair if isinstance(part, ast.AST)]


def _source_of(module: str, node: ast.stmt) -> str:
    lines = _parsed(module).source.splitlines()
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
    return "\n".join(lines[first - 1 : node.end_lineno])


def _is_written_out(module: str) -> bool:
    """Whether a module is tpbed's or the user's own: neither installed nor a part of Python."""
    if module.partition(".")[0] == __name__.partition(".")[0]:
        return True
    found: ModuleType | Any = sys.modules.get(module) or import_module(module)
    file = getattr(found, "__file__", None)
    return file is not None and "site-packages" not in file and not file.startswith(sysconfig.get_path("stdlib"))
