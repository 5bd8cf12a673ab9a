"""The statistics of a pool whose workers move."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...observe.verdict.placement import Placement
    from ...observe.verdict.report import Report
    from ...pipeline.recorder.flight_recorder import FlightRecorder
    from ...pipeline.recorder.timeline import Timeline
    from ...pipeline.stats.perf_stats import PipelineStats
    from ..fetching.bad_samples import SkippedSamples
    from ..workers.stats import PoolStats


class MovingStats:
    """The statistics of the present workers; the placements and the timeline of all so far."""

    def __init__(self, stats: PoolStats) -> None:
        self._now = stats
        # Replaced as a whole by the loop's thread, so that others read what belongs together.
        self._before: tuple[tuple[Report, ...], tuple[PoolStats, ...]] = ((), ())
        self._placements_before: tuple[Placement, ...] = ()  # in this epoch, in other pools
        self._recorders_before: list[FlightRecorder] = []

    def begin(self, stats: PoolStats) -> None:
        """Report these statistics in a new epoch."""
        self.lead(stats)
        self._before = ((), ())
        self._placements_before, self._recorders_before = (), []

    def lead(self, stats: PoolStats) -> None:
        """Report these statistics from now on."""
        stats.skipped = self._now.skipped
        last, leaving = self._before
        self._before = (last, (*leaving, self._now))
        self._now = stats

    def leave(self) -> None:
        """Keep what is known of the present workers, as others get the work."""
        self._placements_before = self.report().placements
        if self._now.recorder is not None:
            self._recorders_before.append(self._now.recorder)

    def drained(self) -> None:
        """Keep the statistics of those who left first: all their batches are handed out."""
        last, leaving = self._before
        if leaving:  # none once the epoch has ended
            self._before = ((*last, leaving[0].report()), leaving[1:])

    def reports_before(self) -> tuple[Report, ...]:
        """Return the statistics of those who had the work before in this epoch, in order."""
        last, leaving = self._before
        return (*last, *(stats.report() for stats in leaving))

    @property
    def skipped(self) -> SkippedSamples | None:
        """As ``EpochStats`` says."""
        return self._now.skipped

    @skipped.setter
    def skipped(self, skipped: SkippedSamples | None) -> None:
        self._now.skipped = skipped

    def snapshot(self) -> PipelineStats:
        """As ``EpochStats`` says, since the last move."""
        return self._now.snapshot()

    def report(self) -> Report:
        """As ``EpochStats`` says, since the last move; and where the workers lived before."""
        report = self._now.report()
        return replace(report, placements=(*self._placements_before, *report.placements))

    def timeline(self) -> Timeline | None:
        """As ``EpochStats`` says, of the whole epoch."""
        from ...pipeline.recorder.timeline import joined  # most epochs end without it

        now = self._now.timeline()
        before = [recorder.timeline() for recorder in self._recorders_before]
        return now if now is None else joined([*before, now])

    def end(self) -> None:
        """Keep the epoch's statistics as they are now."""
        self._before = (self.reports_before(), ())
        self._now.end()
