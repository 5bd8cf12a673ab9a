"""Links to the documentation of other projects, where the network has their lists of names.

Without them the site is built all the same, and their names stay words. The build says which.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from docutils import nodes
from entries import is_in_a_link
from sphinx.ext.intersphinx import InventoryAdapter
from sphinx.util import logging

if TYPE_CHECKING:
    from sphinx.application import Sphinx

NO_NAMES = "_sphinx/no_names.inv"
"""An empty list, which intersphinx takes where it cannot fetch one: a miss is then no warning."""

MAPPING = {
    "lightning": ("https://lightning.ai/docs/pytorch/stable", (None, NO_NAMES)),
    "numpy": ("https://numpy.org/doc/stable", (None, NO_NAMES)),
    "python": ("https://docs.python.org/3", (None, NO_NAMES)),
    "torch": ("https://docs.pytorch.org/docs/stable", (None, NO_NAMES)),
    "torchvision": ("https://docs.pytorch.org/vision/stable", (None, NO_NAMES)),
}

_WHOLE_NAME = re.compile(rf"(?:{'|'.join(MAPPING)})(?:\.\w+)+(?=\(|$)")
"""``torch.utils.data.DataLoader``: with the package in front, so that it is nobody else's."""


def say_what_is_missing(app: Sphinx) -> None:
    """Sphinx's event ``builder-inited``, after intersphinx has fetched."""
    there = InventoryAdapter(app.env).named_inventory
    missing = sorted(name for name in MAPPING if not there.get(name))
    if missing:
        logging.getLogger(__name__).info(
            "The lists of names of %s could not be fetched: their names are words in this "
            "build, not links.",
            ", ".join(missing),
        )


def link_names(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Sphinx's event ``doctree-resolved``: a whole name set as code leads to its project's page."""
    for literal in list(doctree.findall(nodes.literal)):
        found = _WHOLE_NAME.match(literal.astext())
        item = found and not is_in_a_link(literal) and _item(app, found[0])
        if item:
            link = nodes.reference("", "", literal.deepcopy(), internal=False, refuri=item.uri)
            link["reftitle"] = f"{item.project_name} {item.project_version}".strip()
            literal.replace_self(link)


def _item(app: Sphinx, name: str) -> Any:
    """What the lists say of a name, whatever kind of Python's it is of."""
    inventory = InventoryAdapter(app.env).main_inventory
    kinds = (names for kind, names in inventory.items() if kind.startswith("py:"))
    return next((names[name] for names in kinds if name in names), None)
