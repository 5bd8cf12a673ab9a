"""How the site is built from the pages beside this file: ``tox -e docs``."""

from __future__ import annotations

import re
from importlib import import_module
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import spdl_torch

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "spdl_torch"
author = project_copyright = "The spdl_torch authors"
version = release = spdl_torch.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
myst_heading_anchors = 4  # as GitHub makes them
# Several modules have a DataLoader; tests follow the links that leave docs/.
suppress_warnings = ["ref.python", "myst.xref_missing"]
html_theme = "furo"
html_title = f"spdl_torch {release}"
html_show_sourcelink = False

# Members of base classes of ours, and not of those of torch, Lightning and Python.
OTHERS = (
    "Dataset, IterableDataset, DataLoader, Sampler, DistributedSampler, DatasetFolder, Module, "
)
OTHERS += "Callback, Trainer, Accelerator, BaseException, tuple, Enum, object"
autodoc_default_options = {"members": True, "inherited-members": OTHERS}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
add_module_names = False

# What a reader copies is what a shell runs: without the prompt, and without what was printed.
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"

PAGES = {
    "spdl_torch": "dataloader",
    "spdl_torch.accelerate": "trainers",
    "spdl_torch.ray": "trainers",
    "spdl_torch.transformers": "trainers",
    "spdl_torch.autotune": "autotune",
    "spdl_torch.data": "packing_and_sampling",
    "spdl_torch.data.sources": "sources",
    "spdl_torch.io": "io",
    "spdl_torch.nn": "dataloader",
    "spdl_torch.lightning": "trainers",
    "spdl_torch.observe": "statistics",
    "spdl_torch.pipeline": "pipeline",
    "spdl_torch.data.subprocesses": "pipeline",
    "spdl_torch.testing": "testing",
    "spdl_torch.spdl.dataloader": "spdl",
    "spdl_torch.spdl.examples.sqlite_stats_logger": "spdl",
    "spdl_torch.spdl.io": "spdl",
    "spdl_torch.spdl.io.utils": "spdl",
    "spdl_torch.spdl.pipeline": "spdl",
    "spdl_torch.spdl.pipeline.defs": "spdl",
    "spdl_torch.spdl.source": "spdl",
    "spdl_torch.spdl.source.utils": "spdl",
    "spdl_torch.spdl.source.imagenet": "spdl",
    "spdl_torch.spdl.source.local_directory": "spdl",
}
"""The page of docs/reference that has the docstrings of each public module at its end."""


def docstrings_of(name: str) -> str:
    """Sphinx's directive for a module, without what an earlier one of ``PAGES`` has."""
    module, *earlier = map(import_module, [name, *takewhile(lambda each: each != name, PAGES)])
    known = [
        n for n in module.__all__ for e in earlier if getattr(e, n, None) is getattr(module, n)
    ]
    return f".. automodule:: {name}\n   :exclude-members: {', '.join(known)}\n"


def complete(app: Sphinx, docname: str, content: list[str]) -> None:
    """Add the docstrings to a page of the reference, and to the index the site's contents."""
    if modules := [m for m, page in PAGES.items() if docname == f"reference/{page}"]:
        directives = "\n".join(map(docstrings_of, modules))
        content[0] += f"\n## Docstrings\n\n```{{eval-rst}}\n{directives}\n```\n"
    if docname == "index":
        for caption, links in re.findall(r"^## (.+)\n\n((?:- .+\n)+)", content[0], flags=re.M):
            pages = "\n".join(re.findall(r"\((.+)\.md\)", links))
            content[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"


def as_written(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Show a docstring as ``help()`` does, below its first paragraph."""
    end = lines.index("") if "" in lines else len(lines)
    rest = [f"   {line}" for line in lines[end:] if any(lines[end:])]
    lines[end:] = ["", "::", "", *rest, ""] if rest else [""]


def setup(app: Sphinx) -> None:
    """Connect both."""
    app.connect("source-read", complete)
    app.connect("autodoc-process-docstring", as_written)
