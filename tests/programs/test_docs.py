"""The documentation is true: its code runs, its links resolve, and it names what is public."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import re
import runpy
import shlex
import shutil
import sqlite3
from collections import namedtuple
from contextlib import closing

import bench.command as benchmark
import pytest
import torch
from support import warm
from support.folders import ROOT
from test_surface import CALLABLES, MODULES, lists, pages_of_site
from torch.utils.data import DataLoader as TorchLoader, TensorDataset

import spdl_torch
from spdl_torch.__main__ import main
from spdl_torch.observe import SQLiteStatsWriter
from spdl_torch.pipeline import PipelineBuilder

BESIDE = [ROOT / page for page in ("README.md", ".github/CONTRIBUTING.md", "examples/README.md")]
BENCHMARK = ROOT / "examples" / "bench" / "README.md"
PAGES = [*BESIDE, BENCHMARK, *sorted((ROOT / "docs").rglob("*.md"))]
REFERENCE = [BENCHMARK, *sorted((ROOT / "docs" / "reference").glob("*.md"))]


Block = namedtuple("Block", ["info", "line", "text"])


def blocks_of(page):
    """Every fenced block of a page, in order, with the number of its first line of text, from 1."""
    blocks, info, first, lines = [], None, 0, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("```"):
            lines.append(line)
        elif info is None:
            info, first, lines = line[3:].strip(), number + 1, []
        else:
            blocks.append(Block(info, first, "\n".join(lines)))
            info = None
    assert info is None, f"{page.name}: the block before line {first} is not closed"
    return blocks


def name_of_page(page):
    """The page's path in the repository, which is what a failing test shows."""
    return page.relative_to(ROOT).as_posix()


pages = pytest.mark.parametrize("page", PAGES, ids=name_of_page)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """What ``photographs DIR`` writes, made once: it is the same every time."""
    folder = tmp_path_factory.mktemp("photographs")
    assert main(["photographs", str(folder)]) == 0
    return folder


def run_command(line, photographs):
    """A line of a page's shell, in this process; ``demo`` takes minutes, and so does the benchmark,
    but for its ``--smoke``."""
    words = shlex.split(line)
    if words[:2] == ["python", "examples/bench"] and "--smoke" in words:
        assert benchmark.main(words[2:]) == 0, line
    commands = {"photographs", "prepare", "report", "plot", "trace"}
    if words[:3] != ["python", "-m", "spdl_torch"] or words[3] not in commands:
        return
    if words[3] == "photographs" and len(words) == 5:
        shutil.copytree(photographs, words[4], dirs_exist_ok=True)
    else:
        assert main(words[3:]) == 0, line


SMALLER = {
    "docs/howto/find_the_bottleneck.md": ("*= 1000", "*= 2"),
    "docs/howto/record_a_trace.md": ("*= 200", "*= 2"),
}
"""Amounts that a page has for the sake of its figures, and what the tests run in their place."""


@pytest.fixture
def namespace():
    """A page's names. Its loaders end with it, and not when garbage is collected at last, in a test
    that looks at all loaders there are."""
    names = {"__name__": "__main__"}
    yield names
    names.clear()


# Between Lightning and torch, and a word of Lightning's on short epochs.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pages
def test_page_works_when_it_is_followed(page, tmp_path, monkeypatch, photographs, namespace):
    """In a folder with photographs, its commands and its Python blocks run in their order without a
    warning: the blocks as one program, those with the guard of a script as scripts. Languages are
    known, and a block that is not run gives its reason."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(photographs, tmp_path, dirs_exist_ok=True)
    usual, small = SMALLER.get(name_of_page(page), ("", ""))
    assert usual in page.read_text(encoding="utf-8"), "the page has another amount now"
    for block in blocks_of(page):
        known = r"(python|console)( no-run: \S.+| needs: \w+)?|diff|text"
        assert re.fullmatch(known, block.info), f"{name_of_page(page)}:{block.line}: {block.info}"
        if block.info == "console":
            for line in re.findall(r"^\$ (.+)", block.text.replace("\\\n", " "), flags=re.M):
                run_command(line, photographs)
        if not block.info.startswith("python"):
            continue
        # With empty lines in front: a traceback has the page's.
        source = "\n" * (block.line - 1) + block.text.replace(usual, small)
        code = compile(source, name_of_page(page), "exec", dont_inherit=True)
        if not runs(block):
            continue
        if '__name__ == "__main__"' in block.text:
            script = tmp_path / f"{page.stem}_{block.line}.py"
            script.write_text(source, encoding="utf-8")
            done = warm.run([script])
            assert done.returncode == 0, done.stderr
            assert "Warning" not in done.stderr, done.stderr
        else:
            exec(code, namespace)


def runs(block):
    """Whether a Python block is run: always, or where what it needs is installed."""
    _, _, rest = block.info.partition(" ")
    if rest.startswith("needs: "):
        return importlib.util.find_spec(rest.removeprefix("needs: ")) is not None
    return not rest


def prose_of(page):
    """The page without its blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)


@pages
def test_tables_and_links_of_a_page_are_in_order(page):
    """A cell has at most 25 words. Files and headings that the page links to exist, inside the
    repository."""
    rows = re.findall(r"^\|(.+)\|$", prose_of(page), flags=re.M)
    cells = [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    assert [cell for cell in cells if len(cell.split()) > 25] == []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_relative_to(ROOT), f"{target} leaves the repository"
        assert file.is_file(), f"{target} does not exist"
        if anchor:  # what GitHub and myst make of a heading
            headings = re.findall(r"^#+ (.+)$", prose_of(file).lower(), flags=re.M)
            anchors = {re.sub(r"[^\w\- ]", "", h).strip().replace(" ", "-") for h in headings}
            assert anchor in anchors, f"{target}: no such heading"


def test_formats_are_those_of_what_is_written(tmp_path):
    """Of states, and of the statistics file."""
    stages = PipelineBuilder().add_source([1]).add_sink()
    writers = spdl_torch.DataLoader([1]), spdl_torch.PipelineDataset(stages)
    with SQLiteStatsWriter(tmp_path / "run.db"):
        pass
    with closing(sqlite3.connect(tmp_path / "run.db")) as file:
        (version,) = file.execute("PRAGMA user_version").fetchone()
    page = (ROOT / "docs/reference/versions.md").read_text(encoding="utf-8")
    states = [each.state_dict()["version"] for each in writers]
    assert "| {}, {} | `ValueError` |".format(*states) in page
    assert f"#the-file) | {version} | `ValueError` |" in page


def test_figures_of_a_stage_are_those_of_the_code():
    """``python docs/figures.py`` would leave the page as it is."""
    page = (ROOT / "docs/reference/statistics.md").read_text(encoding="utf-8")
    assert runpy.run_path(str(ROOT / "docs/figures.py"))["with_table"](page) == page


def test_every_page_is_listed_and_every_public_module_has_one():
    """docs/index.md leads to all; the site shows the docstrings of a module's names on its page."""
    index = ROOT / "docs" / "index.md"
    linked = set(re.findall(r"\]\(([^)#\s]+\.md)", index.read_text(encoding="utf-8")))
    there = {os.path.relpath(p, index.parent) for p in PAGES if (ROOT / "docs") in p.parents}
    assert there - {"index.md"} == linked
    pages = pages_of_site()
    assert {*pages.values()} <= {page.stem for page in REFERENCE}
    assert {each for each in MODULES if not each.startswith("spdl_torch.spdl")} <= pages.keys()


@functools.cache
def documented_words():
    """Every name that a reference page sets as code."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in REFERENCE)
    spans = re.findall(r"^```.*?^```|`[^`\n]+`", text, flags=re.S | re.M)
    return set(re.findall(r"-{0,2}[A-Za-z_]\w*(?:-\w+)*", " ".join(spans)))


WITH_LIBRARIES = {f"spdl_torch.{name}" for name in ("transformers", "accelerate", "lightning")}
"""What these are for need not be installed, and is large."""


def names_under(heading):
    """Those of a list of the surface: of a module, and what its functions take, if it is one of
    functions; arguments; commands and their options."""
    names = [re.sub(r"^\*, | = .*", "", each) for each in lists()[heading]]
    if heading == "commands":
        words = [each.split() for each in names]
        return [each[-1] for each in words if len(each) == 1 or each[-1].startswith("--")]
    if heading in ("spdl_torch.io", "spdl_torch.data"):
        home = importlib.import_module(heading)
        functions = filter(inspect.isfunction, [getattr(home, name) for name in names])
        taken = [name for each in functions for name in inspect.signature(each).parameters]
        names += [name for name in taken if not name.startswith("_")]
    return names


NAMES = {
    **{each: names_under(each) for each in (*MODULES, *CALLABLES, "commands")},
    "the benchmark": [name for a in benchmark.parser()._actions for name in a.option_strings],
}


@pytest.mark.parametrize("what", NAMES)
def test_name_is_in_the_reference_when_it_is_public(what):
    """Names, arguments and options can all be looked up."""
    assert NAMES[what], f"{what}: the test found nothing to check"
    missing = [name for name in NAMES[what] if name not in documented_words()]
    assert not missing, f"of {what}, not in docs/reference: {missing}"


def test_loader_shows_nothing_that_is_neither_torch_s_nor_in_the_reference():
    """A subclass of the user's may give any other name its own meaning."""
    dataset = TensorDataset(torch.arange(4))
    shown = {*dir(spdl_torch.DataLoader(dataset))} - {*dir(TorchLoader(dataset))}
    pages = "autotune", "dataloader", "loader_states"
    text = " ".join((ROOT / f"docs/reference/{each}.md").read_text("utf-8") for each in pages)
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`\n]+`", text))))
    assert {name for name in shown if not name.startswith("_")} <= named


@pytest.mark.parametrize("module", [each for each in MODULES if each not in WITH_LIBRARIES])
def test_method_has_a_docstring_when_it_is_public(module):
    """What a user can call on our objects says what it does."""
    for name in lists()[module]:
        cls = getattr(importlib.import_module(module), name)
        if inspect.isclass(cls) and cls.__module__.startswith("spdl_torch"):
            for member, value in vars(cls).items():
                is_callable = inspect.isfunction(value) or isinstance(value, property)
                if is_callable and not member.startswith("_"):
                    assert inspect.getdoc(getattr(cls, member)), f"{name}.{member}"
