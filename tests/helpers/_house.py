"""The package as the tests of the house read it: its files, and who imports whom.

``python tests/helpers/_house.py`` prints the longest files and functions and the fullest folders.
They are no rule, because a file may have what its idea needs; look there first for what wants
dividing.

``python tests/helpers/_house.py --rooms`` prints the rooms of each layer from the ground up, with
those that each one imports: a room is a folder of the layer, or a file that stands beside them. An
arrow is a room that imports another one, in functions and for types too; the floor of a room is the
length of the longest way of arrows down from it.

``python tests/helpers/_house.py --promises`` prints how many tests prove what: each file of tests
with the promise that its docstring begins with. With ``--each``, each test with its own.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib.util
import io
import re
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _folders import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping

PACKAGE = ROOT / "spdl_torch"
NUM_SHOWN = 15
LAYERS_WITH_ROOMS = ("machine", "objects", "engine", "observe", "pipeline", "io", "data")


@dataclass(frozen=True)
class Import:
    """One module that a file imports, and the line."""

    importer: str
    imported: str
    where: str
    at_once: bool
    """Whether as soon as the file is imported, and not in a function or for types alone."""
    for_types: bool
    """Whether for types alone."""

    @property
    def is_free(self) -> bool:
        """Whether it may point anywhere: for types alone, and within a layer."""
        return self.for_types and self.importer.split(".")[1:2] == self.imported.split(".")[1:2]

    def __str__(self) -> str:
        return f"{self.where}: {self.importer} imports {self.imported}"


@dataclass(frozen=True)
class Module:
    """A file of the package."""

    path: Path
    name: str
    """``spdl_torch.io`` of ``spdl_torch/io/__init__.py``."""
    tree: ast.Module
    imports: tuple[Import, ...]

    def at(self, line: int) -> str:
        """``spdl_torch/errors.py:12``."""
        return f"{self.path.relative_to(ROOT).as_posix()}:{line}"


@functools.cache
def modules() -> dict[str, Module]:
    """Every module of the package, by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = parsed(path, name, path.read_text(encoding="utf-8"))
    return found


def parsed(path: Path, name: str, code: str) -> Module:
    """The module of that name, as the code of its file has it."""
    bare = Module(path, name, ast.parse(code), ())
    return replace(bare, imports=tuple(_imports_of(bare)))


def _imports_of(module: Module) -> list[Import]:
    is_package = module.path.name == "__init__.py"
    package = module.name if is_package else module.name.rpartition(".")[0]
    found = []
    types = {
        node
        for block in ast.walk(module.tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for each in block.body
        for node in ast.walk(each)
    }
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            # `from . import x` may name a module or something in the package.
            children = {f"{source}.{alias.name}" for alias in node.names}
            names = {child if _is_ours(child) else source for child in children}
        else:
            continue
        where, at_once = module.at(node.lineno), node in module.tree.body
        is_type = node in types
        found += [Import(module.name, name, where, at_once, is_type) for name in sorted(names)]
    return found


def _is_ours(dotted: str) -> bool:
    path = ROOT.joinpath(*dotted.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def cycles(found: Mapping[str, Module]) -> list[frozenset[str]]:
    """The groups of modules that import each other, straight or through one another, imports in
    functions counted, and those for types from one layer to another.
    """
    below = {
        name: {i.imported for i in module.imports if i.imported in found and not i.is_free} - {name}
        for name, module in found.items()
    }
    for middle in below:  # Warshall: what can be reached by way of ``middle``
        for reached in below.values():
            if middle in reached:
                reached |= below[middle]
    groups = {
        frozenset(other for other in reached if name in below[other])
        for name, reached in below.items()
        if name in reached
    }
    return sorted(groups, key=sorted)


def room_of(dotted: str) -> str:
    """``stage`` of ``spdl_torch.engine.stage.source``."""
    return [*dotted.split("."), "__init__"][2]


def rooms_of(layer: str) -> dict[str, set[str]]:
    """The rooms of a layer, and which others of it each one imports."""
    package = f"spdl_torch.{layer}"
    inside = {name for name in modules() if f"{name}.".startswith(f"{package}.")}
    below: dict[str, set[str]] = {room_of(name): set() for name in inside}
    for name in inside:
        imported = {i.imported for i in modules()[name].imports if not i.is_free} & inside
        below[room_of(name)] |= {room_of(other) for other in imported} - {room_of(name)}
    return below


def print_rooms(layer: str) -> None:
    """Print a layer's rooms by their floors, and what each imports; rooms that import each other
    have none."""
    below, floors = rooms_of(layer), dict[str, int]()
    while placed := {r for r in below.keys() - floors.keys() if below[r] <= floors.keys()}:
        floors |= {room: 1 + max((floors[b] for b in below[room]), default=0) for room in placed}
    top, arrows = max(floors.values(), default=0), sum(map(len, below.values()))
    print(f"{layer}: {len(below)} rooms, {top} floors, {arrows} arrows")
    for room in sorted(below, key=lambda room: (floors.get(room, 0), room)):
        print(f"{floors.get(room, '-'):>4} {room:18} {', '.join(sorted(below[room]))}".rstrip())


def promise_of(docstring: str) -> str:
    """The first sentence, or the first line where that is longer than a line shows."""
    text = " ".join(docstring.strip().split("\n\n")[0].split())
    return re.split(r"(?<=[a-z)\]`'])\.(?: |$)", text)[0].rstrip(".")


class Collected:
    """A plugin of pytest that keeps the tests that are found."""

    def __init__(self) -> None:
        self.short: list[pytest.Item] = []
        self.long: list[pytest.Item] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.short = list(items)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.long = list(items)


def collected() -> Collected:
    """Every test, as pytest finds it; those of the long forms apart."""
    tests, output = Collected(), io.StringIO()
    with contextlib.redirect_stdout(output):
        status = pytest.main(
            ["--collect-only", "-q", "-p", "no:cacheprovider", str(ROOT / "tests")], plugins=[tests]
        )
    assert status == 0, output.getvalue()
    return tests


def print_promises(tests: Collected, each: bool) -> None:
    """Print the number of tests, those of the long forms beside it, and what they prove."""

    def key(item: pytest.Item) -> tuple[str, str]:
        name = item.originalname if each else ""
        docstring = item.function.__doc__ if each else item.module.__doc__
        assert docstring, f"{item.nodeid} says no promise"
        return f"{Path(item.module.__file__).name} {name}".strip(), promise_of(docstring)

    short, long = Counter(map(key, tests.short)), Counter(map(key, tests.long))
    print(f"{short.total():,} tests, {long.total():,} more in the long forms")
    for where, promise in sorted({*short, *long}):
        counts = f"{short[where, promise]:5} {long[where, promise] or '':>5}"
        print(f"{counts}  {where}: {promise}")


def _report() -> None:
    lengths = [
        (len(module.path.read_text(encoding="utf-8").splitlines()), module.at(1))
        for module in modules().values()
    ]
    _print_longest(f"Lines of files, {sum(n for n, _ in lengths):,} in all", lengths)
    functions = [
        (node.end_lineno - node.lineno + 1, f"{module.at(node.lineno)} {node.name}")
        for module in modules().values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    _print_longest(f"Lines of functions, {len(functions):,} in all", functions)
    folders = Counter(
        module.path.parent.relative_to(ROOT).as_posix() for module in modules().values()
    )
    _print_longest("Files in a folder", [(count, folder) for folder, count in folders.items()])


def _print_longest(title: str, rows: list[tuple[int, str]]) -> None:
    print(title)
    for count, where in sorted(rows, reverse=True)[:NUM_SHOWN]:
        print(f"{count:6} {where}")


def main(arguments: list[str]) -> None:
    """Print what the options ask for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rooms", action="store_true", help="the rooms of the layers")
    parser.add_argument("--promises", action="store_true", help="how many tests prove what")
    parser.add_argument("--each", action="store_true", help="the promise of each test")
    options = parser.parse_args(arguments)
    if options.rooms:
        for layer in LAYERS_WITH_ROOMS:
            print_rooms(layer)
    elif options.promises or options.each:
        print_promises(collected(), options.each)
    else:
        _report()


if __name__ == "__main__":
    main(sys.argv[1:])
