"""How the site is built from the pages beside this file: ``tox -e docs``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_sphinx"))

import entries  # noqa: E402  # after its folder is on the path
import house_docstrings  # noqa: E402
import navigation  # noqa: E402
import other_docs  # noqa: E402

import spdl_torch  # noqa: E402

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "spdl_torch"
author = "The spdl_torch authors"
project_copyright = author
version = release = spdl_torch.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.intersphinx", "sphinx_copybutton"]
exclude_patterns = ["_sphinx"]
nitpicky = True

# The anchors of headings as GitHub makes them.
myst_heading_anchors = 4

# A long signature has one parameter a line, with its type; the list below it has what the docstring
# says of each.
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
python_display_short_literal_types = True
add_module_names = False
toc_object_entries_show_parents = "hide"

# The torch, numpy and Lightning that names belong to; without the network they stay words.
intersphinx_mapping = other_docs.MAPPING
intersphinx_timeout = 10

# What a reader copies is what a shell runs: without the prompt, and without what was printed.
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
copybutton_line_continuation_character = "\\"

html_theme = "furo"
html_title = f"spdl_torch {release}"
html_copy_source = False
html_show_sourcelink = False
pygments_style = "friendly"


def setup(app: Sphinx) -> None:
    """Connect what docs/_sphinx/ adds."""
    app.connect("builder-inited", entries.import_everything)
    app.connect("builder-inited", other_docs.say_what_is_missing, priority=900)
    app.connect("source-read", navigation.add_contents)
    app.connect("source-read", entries.add_entries)
    app.connect("autodoc-process-signature", entries.sign)
    app.connect("autodoc-process-docstring", house_docstrings.process)
    app.connect("missing-reference", entries.resolve_missing)
    app.connect("doctree-resolved", entries.link_names)
    app.connect("doctree-resolved", other_docs.link_names)
