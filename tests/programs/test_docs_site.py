"""The site's entries: what a docstring says is in them, and every public module has its page."""

from __future__ import annotations

import ast
import importlib
import re
import sys

import pytest
from test_docs import ROOT
from test_surface import MODULES, lists

SPHINX = ROOT / "docs" / "_sphinx"
REFERENCE = ROOT / "docs" / "reference"


@pytest.fixture(scope="module")
def house_docstrings():
    """The part of the site that reads docstrings; it needs no Sphinx."""
    sys.path.insert(0, str(SPHINX))
    try:
        yield importlib.import_module("house_docstrings")
    finally:
        sys.path.remove(str(SPHINX))


EXAMPLE = """Load pictures. Blocks.

They are cropped. Raises: as ``other``, and
whenever it likes.

Args:
    width, height: pixels, at
        least 1.
    crop: None = whole.
Returns: uint8, shape
    (N, 3, H, W).
Raises: DecodeError: no picture; try another; OSError, ValueError: a path
    that cannot be read.

Stopping: ends at once.
"""

ENTRY = """Load pictures. Blocks.

They are cropped.

:Raises:
   as ``other``, and
   whenever it likes.
:Parameters:
   - ``width``, ``height``: pixels, at
     least 1.
   - ``crop``: None = whole.
:Returns:
   uint8, shape
   (N, 3, H, W).
:Raises:
   - ``DecodeError``: no picture; try another
   - ``OSError``, ``ValueError``: a path
     that cannot be read.

**Stopping:** ends at once.
"""


def test_sections_become_fields(house_docstrings):
    """Arguments and errors become lists; what is inside of prose becomes a section, too."""
    assert "\n".join(house_docstrings.fields_of(EXAMPLE.splitlines())).rstrip() == ENTRY.rstrip()


def test_arguments_need_no_title(house_docstrings):
    """Lines that begin with a parameter's name, where the docstring has no ``Args``."""
    lines = ["Give it.", "", "first, second,", "    third: numbers.", "fourth: a text."]
    parameters = ["first", "second", "third", "fourth"]
    assert house_docstrings.fields_of(lines, parameters)[2:] == [
        ":Parameters:",
        "   - ``first``, ``second``, ``third``: numbers.",
        "   - ``fourth``: a text.",
        "",
    ]


def pages_of_modules():
    """``PAGES``, without Sphinx."""
    tree = ast.parse((SPHINX / "entries.py").read_text(encoding="utf-8"))
    (pages,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PAGES"
    )
    return pages


def test_every_public_name_is_on_a_page_of_its_module():
    """As code; otherwise it has no place for its entry, and the site is not built."""
    missing = []
    own = {each for each in MODULES if not each.startswith("spdl_torch.spdl")}
    for module in own & pages_of_modules().keys():
        pages = [REFERENCE / f"{page}.md" for page in pages_of_modules()[module]]
        text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
        code = " ".join(re.findall(r"^```.*?^```|`[^`\n]+`", text, flags=re.S | re.M))
        names = set(lists()[module]) - {"__version__"}
        missing += [f"{module}.{name}" for name in names - set(re.findall(r"\w+", code))]
    assert not missing


def test_every_public_module_has_a_page():
    """And every page that is named there exists."""
    pages = pages_of_modules()
    there = {path.stem for path in (ROOT / "docs" / "reference").glob("*.md")}
    assert {page for found in pages.values() for page in found} <= there
    own = {each for each in MODULES if not each.startswith("spdl_torch.spdl")}
    assert own <= pages.keys()
