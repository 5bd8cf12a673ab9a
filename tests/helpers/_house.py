"""The package as the tests of the house read it: its files, and who imports whom."""

from __future__ import annotations

import ast
import functools
import importlib.util
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from _folders import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

PACKAGE = ROOT / "spdl_torch"


@dataclass(frozen=True)
class Import:
    """One module that a file imports, and the line."""

    importer: str
    imported: str
    where: str
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
        where, is_type = module.at(node.lineno), node in types
        found += [Import(module.name, name, where, is_type) for name in sorted(names)]
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
    """``stage`` of ``spdl_torch.engine.stage``."""
    return [*dotted.split("."), "__init__"][2]
