"""The shape of the house: who imports whom, what an import costs, what stands where.

What breaks a rule is listed with file and line.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

import pytest
from support.folders import ROOT
from test_surface import pages_of_site

import spdl_torch

# From the ground up: a layer imports itself and those above it in the contributors' table.
PAGE = (ROOT / ".github" / "CONTRIBUTING.md").read_text(encoding="utf-8")
CELLS = re.findall(r"^\| (`.+?) \|", PAGE.partition("## Test")[0], re.MULTILINE)
LAYERS = re.findall(r"`(\w+)`", " ".join(CELLS))


class Import(NamedTuple):
    """One module that a file imports, and the line."""

    importer: str
    imported: str
    where: str
    is_free: bool
    """Whether it may point anywhere: for types alone, and within a layer."""

    def __str__(self):
        return f"{self.where}: {self.importer} imports {self.imported}"


@functools.cache
def files():
    """What stands in each file of the package, by the dotted name of its module."""
    found = {}
    for path in sorted((ROOT / "spdl_torch").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path, ast.parse(path.read_text(encoding="utf-8"))
    return found


@functools.cache
def all_imports():
    """Every import of the package, in functions and for types too."""
    return [each for name, (path, tree) in files().items() for each in imports_in(name, path, tree)]


def imports_in(importer, path, tree):
    """Those of a file."""
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    blocks = [block for block in blocks if ast.unparse(block.test) == "TYPE_CHECKING"]
    for_types = {node for block in blocks for each in block.body for node in ast.walk(each)}
    package = importer if path.name == "__init__.py" else importer.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            # `from . import x` may name a module or something in the package.
            children = {f"{source}.{alias.name}" for alias in node.names}
            names = {child if child in files() else source for child in children}
        else:
            continue
        where = f"{path.relative_to(ROOT).as_posix()}:{node.lineno}"
        for name in sorted(names):
            is_free = node in for_types and layer_of(importer) == layer_of(name)
            yield Import(importer, name, where, is_free)


def layer_of(dotted):
    """``io`` of ``spdl_torch.io._image.decode``; None for other packages."""
    parts = dotted.split(".")
    if parts[0] != "spdl_torch":
        return None
    return parts[1] if len(parts) > 1 else "facade"


def assert_none(faults):
    """Show them all, one a line."""
    faults = [str(fault) for fault in faults]
    assert not faults, "\n".join(["", *faults])


def room_of(dotted):
    """``engine.stage`` of ``spdl_torch.engine.stage.worker``."""
    return ".".join([*dotted.split("."), "__init__"][1:3])


def assert_ordered(imports, place):
    """Of these, each place uses those before it alone: none leads back to where it began."""
    used = {}
    for each in imports:
        used.setdefault(place(each.importer), set()).add(place(each.imported))
    try:
        TopologicalSorter(used).prepare()
    except CycleError as error:
        circle = {*error.args[1]}
        assert_none(i for i in imports if {place(i.importer), place(i.imported)} <= circle)


def test_import_goes_down_the_house():
    """Each layer imports itself and those before it in LAYERS, in functions and for types as well:
    but the facade, whose public names come from everywhere. The list speaks of all layers, and of
    nothing that is gone."""
    assert {layer_of(name) for name in files()} == set(LAYERS)
    places = {layer: place for place, layer in enumerate([None, *LAYERS])}
    assert_none(
        each
        for each in all_imports()
        if layer_of(each.importer) != "facade"
        and places[layer_of(each.imported)] > places[layer_of(each.importer)]
    )


def test_rooms_of_a_layer_do_not_import_each_other():
    """Its folders and files have an order in which each uses those before it, but for types."""
    inside = [i for i in all_imports() if layer_of(i.importer) == layer_of(i.imported) != "facade"]
    used = [i for i in inside if not i.is_free and room_of(i.importer) != room_of(i.imported)]
    assert_ordered(used, room_of)


def test_no_files_import_each_other():
    """Nor in functions, nor for types across layers: only types may point back, within a layer."""
    used = [i for i in all_imports() if i.imported in files() and not i.is_free]
    assert_ordered([i for i in used if i.importer != i.imported], str)


def test_engine_imports_nothing_of_torch():
    """Nor anything else that is not in the standard library."""
    known = {"spdl_torch", *sys.stdlib_module_names}
    layers = ("machine", "engine", "pipeline", "errors")
    mine = [each for each in all_imports() if layer_of(each.importer) in layers]
    assert_none(each for each in mine if each.imported.split(".")[0] not in known)


HEAVY = ("torch", "torchvision", "lightning", "matplotlib", "jinja2", "av")
LIGHT = (
    *("import spdl_torch", "import spdl_torch.pipeline", "import spdl_torch.observe"),
    *("import spdl_torch.autotune", "import spdl_torch.data.sources"),
    "import spdl_torch.spdl.source.utils, spdl_torch.spdl.source.imagenet",
    "import spdl_torch.spdl.dataloader, spdl_torch.spdl.io.utils",
    *("import spdl_torch.spdl.pipeline.defs", "import spdl_torch.__main__"),
)
FIRST_BATCH = """
import io, PIL.Image
from spdl_torch.io import load_image_batch
from spdl_torch.io._image.kernel import has_codec, is_compiled
PIL.Image.new("RGB", (96, 80)).save(file := io.BytesIO(), "jpeg")
assert load_image_batch([file.getvalue()], width=30, height=20).shape == (1, 20, 30, 3)
assert has_codec() and is_compiled()
assert not {"torchvision", "torch._dynamo"} & sys.modules.keys(), "ten times as long as the batch"
"""
WITH_TORCH = (
    FIRST_BATCH,
    "import torchvision",
    "import spdl_torch.io",
    "from spdl_torch import DataLoader, ImageFolder",
)
LATER = ("lightning", "matplotlib", "av", "spdl_torch.spdl")


@pytest.mark.parametrize(("statements", "unwanted"), [(LIGHT, HEAVY), (WITH_TORCH, LATER)])
def test_import_loads_nothing_heavy(statements, unwanted):
    """Importing is quick and quiet: no large package that is not needed, not a word printed. Nor
    does the first batch of pictures import torchvision, in every worker anew."""
    check = f"""
import sys
unwanted = {set(unwanted)}
for statement in {statements}:
    exec(statement)
    if statement == "import torchvision":  # an old one brings PyAV
        unwanted -= sys.modules.keys()
    if found := sys.modules.keys() & unwanted:
        sys.exit(f"{{statement}}: {{found}}")
"""
    command = [sys.executable, "-c", check]
    result = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_public_modules_alone_have_a_list_of_names():
    """``__all__``, or what ``hand_on`` makes of it; the frozen surface says what stands in it."""
    kinds = ast.Assign | ast.AnnAssign | ast.Expr
    lists = {
        name
        for name, (_, tree) in files().items()
        for each in tree.body
        if isinstance(each, kinds) and ast.unparse(each).startswith(("__all__", "hand_on()"))
    }
    assert lists == pages_of_site().keys()


def test_unknown_name_is_an_attribute_error():
    """The lazy package says so as any other module would, also of what it imports itself."""
    for name in ("DataLoder", "torch"):
        with pytest.raises(AttributeError, match=f"module 'spdl_torch' has no attribute '{name}'"):
            getattr(spdl_torch, name)
