"""The content of a page, in plain values; each kind of section says how it is to be shown.

All times are seconds, on a clock of the page's own: 0 is the page's ``origin``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Format: TypeAlias = Literal["text", "count", "percent", "ms", "rate", "seconds"]
"""The meaning of a table's numbers: ratios 0 to 1 are ``percent``, seconds shown as milliseconds
``ms``."""

Tone: TypeAlias = Literal["heading", "verdict", "action", "note"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """One or more sentences, with a word in front."""

    word: str
    """``VERDICT``"""
    text: str
    tone: Tone = "note"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    name: str
    format: Format = "text"
    meaning: str = ""
    """A sentence shown when the pointer is on the name; "" = none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of values: numbers, texts, and None where there is none."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    marked: int | None = None
    """The number of a row that stands out; None = none does."""
    note: str = ""
    run: str = ""
    """The name of the run it shows, where a page has several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One curve of a chart."""

    name: str
    times: Sequence[float]
    values: Sequence[float]
    """NaN where there is none."""
    holds: Literal["since", "until"] = "until"
    """Whether a value is that of the interval ``since`` the time before, as a rate is, or holds
    ``until`` the next time, as the length of a queue does."""
    style: Literal["solid", "dashed", "dotted"] = "solid"
    colour: int = 0
    """The number of its colour, which the curves of one stage share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Curves over time."""

    title: str
    unit: str
    lines: Sequence[Line]
    is_share: bool = False
    """Whether the values are ratios, shown as percent from 0 to 100."""
    note: str = ""
    run: str = ""
    """The name of the run it shows, where a page has several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """The spans of one kind in a timeline, as columns of equal length."""

    kind: str
    """``Process``"""
    is_wait: bool = False
    is_inside: bool = False
    """Whether they lie inside other spans: they are drawn lower."""
    lanes: Sequence[int]
    """The numbers of their lanes."""
    starts: Sequence[float]
    stops: Sequence[float]
    about: Sequence[str]
    """A few words on each: ``item 12``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lanes:
    """A timeline: a lane for every worker."""

    title: str
    names: Sequence[str]
    spans: Sequence[Spans]
    note: str = ""
    run: str = ""
    """The name of the run it shows, where a page has several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """A moment or a span of time that concerns every chart of its run, such as a garbage
    collection.
    """

    name: str
    start: float
    stop: float
    run: str = ""
    """The name of the run it shows, where a page has several."""


Section: TypeAlias = Text | Table | Chart | Lanes


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """A whole page."""

    title: str
    sections: Sequence[Section]
    bands: Sequence[Band] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    """The data behind the sections, for programs that read the page: JSON types."""

    @property
    def has_charts(self) -> bool:
        """Whether it needs a library that draws."""
        return any(isinstance(section, Chart | Lanes) for section in self.sections)


def heading_of(section: Table | Chart | Lanes) -> str:
    """Return a section's title, with its run and its unit."""
    unit = f" ({section.unit})" if isinstance(section, Chart) else ""
    return f"{section.run}: {section.title}{unit}" if section.run else f"{section.title}{unit}"
