"""The site's entries: every public module has its page, and every public name is on it."""

from __future__ import annotations

import ast
import re

from test_docs import ROOT
from test_surface import MODULES, lists

SPHINX = ROOT / "docs" / "_sphinx"
REFERENCE = ROOT / "docs" / "reference"


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
