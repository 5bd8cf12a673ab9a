"""The page of a measured run, or of several pipelines of one, and beside another run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..page.content import Page, Text
from ..store.stored_run import unit_of
from ..verdict.comparison import compare, sections_of_comparison, why_not_compared
from ..verdict.report import sections_of
from .json_file import OURS
from .sections import OverTime, first_moment, sections_of_trace, turns_of_training

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..page.content import Section, Table
    from ..store.run_sections import StoredRun
    from ..verdict.comparison import Comparison
    from ..verdict.report import Report


@dataclass(frozen=True)
class MeasuredRun:
    """Everything that is known about one pipeline in one run."""

    report: Report
    name: str
    """The name for people: of a file, or of a pipeline in one."""
    run: StoredRun | None = None
    """The run in a statistics file; None = it is not in one."""
    trace: dict[str, Any] | None = None
    """None = only sums are known, no single tasks."""

    @property
    def rank(self) -> int:
        """The rank of the process that ran it."""
        if self.run is not None:
            return int(self.run.facts["rank"])
        return 0 if self.trace is None else int(self.trace[OURS]["profiles"][0]["rank"])

    @cached_property
    def origin(self) -> float:
        """The start, seconds since 1970."""
        starts = [] if self.run is None else [self.run.origin]
        if self.trace is not None:
            starts.append(first_moment(self.trace))
        return min(starts, default=0.0)

    def intervals(self) -> list[tuple[int, float]]:
        """Return batches and seconds of consecutive parts of the run."""
        if self.run is not None:
            return self.run.intervals()
        return [] if self.trace is None else turns_of_training(self.trace)

    def facts(self) -> list[Text]:
        """Return where the statistics are from, if they were stored."""
        return [] if self.run is None else [self.run.heading()]

    def over_time(self, run: str) -> OverTime:
        """Return the sections that concern single moments; ``run``: the name to show."""
        found = OverTime()
        if self.trace is not None:
            found = sections_of_trace(self.trace, self.origin)
        if self.run is not None:
            tables, bands = self.run.events(self.origin)
            found += OverTime(self.run.charts(self.origin, unit_of(self.report)), tables, bands)
        return found.named(run)


def comparison_of(run: MeasuredRun, other: MeasuredRun) -> Comparison | None:
    """Compare a run with another one; None where too little of one was measured."""
    differences = []
    if run.run is not None and other.run is not None:
        differences = run.run.differences(other.run)
    return compare(
        run.report,
        other.report,
        run.intervals(),
        other.intervals(),
        other_name=other.name,
        differences=differences,
    )


def too_little_of(run: MeasuredRun, other: MeasuredRun) -> str:
    """Return why :func:`comparison_of` gave None, as a sentence."""
    return why_not_compared(run.intervals(), other.intervals(), other.name, unit_of(run.report))


def page_of(
    pairs: Sequence[tuple[MeasuredRun, MeasuredRun | None]], not_compared: Sequence[str] = ()
) -> Page:
    """Return the page of one or several pipelines, each with the run to compare it with or None.

    not_compared: sentences on pipelines that have no partner.

    Each run's time counts from its own start, so that two of them can be laid side by side.
    """
    texts: list[Section] = []
    shown = OverTime()
    for run, other in pairs:
        if len(pairs) > 1:
            texts.append(Text(word=run.name, text="", tone="heading"))
        texts += [*run.facts(), *sections_of(run.report)]
        own = run.over_time(run.name if other or len(pairs) > 1 else "")
        if other is not None:
            texts += _compared(run, other)
            own = own.beside(other.over_time(other.name))
        shown += own
    texts += [Text(word="COMPARED", text=sentence) for sentence in not_compared]
    return Page(
        title=f"Loading: {', '.join(run.name for run, _ in pairs)}",
        sections=[*texts, *shown.charts, *shown.tables],
        bands=shown.bands,
        figures={"reports": [run.report.as_dict() for run, _ in pairs]},
    )


def _compared(run: MeasuredRun, other: MeasuredRun) -> list[Text | Table]:
    comparison = comparison_of(run, other)
    if comparison is None:
        return [Text(word="COMPARED", text=too_little_of(run, other))]
    return sections_of_comparison(comparison, run.report, other.report)
