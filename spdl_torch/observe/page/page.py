"""Reports as one HTML file that needs no network: sentences, tables, and pictures of charts.

The template is Jinja2's, which torch brings; it is imported here alone and only in functions.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ...shown_text import printable_line
from ...whole_files import whole_file

_MOST_ROWS = 500

_TITLES = {"decision": "Decisions of tuning", "failure": "Failures", "skipped": "Skipped samples"}


class Event(NamedTuple):
    """Something that happened at one moment."""

    time: float
    """Seconds since the run's start."""
    name: str
    details: Mapping[str, Any]


def html_of(
    title: str,
    parts: Sequence[Mapping[str, Any]],
    *,
    charts: Sequence[tuple[str, str]] = (),
    tables: Sequence[Mapping[str, Any]] = (),
    is_fragment: bool = False,
) -> str:
    """Return a page, or its content alone for a notebook's cell.

    parts: what it says of each report: a ``heading``; ``said``, sentences, each with a word before
        it; a table of ``headings``, shown with their ``meanings``, and ``rows``; and ``marked``,
        the first cell of the row that stands out.
    charts: the address of each image, with a sentence on it.
    tables: those of :func:`event_tables`.
    """
    content = {"title": title, "parts": parts, "charts": charts, "tables": tables}
    return str(_template().render(**content, is_fragment=is_fragment))


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


def event_tables(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return a table for each event name, with a column for each of its details: its ``title``,
    ``headings``, ``rows`` of texts, and a ``note``."""
    by_name: dict[str, list[Event]] = {}
    for event in sorted(events, key=lambda each: each.time):
        by_name.setdefault(event.name, []).append(event)
    return [_table(name, those) for name, those in sorted(by_name.items())]


def _table(name: str, events: Sequence[Event]) -> dict[str, Any]:
    # A detail that no event has, such as a remedy where there is none, gets no column.
    given = [item for each in events for item in each.details.items()]
    keys = list(dict.fromkeys(str(key) for key, value in given if value not in ("", None)))
    shown = events[-_MOST_ROWS:]
    left_out = len(events) - len(shown)
    return {
        "title": _TITLES.get(name) or _words(name),
        "headings": ["at s", *map(_words, keys)],
        "rows": [
            [f"{event.time:,.3f}", *(_shown(event.details.get(key)) for key in keys)]
            for event in shown
        ],
        "note": f"The last {len(shown)}; {left_out} earlier ones are left out." * (left_out > 0),
    }


def _words(name: str) -> str:
    """Return a name as words: ``moved_to`` becomes ``Moved to``."""
    words = name.replace("_", " ").strip()
    return words[:1].upper() + words[1:]


def _shown(value: Any) -> str:
    if value is None:
        return "\N{EN DASH}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
