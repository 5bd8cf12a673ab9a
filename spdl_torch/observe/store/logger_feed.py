"""Feed a loader's statistics to a logger, interval after interval."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from ..verdict.intervals import sum_of_intervals
from .metrics import metrics_of

if TYPE_CHECKING:
    from ...engine.stats.perf_stats import PipelineStats
    from ..verdict.placement import Placement
    from ..verdict.report import Report
    from .loggers import Logger


class LoggerFeed:
    """Gathers intervals on the loop's thread and logs their sum on another."""

    def __init__(self, logger: Logger, start: str) -> None:
        self.logger = logger
        self._start = start
        self._lock = threading.Lock()  # guards the gathered intervals, never while the logger works
        self._gathered: list[PipelineStats] = []
        self._report: Report | None = None
        self._step = 0
        self._logged_placement: Placement | None = None

    def gather(self, interval: PipelineStats, report: Report, step: int) -> None:
        """Add an interval. ``report``: as it was at the interval's end."""
        with self._lock:
            self._gathered = [_sum([*self._gathered, interval])]
            self._report, self._step = report, step

    def log(self) -> None:
        """Log the intervals since the last time, if there are any."""
        with self._lock:
            gathered, self._gathered = self._gathered, []
            report, step = self._report, self._step
        if not gathered or report is None:
            return
        report = replace(report, stats=gathered[0])
        self.logger.log(metrics_of(report, self._start), step)
        placement = report.placement
        if placement is not None and not placement.is_as(self._logged_placement):
            self._logged_placement = placement
            self.logger.text(f"{self._start}/placement", str(placement), step)


def _sum(intervals: list[PipelineStats]) -> PipelineStats:
    names = [stage.name for stage in intervals[-1].stages]
    alike = [each for each in intervals if [stage.name for stage in each.stages] == names]
    return sum_of_intervals(alike)
