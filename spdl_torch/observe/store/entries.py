"""Log entries of a run: statistics of a stage's tasks, of a queue, of a loader in an interval, and
events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from ...engine.hooks import StageInfo
from ...engine.statistics import QueuePerfStats
from ..verdict.causes import num_delivered
from ..verdict.report import besides_of

if TYPE_CHECKING:
    from ...engine.statistics import PipelineStats, TaskPerfStats
    from ..verdict.report import Report

DECISION_EVENT = "decision"
"""Name of the event that records a decision of tuning."""


@dataclass(frozen=True, slots=True)
class TaskStatsLogEntry:
    """Statistics of one stage's tasks in one interval."""

    timestamp: float
    """End of the interval; seconds since 1970."""
    name: str
    """The stage, as ``str(StageInfo)`` prints it: ``0:1:decode[10]``."""
    stats: TaskPerfStats
    num_dropped: int | None = None
    """The number of these tasks whose op returned None; None = not counted."""


@dataclass(frozen=True, slots=True)
class QueueStatsLogEntry:
    """Statistics of one queue in one interval."""

    timestamp: float
    """End of the interval; seconds since 1970."""
    name: str
    """The queue's ``StatsQueue.name``: ``0:1:decode[10]_queue``."""
    stats: QueuePerfStats


@dataclass(frozen=True, slots=True)
class EventLogEntry:
    """An event at one moment: ``gc_start``, ``gc_stop``, or the user's own."""

    timestamp: float
    """Seconds since 1970."""
    event_name: str
    details: Mapping[str, Any] = field(default_factory=dict)
    """Details, of types that JSON can hold."""


@dataclass(frozen=True, slots=True)
class IntervalLogEntry:
    """A loader, or a whole pipeline, in one interval."""

    timestamp: float
    """End of the interval; seconds since 1970."""
    pipeline: int
    """Its number among those of the run."""
    name: str
    begins: bool
    """Whether it is the first of its pass."""
    totals: Mapping[str, Any]
    """The statistics, which add up."""
    details: Mapping[str, Any]
    """The readings of the pass so far, and the rows that SPDL's queries ask for."""


LogEntry: TypeAlias = TaskStatsLogEntry | QueueStatsLogEntry | EventLogEntry | IntervalLogEntry


def interval_entry(
    report: Report,
    stats: PipelineStats,
    timestamp: float,
    *,
    number: int,
    name: str,
) -> IntervalLogEntry:
    """Return the entry of an interval that ends now.

    report: on the pass so far, whose probes count for all of it.
    """
    infos = [
        StageInfo(number, place, stage.name, stage.concurrency)
        for place, stage in enumerate(stats.stages, start=1)
    ]
    details = {
        "seconds": report.stats.elapsed,
        "probes": asdict(report.probes),
        **besides_of(report),
        "tasks": [
            {**_of(info), **asdict(stage.tasks), "num_dropped": stage.num_dropped}
            for info, stage in zip(infos, stats.stages, strict=True)
        ],
        "queues": [
            {**_of(info, "_queue"), **asdict(queue)}
            for info, queue in _queues(number, stats, report.pooled)
        ],
    }
    begins = stats is report.stats
    return IntervalLogEntry(timestamp, number, name, begins, stats.as_dict(), details)


def _of(info: StageInfo, kind: str = "") -> dict[str, Any]:
    return {
        "name": f"{info}{kind}",
        "label": info.stage_name,
        "stage_number": info.stage_id,
        "concurrency": info.concurrency,
    }


def _queues(
    number: int, stats: PipelineStats, pooled: Sequence[str]
) -> Iterator[tuple[StageInfo, QueuePerfStats]]:
    """Yield the queues that there are, and that of the sink, from which the consumer takes."""
    last = None
    for place, stage in enumerate(stats.stages, start=1):
        # A loader's workers hand over what the last of their stages has made.
        if stage.queue.elapsed and stage.name not in pooled[:-1]:
            last = stage.queue
            yield StageInfo(number, place, stage.name, stage.concurrency), last
    waited, num_items = stats.waited_ns / 1e9, num_delivered(stats.stages) or 0
    sink = replace(
        last or QueuePerfStats(0.0, 0, 0.0, 0.0, 0.0),
        elapsed=stats.elapsed,
        num_items=num_items,
        ave_get_time=waited / num_items if num_items else 0.0,
        get_wait_time=waited,
    )
    yield StageInfo(number, len(stats.stages) + 1, "sink"), sink
