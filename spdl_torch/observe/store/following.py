"""What a loader does from one look to the next: its intervals, the samples that it leaves out, and
the decisions of its tuning. Recording looks by a thread, Lightning's monitor at its hooks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ...engine.failures import SKIPPED, key_text
from ...locks import RLock
from .entries import DECISION_EVENT, EventLogEntry, interval_entry

if TYPE_CHECKING:
    from ...engine.statistics import PipelineStats
    from ..verdict.report import Report
    from .entries import LogEntry

_LOADED_AHEAD = ("num_tasks", "num_failures", "num_dropped", "num_items", "good_ns", "cpu_ns",
                 "calls")  # fmt: skip


class Interval(NamedTuple):
    """What a loader did between two looks, or in several such intervals."""

    stats: PipelineStats
    report: Report
    """On its pass so far, as it was at the interval's end."""

    def after(self, earlier: Interval | None) -> Interval:
        """Return both together; an interval of other stages begins anew."""
        if earlier is None:
            return self
        then, now = ([stage.name for stage in each.stats.stages] for each in (earlier, self))
        return self._replace(stats=earlier.stats + self.stats) if then == now else self

    def judged(self) -> Report:
        """Return the report on it."""
        return replace(self.report, stats=self.stats)


class Follower:
    """Looks at one loader, again and again. One thread at a time calls it, unless it writes."""

    def __init__(
        self,
        source: Any,
        number: int,
        name: str,
        *,
        log: Callable[[LogEntry], Any] | None = None,
        hear: Callable[[Interval], Any] | None = None,
        from_now: bool = False,
    ) -> None:
        """``number``, ``name``: of the loader among those of the run. ``log``: gets the entries for
        a file. ``hear``: gets each interval. ``from_now``: what it did up to now is not new."""
        self.source, self.number, self.name = source, number, name
        self._log: Callable[[LogEntry], Any] = log or (lambda entry: None)
        self._tell: Callable[[Interval], Any] = hear or (lambda interval: None)
        report = report_of(source) if from_now else None
        self._before = None if report is None else report.stats
        self._ahead: PipelineStats | None = None  # of a pause: what counts though its time does not
        self._last_skipped: Any = next(reversed(_skipped_of(source)), None) if from_now else None
        self._last_decision = time.time() if from_now else 0.0
        # Held from the end of one pass to the start of the next: a reading in between would be of
        # the old pass again, and be taken for the first of the new one. Re-entrant: on one thread,
        # a pass may begin while another is being begun.
        self.lock = RLock()

    def news(self) -> Interval | None:
        """Return the interval since the last one ended; None = nothing is new."""
        report, before = report_of(self.source), self._before
        if report is None or not report.stats.stages:
            return None
        if before is not None and report.stats.elapsed_ns <= before.elapsed_ns:
            # The pass is over, and its statistics no longer change. They may be a little older
            # than the last reading, if that was taken while the loop's thread took the final.
            return None
        stats = report.stats.since(before)
        if self._ahead is not None and stats is not report.stats:
            stats = self._ahead + stats
        return Interval(stats, report)

    def write(self) -> None:
        """End the interval here: hand it, and what else is new, to whoever wants it."""
        with self.lock:
            interval = self.news()
            if interval is not None:
                stats, report = interval
                self._before, self._ahead = report.stats, None
                whose: Any = {"number": self.number, "name": self.name}
                self._log(interval_entry(report, stats, time.time(), **whose))
                self._tell(interval)
            for event in self._events():
                self._log(event)

    def begin_pass(self) -> None:
        """Let the next reading be of a new pass, which begins at zero."""
        self._before = self._ahead = None

    def end_pause(self) -> None:
        """Leave out the time since the last look. Items loaded ahead in it count, so that the sum
        misses none."""
        report = report_of(self.source)
        if report is not None:
            paused, self._before = report.stats.since(self._before), report.stats
            self._ahead = None if paused is report.stats else _without_time(paused)

    def _events(self) -> Iterator[EventLogEntry]:
        """Yield an event for each sample that was left out, and each decision, since the last
        look."""
        of_own = {"pipeline": self.number}
        samples = _skipped_of(self.source)
        # The list keeps only the last thousand, and begins anew with each epoch: its length says
        # nothing.
        places = (place for place, each in enumerate(samples, 1) if each is self._last_skipped)
        for sample in samples[next(places, 0) :]:
            details = {"key": key_text(sample.key), "stage": sample.stage}
            details["error"] = str(sample.error)
            yield EventLogEntry(time.time(), SKIPPED, of_own | details)
            self._last_skipped = sample
        for decision in getattr(self.source, "decisions", ()):
            if decision.timestamp > self._last_decision:
                self._last_decision = decision.timestamp
                details = of_own | decision.as_details()
                yield EventLogEntry(decision.timestamp, DECISION_EVENT, details)


def report_of(source: Any) -> Report | None:
    """Return a loader's report; None = nothing was loaded yet, or it keeps no statistics."""
    try:
        report: Report = source.report()
    except RuntimeError:
        return None
    return report


def _without_time(stats: PipelineStats) -> PipelineStats:
    """Return what was done alone, which took no time."""
    stages = []
    for stage in stats.stages:
        kept = {name: getattr(stage, name) for name in ("name", "concurrency", *_LOADED_AHEAD)}
        stages.append(type(stage)(**kept))
    counts = {name: count for name, count in stats.counts.items() if name != "shards/wait_ms"}
    return replace(stats, elapsed_ns=0, waited_ns=0, stages=tuple(stages), counts=counts)


def _skipped_of(loader: Any) -> Sequence[Any]:
    return getattr(loader, "skipped", ())
