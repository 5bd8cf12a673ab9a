"""The page of a measured run, or of several pipelines of one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..page.content import Page, Text
from ..store.stored_run import unit_of
from ..verdict.report import sections_of
from .json_file import OURS
from .sections import OverTime, first_moment, sections_of_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..page.content import Section
    from ..store.run_sections import StoredRun
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


def page_of(runs: Sequence[MeasuredRun]) -> Page:
    """Return the page of one or several pipelines. Each run's time counts from its own start."""
    texts: list[Section] = []
    shown = OverTime()
    for run in runs:
        if len(runs) > 1:
            texts.append(Text(word=run.name, text="", tone="heading"))
        texts += [*run.facts(), *sections_of(run.report)]
        shown += run.over_time(run.name if len(runs) > 1 else "")
    return Page(
        title=f"Loading: {', '.join(run.name for run in runs)}",
        sections=[*texts, *shown.charts, *shown.tables],
        bands=shown.bands,
        figures={"reports": [run.report.as_dict() for run in runs]},
    )
