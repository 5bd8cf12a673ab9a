"""Texts for a terminal or a log: figures, and what is from elsewhere, such as names and errors."""

from __future__ import annotations

import math
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


def shortened(text: str, most: int) -> str:
    """Return a text of ``most`` letters at most, the last three of a longer one as dots."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def short_repr(value: Any, most: int = 200) -> str:
    """Return the value's ``repr``, shortened; its type if that fails, as it does for what is nested
    deeply, and for an int with too many digits.
    """
    try:
        return shortened(repr(value), most)
    except Exception:
        return f"{type(value).__name__} object"


def percent(ratio: float) -> str:
    """Return ``4.2 %``, ``42 %``: two digits, all that a share of the time is worth."""
    return f"{100 * ratio:.1f} %" if ratio < 0.1 else f"{100 * ratio:.0f} %"


def shown_rate(per_second: float) -> str:
    """Return ``1,234``, ``12``, ``1.2``: as many digits as a speed is worth."""
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.2g}"


def shown_seconds(seconds: float) -> str:
    """Return ``12.3 s``, ``10 s``, ``0.12 s``. Never rounded up to the next tenth: 1.96 s are not
    2 s, where that is a limit.
    """
    if seconds < 1:
        return f"{min(seconds, 0.99):.2g} s"
    return f"{math.floor(10 * seconds + 1e-6) / 10:.1f}".removesuffix(".0") + " s"


def counted(number: int, what: str) -> str:
    """Return ``1 round``, ``2 rounds``, ``2 processes``."""
    if number == 1:
        return f"1 {what}"
    return f"{number} {what}es" if what.endswith("s") else f"{number} {what}s"


def _shown(letter: str) -> str:
    if letter.isprintable() or unicodedata.category(letter) == "Zs":  # a wide or a narrow space
        return letter
    return letter.encode("unicode_escape").decode("ascii")
