"""Log entries of a run: statistics of a stage's tasks, statistics of a queue, and events."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from ...engine.hooks import StageInfo
from ...engine.statistics import QueuePerfStats
from ..verdict.intervals import interval_between, queue_between, thread_seconds
from ..verdict.placement import PLACEMENT_EVENT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...engine.statistics import PipelineStats, StageStats, TaskPerfStats
    from ...machine.readings import Probes
    from ..verdict.report import Report

PROBES_EVENT = "probes"
"""Name of the event with the probes' readings, for one pipeline."""


DATA_EVENT = "data"
"""Name of the event with the statistics of a loader's dataset, over its epoch so far."""


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


LogEntry: TypeAlias = TaskStatsLogEntry | QueueStatsLogEntry | EventLogEntry


def entries_of(
    report: Report,
    before: Report | None = None,
    *,
    pipeline_id: int = 0,
    name: str = "",
    timestamp: float | None = None,
) -> list[LogEntry]:
    """Return a report as log entries, for loaders, which have no hooks: a window for every stage
    and queue, an event with the probes' readings, one for each place where a loader's workers have
    lived, and one with the statistics of its dataset. A file with them leads to the same verdict.

    Args:
        before: an earlier report of the same pass; only what came after it is logged. None = all.
        pipeline_id: a number for each loader of a run; stages are called ``0:1:fetch[2]``.
        name: the loader's name, for people.
        timestamp: end of the windows, seconds since 1970; None = now.
    """
    stats = interval_between(before.stats if before is not None else None, report.stats)
    now = time.time() if timestamp is None else timestamp
    if not stats.stages:
        return []  # nothing was loaded
    infos = [
        StageInfo(pipeline_id, stage_number, stage.name, stage.concurrency)
        for stage_number, stage in enumerate(stats.stages, start=1)
    ]
    tasks = [
        TaskStatsLogEntry(now, str(info), stage.tasks, stage.num_dropped)
        for info, stage in zip(infos, stats.stages, strict=True)
    ]
    source = StageInfo(pipeline_id, 0, "source")
    sink = StageInfo(pipeline_id, len(infos) + 1, "sink")
    figures = _queues_of(report.stats, report.pooled)
    if before is not None and stats is not report.stats:
        # Not from the interval's ratios, which are at most 1: a wait is read a moment after the
        # clock, so it may be longer than its interval, and the sum of the intervals needs it.
        readings = zip(_queues_of(before.stats, report.pooled), figures, strict=True)
        figures = [queue_between(then, now) for then, now in readings]
    queues = [
        QueueStatsLogEntry(now, f"{info}_queue", queue)
        for info, queue in zip((source, *infos, sink), figures, strict=True)
    ]
    probes = probes_entry(
        report.probes,
        report.stats.elapsed,
        begins=stats is report.stats,
        pooled=report.pooled,
        pipeline_id=pipeline_id,
        name=name,
        timestamp=now,
    )
    known = {placement.since for placement in before.placements} if before is not None else set()
    placements = [
        EventLogEntry(
            now if each.since is None else each.since,
            PLACEMENT_EVENT,
            {"pipeline": pipeline_id, "name": name, **each.as_details()},
        )
        for each in report.placements
        if each.since not in known
    ]
    details = {"pipeline": pipeline_id, "name": name, "figures": dict(report.stats.data)}
    data = [EventLogEntry(now, DATA_EVENT, details)] if report.stats.data else []
    return [*tasks, *queues, probes, *placements, *data]


def num_delivered(stats: PipelineStats, pooled: Sequence[str]) -> int:
    """Return the number of items that the consumer has taken; for a loader, batches."""
    return _queues_of(stats, pooled)[-1].num_items if stats.stages else 0


def probes_entry(
    probes: Probes,
    elapsed: float,
    *,
    begins: bool,
    pooled: Sequence[str] = (),
    pipeline_id: int = 0,
    name: str = "",
    timestamp: float,
) -> EventLogEntry:
    """Return the event ``probes``: readings over the ``elapsed`` seconds of the pass so far.

    begins: whether it is the first of its pass.
    """
    details = {"pipeline": pipeline_id, "name": name, "elapsed": elapsed, "begins": begins}
    details |= {"pooled": list(pooled), **asdict(probes)}
    return EventLogEntry(timestamp, PROBES_EVENT, details)


def _queues_of(stats: PipelineStats, pooled: Sequence[str]) -> list[QueuePerfStats]:
    """Return the queues of source, every stage and sink, with waits computed from the ratios."""
    first, *following = stats.stages
    source = _queue(None, first.tasks.elapsed, first.tasks.num_tasks, 0.0, _wait_in(first))
    found, num_items, like = [source], 0, None
    for stage, taker in zip(stats.stages, [*following, None], strict=True):
        get = stage.queue.get_wait_time if taker is None else _wait_in(taker)
        # A loader's thread collates its own samples: there is no queue between the two stages.
        hands_over = taker is not None and {stage.name, taker.name} <= set(pooled)
        like = None if hands_over or stage.queue.elapsed == 0 else stage.queue
        num_good = stage.tasks.num_tasks - stage.tasks.num_failures - stage.num_dropped
        num_items = num_good if like is None else like.num_items
        wait_out = stage.wait_out_ratio * thread_seconds(stage)
        found.append(_queue(like, stage.tasks.elapsed, num_items, wait_out, get))
    waited = stats.consumer_wait_ratio * stats.elapsed
    return [*found, _queue(like, stats.elapsed, num_items, 0.0, waited)]


def _wait_in(stage: StageStats) -> float:
    return stage.wait_in_ratio * thread_seconds(stage)


def _queue(
    like: QueuePerfStats | None, elapsed: float, num_items: int, put_wait: float, get_wait: float
) -> QueuePerfStats:
    """Return the statistics of ``like``, if any, with waits that add up to the given seconds."""
    return replace(
        like or QueuePerfStats(0.0, 0, 0.0, 0.0, 0.0),
        elapsed=elapsed,
        num_items=num_items,
        ave_put_time=put_wait / num_items if num_items else 0.0,
        ave_get_time=get_wait / num_items if num_items else 0.0,
        put_wait_time=put_wait,
        get_wait_time=get_wait,
    )
