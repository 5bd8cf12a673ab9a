"""Cut a run into windows and their parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..machine.probes import probe_counters
from ..machine.readings import probes_between
from ..named_tuples import NamedTuple
from ..observe.verdict.intervals import interval_between, sum_of_intervals
from .window import Part

if TYPE_CHECKING:
    from ..engine.stats.perf_stats import PipelineStats
    from ..machine.readings import Probes

PARTS = 4
"""The number of readings of the consumer in a window; their spread gives the noise."""

_LEAST_ITEMS = 20
_LONGEST = 5
"""The factor by which a window may be extended if too few items come."""


class WindowReadings(NamedTuple):
    """The measurements of a window."""

    parts: list[Part]
    stats: PipelineStats
    probes: Probes


class Meter:
    """Cuts readings, taken several times a window, into complete windows.

    The part of a window right after a start or a change is not measured. If
    runs (epochs) are shorter than a window, it continues in the next one.
    """

    def __init__(self, window_seconds: float) -> None:
        self._seconds = window_seconds
        self.restart(skip=1)

    def restart(self, *, skip: int = 0) -> None:
        """Discard the measurements and begin a window whose first ``skip`` parts are left
        out.
        """
        self._first: PipelineStats | None = None
        self._last = (0.0, 0, 0.0)
        self._num_to_skip = skip
        self._parts: list[Part] = []
        self._intervals: list[PipelineStats] = []
        self._probes_before = probe_counters()

    def look(self, stats: PipelineStats, num_items: int) -> WindowReadings | None:
        """Return the window that is complete now, if any; ``restart`` begins the next one.

        num_items: the number of items that the consumer has taken since the run began.
        """
        self._measure(stats, num_items)
        elapsed = sum(part.elapsed for part in self._parts)
        taken = sum(part.num_items for part in self._parts)
        if self._first is None or not self._parts or elapsed < 0.95 * self._seconds:
            return None
        if taken < _LEAST_ITEMS and elapsed < _LONGEST * self._seconds:
            return None
        probes = probes_between(self._probes_before, probe_counters())
        stats = sum_of_intervals([*self._intervals, interval_between(self._first, stats)])
        return WindowReadings(self._parts, stats, probes)

    def end_run(self, stats: PipelineStats, num_items: int) -> None:
        """Take a run's last statistics; the window continues with the next run."""
        if self._first is None:
            return
        self._measure(stats, num_items)
        if self._first is not None and self._parts:
            self._intervals.append(interval_between(self._first, stats))
        self._first = None

    @property
    def is_within_run(self) -> bool:
        """Whether a run has been read and has not ended, so its statistics are incomplete."""
        return self._first is not None

    def _measure(self, stats: PipelineStats, num_items: int) -> None:
        now = stats.elapsed, num_items, stats.consumer_wait_ratio * stats.elapsed
        then, self._last = self._last, now
        if self._first is None:
            self._first = stats
        elif self._num_to_skip:
            self._num_to_skip -= 1
            self._first = stats
        elif now[0] > then[0]:
            self._parts.append(Part(now[0] - then[0], now[1] - then[1], now[2] - then[2]))
