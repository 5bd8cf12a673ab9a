"""Tables of events by name: decisions, skipped samples, and whatever else a run notes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .content import Column, Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SKIPPED = "skipped"
"""The name of an event: a sample that failed and was left out of its batch."""

_MOST_ROWS = 500

_TITLES = {
    "decision": "Decisions of tuning",
    "failure": "Failures",
    SKIPPED: "Skipped samples",
}


class Event(NamedTuple):
    """Something that happened at one moment."""

    time: float
    """Seconds on the page's clock."""
    name: str
    details: Mapping[str, Any]


def event_tables(events: Iterable[Event]) -> list[Table]:
    """Return a table for each event name, with a column for each of its details."""
    by_name: dict[str, list[Event]] = {}
    for event in sorted(events, key=lambda each: each.time):
        by_name.setdefault(event.name, []).append(event)
    return [_table(name, those) for name, those in sorted(by_name.items())]


def title_of(name: str) -> str:
    """Return the title of the table of the events with this name."""
    return _TITLES.get(name) or _words(name)


def _table(name: str, events: Sequence[Event]) -> Table:
    # A detail that no event has, such as a remedy where there is none, gets no column.
    given = [item for each in events for item in each.details.items()]
    keys = list(dict.fromkeys(str(key) for key, value in given if value not in ("", None)))
    shown = events[-_MOST_ROWS:]
    left_out = len(events) - len(shown)
    return Table(
        title=title_of(name),
        columns=[Column("at s", "seconds"), *(Column(_words(key)) for key in keys)],
        rows=[(event.time, *(_value(event.details.get(key)) for key in keys)) for event in shown],
        note=f"The last {len(shown)}; {left_out} earlier ones are left out." if left_out else "",
    )


def _words(name: str) -> str:
    """Return a name as words: ``moved_to`` becomes ``Moved to``."""
    words = name.replace("_", " ").strip()
    return words[:1].upper() + words[1:]


def _value(value: Any) -> Any:
    """Return a detail as a value of a table: numbers are shortened, the rest becomes text."""
    if value is None or isinstance(value, bool | int):
        return value
    return f"{value:.6g}" if isinstance(value, float) else str(value)
