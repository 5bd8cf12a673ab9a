"""The statistics of one epoch, read interval by interval."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .intervals import after_pause, interval_between, sum_of_intervals
from .report import make_report

if TYPE_CHECKING:
    from ...engine.statistics import PipelineStats
    from .report import Report


class EpochIntervals:
    """The statistics of a training loader in one epoch: its intervals, without the pauses."""

    def __init__(self) -> None:
        self.before: Report | None = None
        """The reading at which the present interval began; None = the epoch's beginning."""
        self.unlogged: list[PipelineStats] = []
        """The intervals that nobody has logged; whoever does clears it."""
        self._epoch: list[PipelineStats] = []
        self._last: Report | None = None

    def end(self, report: Report) -> bool:
        """End the interval from ``before`` here; return False where no time has passed."""
        before = self.before.stats if self.before is not None else None
        if before == report.stats:
            return False  # the pass is over, and its statistics no longer change
        interval = interval_between(before, report.stats)
        self.unlogged.append(interval)
        self._epoch = [sum_of_intervals([*self._epoch, interval])]
        self.before = self._last = report
        return True

    def go_on(self, report: Report) -> None:
        """End the pause that began with the end of the last interval."""
        if self.before is not None:
            stats = after_pause(self.before.stats, report.stats)
            report = replace(report, stats=stats)
        self.before = report

    def report(self) -> Report:
        """Return the report over the epoch."""
        assert self._last is not None, "made by the first interval"
        last = self._last
        report = make_report(sum_of_intervals(self._epoch), last.probes, pooled=last.pooled)
        return replace(report, placements=last.placements)
