"""Gives the package the README as an index page needs it: hatchling's metadata hook.

In a copy of the project the README's links are relative, so that they work there. On an index page
they would lead nowhere; there they lead into the repository, at the release's tag.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)(\[[^\]]*\]\()(?![a-z]+:|#)([^)\s]+\))")


class Readme(MetadataHookInterface):
    """What ``[tool.hatch.metadata.hooks.custom]`` names."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the field ``readme``."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        links = with_whole_links(text, metadata["urls"]["Source"], f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": links}


def with_whole_links(text: str, repository: str, tag: str) -> str:
    """Return the page with each relative link leading into the repository; pictures as files."""

    def whole(found: re.Match[str]) -> str:
        bang, words, target = found.groups()
        return f"{bang}{words}{repository}/{'raw' if bang else 'blob'}/{tag}/{target}"

    return _LINK.sub(whole, text)
