"""Makes the site's contents from docs/index.md: its headings, and the lists of links below them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx


def add_contents(app: Sphinx, docname: str, content: list[str]) -> None:
    """Sphinx's event ``source-read``: a hidden table of contents for each heading."""
    if docname != app.config.root_doc:
        return
    heading, trees = "", dict[str, list[str]]()
    for line in content[0].splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        elif found := re.match(r"- \[(.+)\]\((.+)\.md\)", line):
            title = found[1].replace("`", "")
            trees.setdefault(heading, []).append(f"{title} <{found[2]}>")
    for caption, pages in trees.items():
        options = f":hidden:\n:caption: {caption}\n"
        content[0] += f"\n```{{toctree}}\n{options}\n" + "\n".join(pages) + "\n```\n"
