"""The shape of the house: who imports whom, what an import costs, what stands where."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

import spdl_torch

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "spdl_torch"
MODULES = sorted(PACKAGE.rglob("*.py"))

# From the ground up: a layer imports itself and those above it in this list. "facade" is
# spdl_torch/__init__.py, which hands the public names to the commands.
LAYERS = [
    *("errors", "source", "pipeline", "dataloader", "observe", "autotune", "io", "data"),
    *("testing", "facade"),
    *("lightning", "accelerate", "transformers", "measuring", "demo", "bench", "__main__"),
]

# Neither imports the other: they share ``measuring``.
APART = {("demo", "bench"), ("bench", "demo")}

# Who imports a layer above its own, in functions and for types alone, and why.
UPWARD = {
    "spdl_torch.pipeline": "run_pipeline_in_subprocess is found there, and needs torch",
    "spdl_torch.pipeline.upstairs": "Pipeline.report() and profile() are made by observe",
}

TOP_LEVEL = {
    ".ci",
    ".gitignore",
    "CHANGELOG.md",
    "LICENSE",
    "README.md",
    "docs",
    "examples",
    "pyproject.toml",
    "spdl_torch",
    "tests",
    "tox.ini",
}

MOST_LINES = 450

HEAVY = ("torch", "torchvision", "lightning", "matplotlib", "av")


def relative_name(module):
    """The path in the repository, which is what a failing test shows."""
    return module.relative_to(ROOT).as_posix()


every_module = pytest.mark.parametrize("module", MODULES, ids=relative_name)


def layer_of(dotted):
    """``io`` of ``spdl_torch.io._image.decode``; None for other packages."""
    parts = dotted.split(".")
    if parts[0] != "spdl_torch":
        return None
    return parts[1] if len(parts) > 1 else "facade"


def module_name(module):
    """``spdl_torch.io`` of ``spdl_torch/io/__init__.py``."""
    parts = module.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(module, *, at_once=False):
    """Dotted names of everything that a module imports, in functions and for types too; with
    ``at_once`` only what is imported as soon as the module is.
    """
    name = module_name(module)
    package = name if module.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    tree = ast.parse(module.read_text(encoding="utf-8"))
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            # `from . import x` may name a module or something in the package.
            found |= {
                child if importlib_finds(child := f"{source}.{alias.name}") else source
                for alias in node.names
            }
    return found


def importlib_finds(dotted):
    """Whether a dotted name of ours is a module, by its file."""
    path = ROOT.joinpath(*dotted.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


@every_module
def test_import_goes_down_the_house(module):
    """errors < pipeline < observe < io < data < commands, for types as well."""
    name = module_name(module)
    own = layer_of(name)
    assert own in LAYERS, f"{name} is in no layer of the house"
    if own == "facade":
        return  # the public names come from everywhere; test_import_loads_nothing_heavy guards it
    for imported in imports_of(module, at_once=name in UPWARD):
        layer = layer_of(imported)
        if layer is not None:
            assert LAYERS.index(layer) <= LAYERS.index(own), f"{name} imports {imported}"
            assert (own, layer) not in APART, f"{name} imports {imported}"
    if own == "observe":
        assert not {"io", "data"} & {layer_of(i) for i in imports_of(module)}


@every_module
def test_lightning_is_imported_by_its_own_file_alone(module):
    """So the package works without it."""
    foreign = {name.split(".")[0] for name in imports_of(module)}
    if module != PACKAGE / "lightning.py":
        assert not foreign & {"lightning", "pytorch_lightning"}


@pytest.mark.parametrize("folder", ["pipeline", "errors"])
def test_engine_imports_nothing_of_torch(folder):
    """Nor anything else that is not in the standard library."""
    for module in MODULES:
        if layer_of(module_name(module)) == folder:
            foreign = {name.split(".")[0] for name in imports_of(module)} - {"spdl_torch"}
            assert foreign <= sys.stdlib_module_names, relative_name(module)


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import spdl_torch", HEAVY),
        ("import spdl_torch.pipeline", HEAVY),
        ("import spdl_torch.observe", HEAVY),
        ("import spdl_torch.autotune", HEAVY),
        ("import spdl_torch.data.sources", HEAVY),
        ("import spdl_torch.source.utils, spdl_torch.source.imagenet", HEAVY),
        ("import spdl_torch.dataloader, spdl_torch.io.utils", HEAVY),
        ("import spdl_torch.__main__", HEAVY),
        ("import spdl_torch.io", ("lightning", "matplotlib", "av")),
        ("from spdl_torch import DataLoader, ImageFolder", ("lightning", "matplotlib", "av")),
    ],
)
def test_import_loads_nothing_heavy(statement, unwanted):
    """Importing is quick and quiet: no large package that is not needed, not a word printed."""
    check = f"{statement}; import sys; print(*sorted(sys.modules.keys() & {set(unwanted)}), end='')"
    result = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, timeout=50
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@every_module
def test_all_is_what_is_exported(module):
    """Names in __all__ exist and stand there once; a module that defines any has the list."""
    if module == PACKAGE / "transformers.py":
        pytest.importorskip("transformers")
    loaded = importlib.import_module(module_name(module))
    exported = getattr(loaded, "__all__", None)
    body = ast.parse(module.read_text(encoding="utf-8")).body
    defined = {
        node.name
        for node in body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
    }
    if exported is None:
        assert not defined, f"__all__ is missing, and there is {defined}"
        return
    assert len(set(exported)) == len(exported)
    for name in exported:
        assert hasattr(loaded, name), name


PUBLIC_PACKAGES = ["", ".autotune", ".data.sources", ".io", ".observe", ".pipeline", ".source"]


@pytest.mark.parametrize("name", [f"spdl_torch{package}" for package in PUBLIC_PACKAGES])
def test_all_of_a_public_package_is_what_it_imports(name):
    """What a package re-exports, and nothing else, is in its __all__, which dir() shows."""
    package = importlib.import_module(name)
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.level or node.module.startswith("spdl_torch"))
        for alias in node.names
    }
    assert set(package.__all__) - {"__version__"} == imported
    assert set(package.__all__) <= set(dir(package))


@pytest.mark.parametrize("name", ["DataLoder", "torch", "importlib_"])
def test_unknown_name_is_an_attribute_error(name):
    """The lazy package says so as any other module would."""
    with pytest.raises(AttributeError, match=f"module 'spdl_torch' has no attribute '{name}'"):
        getattr(spdl_torch, name)


def test_top_level_holds_nothing_else():
    """What stands at the top of the repository is decided once."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert {line.split("/")[0] for line in listed.stdout.splitlines()} <= TOP_LEVEL


def test_version_is_one_that_pip_understands():
    """PEP 440, in its normal form, so that releases sort."""
    assert str(Version(spdl_torch.__version__)) == spdl_torch.__version__


@every_module
def test_file_is_readable_in_one_sitting(module):
    """No file of the package grows beyond 450 lines."""
    assert len(module.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
