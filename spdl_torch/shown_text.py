"""Texts from elsewhere, for a terminal or a log: names of stages, what a file holds, errors."""

from __future__ import annotations

import textwrap
import unicodedata
from typing import Any

COLUMNS = 99
"""The width of a terminal, less one."""


def wrapped(text: str, label: str = "") -> str:
    """Return a text in lines that a terminal shows whole, the first after ``label`` and the others
    indented by as much. Long words, such as paths, stay whole.
    """
    return textwrap.fill(
        text,
        COLUMNS,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_long_words=False,
        break_on_hyphens=False,
    )


def printable(text: str) -> str:
    """Return a text without characters that control a terminal or turn the direction of writing:
    each is shown as in its ``repr``, such as ``\\x1b``. Ends of lines stay.
    """
    return "\n".join(map(printable_line, text.split("\n")))


def printable_line(text: str) -> str:
    """Return a text as ``printable`` does, in one line: an end of a line is shown as ``\\n``."""
    return text if text.isprintable() else "".join(map(_shown, text))


def printable_content(content: Any) -> Any:
    """Return the content of a JSON file with every text in it as ``printable_line`` returns it."""
    if isinstance(content, str):
        return printable_line(content)
    if isinstance(content, dict):
        return {printable_line(key): printable_content(value) for key, value in content.items()}
    if isinstance(content, list):
        return list(map(printable_content, content))
    return content


def _shown(letter: str) -> str:
    if letter.isprintable() or unicodedata.category(letter) == "Zs":  # a wide or a narrow space
        return letter
    return letter.encode("unicode_escape").decode("ascii")
