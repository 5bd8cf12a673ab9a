"""The shape of the house: who imports whom, what an import costs, what stands where.

What breaks a rule is listed with file and line.
"""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from _house import ROOT, cycles, modules, room_of
from packaging.version import Version

import spdl_torch

# From the ground up: a layer imports itself and those above it in this list. "facade" is
# spdl_torch/__init__.py, which hands the public names to the commands.
LAYERS = [
    *(
        "shown_text",
        "errors",
        "scopes",
        "late_imports",
        "left_out",
        "lazy_names",
        "whole_files",
        "command_options",
        "progress_bar",
        "machine",
        "objects",
        "engine",
        "observe",
        "pipeline",
        "autotune",
        "io",
        "loader",
        "data",
        "spdl",
        "nn",
    ),
    *("testing", "facade"),
    *("lightning", "accelerate", "transformers", "ray"),
    *("measuring", "prepare", "demo", "check_gpu", "run", "__main__"),
]

# The same inside of a layer: folders, and files that stand beside them. "__init__" is the layer's
# face, which hands on the public names.
ROOMS = {
    "machine": [
        "starting",
        "histogram",
        "gil",
        "limits",
        "thread_times",
        "garbage",
        "probes",
        "readings",
        "__init__",
    ],
    "objects": [
        "generator_states",
        "kinds",
        "members",
        "datasets",
        "copies",
        "__init__",
    ],
    "engine": [
        *("shared", "threads", "stacks", "failures", "ops", "definition", "moments", "timeline"),
        *("rings", "recorder", "counters", "statistics", "channel", "stall", "loop", "reporter"),
        *("hooks", "queues", "stage_hooks", "calls", "stage", "async_stage", "source", "run"),
        "__init__",
    ],
    "observe": ["page", "verdict", "store", "plot", "trace", "__init__", "commands"],
    "pipeline": ["pipeline", "builder", "caching", "__init__"],
    "io": [
        *(
            "_types",
            "_sizes",
            "_retry",
            "_storage",
            "_cache",
            "_transfer",
        ),
        *("_config", "_remote", "_resuming", "_source", "_tar", "_array"),
        *("_video", "_image", "__init__"),
    ],
    "loader": [
        *("user_warnings", "error_notes", "state_fields", "rng", "differences", "sampling"),
        *("checkpoint", "fetching", "stats", "backends", "arguments", "auto_workers"),
        *("known_parts", "vouching", "placing", "held_up", "loader_state", "base_loader"),
        *("opening", "dealing", "delivery"),
        *("epoch_iterator", "iterator", "dataloader", "chosen", "for_trainers", "__init__"),
    ],
    "data": [
        *("sources", "mixing", "caching", "folder", "dataset_state", "dataset", "packing"),
        *("subprocesses", "__init__"),
    ],
}


HEAVY = ("torch", "torchvision", "lightning", "matplotlib", "jinja2", "av")


def layer_of(dotted):
    """``io`` of ``spdl_torch.io._image.decode``; None for other packages."""
    parts = dotted.split(".")
    if parts[0] != "spdl_torch":
        return None
    return parts[1] if len(parts) > 1 else "facade"


def imports_of(layer):
    """Everything that a layer imports, in functions and for types too."""
    return [i for m in modules().values() if layer_of(m.name) == layer for i in m.imports]


def assert_none(faults):
    """Show them all, one a line."""
    faults = [str(fault) for fault in faults]
    assert not faults, "\n".join(["", *faults])


# The facade's public names come from everywhere; test_import_loads_nothing_heavy guards it.
BOUND = [layer for layer in LAYERS if layer != "facade"]


@pytest.mark.parametrize("layer", BOUND)
def test_import_goes_down_the_house(layer):
    """Each layer imports itself and those before it in LAYERS, in functions and for types as
    well."""
    below = {None, *LAYERS[: LAYERS.index(layer) + 1]}
    assert_none(i for i in imports_of(layer) if layer_of(i.imported) not in below)


def test_every_module_is_in_a_layer_and_a_room():
    """So that the lists above speak of all of them, and of nothing that is gone."""
    assert {layer_of(name) for name in modules()} == set(LAYERS)
    for layer, rooms in ROOMS.items():
        assert {room_of(n) for n in modules() if layer_of(n) == layer} == set(rooms)


@pytest.mark.parametrize("layer", ROOMS)
def test_import_goes_down_the_rooms_of_a_layer(layer):
    """Each room uses those before it in the list, but for types."""
    order = ROOMS[layer]
    assert_none(
        i
        for i in imports_of(layer)
        if layer_of(i.imported) == layer
        and not i.is_free
        and order.index(room_of(i.imported)) > order.index(room_of(i.importer))
    )


def test_no_files_import_each_other():
    """Nor in functions, nor for types across layers: only types may point back, within a layer."""
    imports = {name: module.imports for name, module in modules().items()}
    found = cycles(modules())
    inside = [(group, i) for group in found for name in sorted(group) for i in imports[name]]
    assert_none(i for group, i in inside if i.imported in group and not i.is_free)


@pytest.mark.parametrize("layer", ["machine", "engine", "pipeline", "errors"])
def test_engine_imports_nothing_of_torch(layer):
    """Nor anything else that is not in the standard library."""
    known = {"spdl_torch", *sys.stdlib_module_names}
    assert_none(i for i in imports_of(layer) if i.imported.split(".")[0] not in known)


LIGHT = (
    *("import spdl_torch", "import spdl_torch.pipeline", "import spdl_torch.observe"),
    *("import spdl_torch.autotune", "import spdl_torch.data.sources"),
    "import spdl_torch.spdl.source.utils, spdl_torch.spdl.source.imagenet",
    "import spdl_torch.spdl.dataloader, spdl_torch.spdl.io.utils",
    *("import spdl_torch.spdl.pipeline.defs", "import spdl_torch.__main__"),
)
WITH_TORCH = ("import spdl_torch.io", "from spdl_torch import DataLoader, ImageFolder")
LATER = ("lightning", "matplotlib", "av", "spdl_torch.spdl")


@pytest.mark.parametrize(
    ("statements", "unwanted"),
    [(LIGHT, HEAVY), (WITH_TORCH, LATER)],
    ids=["light", "with torch"],
)
def test_import_loads_nothing_heavy(statements, unwanted):
    """Importing is quick and quiet: no large package that is not needed, not a word printed."""
    check = f"""
import sys
for statement in {statements}:
    exec(statement)
    if found := sys.modules.keys() & {set(unwanted)}:
        sys.exit(f"{{statement}}: {{found}}")
"""
    result = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, timeout=50
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def public_modules():
    """Those of whose names the documentation's site makes entries."""
    tree = ast.parse((ROOT / "docs/conf.py").read_text(encoding="utf-8"))
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    (pages,) = [n.value for n in assigned if ast.unparse(n.targets[0]) == "PAGES"]
    return set(ast.literal_eval(pages))


def test_public_modules_alone_have_a_list_of_names():
    """``__all__``, or what ``hand_on`` makes of it; the frozen surface says what stands in it."""
    kinds = ast.Assign | ast.AnnAssign | ast.Expr
    lists = {
        name
        for name, module in modules().items()
        for each in module.tree.body
        if isinstance(each, kinds) and ast.unparse(each).startswith(("__all__", "hand_on()"))
    }
    assert lists == public_modules()


@pytest.mark.parametrize("name", ["DataLoder", "torch", "importlib_"])
def test_unknown_name_is_an_attribute_error(name):
    """The lazy package says so as any other module would."""
    with pytest.raises(AttributeError, match=f"module 'spdl_torch' has no attribute '{name}'"):
        getattr(spdl_torch, name)


def test_version_is_one_that_pip_understands():
    """PEP 440, in its normal form, so that releases sort."""
    assert str(Version(spdl_torch.__version__)) == spdl_torch.__version__
