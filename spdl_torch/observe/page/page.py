"""Reports as one HTML file that needs no network: sentences, a table, and pictures of charts.

The template is Jinja2's, which torch brings; it is imported here alone and only in functions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ...shown_text import printable_line
from ...whole_files import whole_file


def html_of(
    title: str,
    parts: Sequence[Mapping[str, Any]],
    *,
    charts: Sequence[tuple[str, str]] = (),
) -> str:
    """Return a page.

    parts: what it says of each report: a ``heading``; ``said``, sentences, each with a word before
        it; a table of ``headings``, shown with their ``meanings``, and ``rows``; and ``marked``,
        the first cell of the row that stands out.
    charts: the address of each image, with a sentence on it.
    """
    return str(_template().render(title=title, parts=parts, charts=charts))


def write_page(path: str | os.PathLike[str], html: str) -> Path:
    """Write a page to a file, which takes its name once it is complete; return its path. Missing
    folders are created.

    Raises: ValueError: a folder.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path}: a page must be a file, and this is a folder. Add a name to it.")
    with whole_file(path) as file:
        file.write(html.encode("utf-8", "replace"))  # names of files may be any bytes
    return path


@cache
def _template() -> Any:
    from jinja2 import Environment

    # What is from elsewhere, such as names of files and errors, is text; letters that control a
    # terminal are shown as such: a page may be looked at in one.
    environment = Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable_line(value) if type(value) is str else value,
    )
    return environment.from_string(Path(__file__).with_name("page.html").read_text("utf-8"))
