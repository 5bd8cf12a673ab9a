"""Fail where a test imports a private name of the package that ``private_imports.txt`` lacks.

Public is what a module of ``tests/programs/surface.txt`` hands on. The list beside this file holds
what tests import all the same, one name a line; it only shrinks, as a name that no test imports any
more fails, too.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests"


def public_modules() -> set[str]:
    """The modules that the list of the public surface has, and those that commands begin with."""
    lines = (TESTS / "programs" / "surface.txt").read_text(encoding="utf-8").splitlines()
    listed = {line.strip("[]") for line in lines if line.startswith("[spdl_torch")}
    return listed | {"spdl_torch.__main__", "spdl_torch.errors", "spdl_torch.spdl"}


def imported(tree: ast.Module) -> set[str]:
    """Every name of the package that a file imports, and every module."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
    return {name for name in names if name.startswith("spdl_torch")}


def is_private(name: str, public: set[str]) -> bool:
    """Whether no public module hands it on."""
    module, _, last = name.rpartition(".")
    return name not in public and (module not in public or last.startswith("_"))


def main() -> int:
    """Print each fault, and return the exit status."""
    public = public_modules()
    allowed = set((HERE / "private_imports.txt").read_text(encoding="utf-8").split())
    used = {}
    for path in sorted(TESTS.rglob("*.py")):
        for name in imported(ast.parse(path.read_text(encoding="utf-8"))):
            if is_private(name, public):
                used[name] = path.relative_to(TESTS.parent)
    for name in sorted(used.keys() - allowed):
        print(f"{used[name]}: imports {name}, which is private: test what users can see")
    for name in sorted(allowed - used.keys()):
        print(f".ci/private_imports.txt: no test imports {name} any more: delete the line")
    return int(used.keys() != allowed)


if __name__ == "__main__":
    sys.exit(main())
