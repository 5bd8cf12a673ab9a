"""A whole run in a statistics file as one reading, and the verdict on it."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from ...engine.statistics import PipelineStats, QueuePerfStats, StageStats, TaskPerfStats
from ...machine.readings import Probes
from ...scopes import scope
from ...shown_text import printable_line
from ..page.events import SKIPPED
from ..verdict.placement import PLACEMENT_EVENT, Placement
from ..verdict.report import Report, make_report
from .entries import DATA_EVENT, PROBES_EVENT
from .interval_rows import mean_of, num_timed, rows_by_stage, total_of
from .query import (
    choose_run,
    query_event_stats,
    query_queue_stats,
    query_task_stats,
    run_row,
)
from .skipped import remarks_of_events

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from .entries import EventLogEntry
    from .interval_rows import Row

_OF_LAST = ("num_cores", "switch_interval", "own_gil", "could_go_without_gil")
"""The probes that are as they were last; the others are means."""


def report_of_file(
    db_path: str | os.PathLike[str], *, run_id: int | None = None, pipeline: int | None = None
) -> Report:
    """Return the report on one run of a statistics file; None = the last one that has statistics.

    pipeline: one of several in that run, see :func:`pipelines_of_file`; None = the one with the
        lowest number.

    Without the event ``probes`` of that pipeline the cause is inferred from CPU time alone.
    Raises: FileNotFoundError; ValueError: not a statistics file, or no such run or pipeline in it.
    """
    run_id = choose_run(db_path, run_id)
    pipeline = choose_pipeline(db_path, run_id, pipeline)
    probes_events = query_event_stats(db_path, PROBES_EVENT, run_id=run_id)
    with _checking_details(db_path):
        begins = begins_of_events(probes_events, pipeline or 0)
    stats = stats_of_file(db_path, run_id, pipeline, begins)
    placement_events = query_event_stats(db_path, PLACEMENT_EVENT, run_id=run_id)
    data_events = query_event_stats(db_path, DATA_EVENT, run_id=run_id)
    skipped_events = query_event_stats(db_path, SKIPPED, run_id=run_id)
    with _checking_details(db_path):
        probes, pooled = probes_of_events(probes_events, pipeline or 0)
        report = make_report(as_measured(stats, pooled), probes, pooled=pooled)
        report = replace(report, placements=_placements_of(placement_events, pipeline or 0))
        data = _data_of(data_events, pipeline or 0)
        report = replace(report, stats=replace(report.stats, data=data))
        remarks = remarks_of_events(skipped_events, pipeline or 0, stats)
    missing = run_row(db_path, run_id)["num_dropped"]
    if missing:
        remarks += (f"entries of this run that were not written to the file: {missing}.",)
    verdict = replace(report.verdict, remarks=(*report.verdict.remarks, *remarks))
    return replace(report, verdict=verdict)


def _name_of(event: EventLogEntry) -> str:
    return printable_line(str(event.details["name"]))


@scope
def _checking_details(db_path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what events without their details raise into an error of the file."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{db_path} is damaged: details of an event: {error!r}.") from error


def unit_of(report: Report) -> str:
    """Return what the consumer takes: ``batches`` of a loader, ``items`` of a pipeline."""
    return "batches" if report.pooled else "items"  # a loader's stages share their threads


def pipelines_of_file(
    db_path: str | os.PathLike[str], *, run_id: int | None = None
) -> dict[int, str]:
    """Return the numbers of a run's pipelines and loaders, in order, with their names (``train``;
    "" = none). Arguments and errors as for :func:`report_of_file`.
    """
    run_id = choose_run(db_path, run_id)
    rows = query_queue_stats(db_path, run_id=run_id)
    numbers = sorted({row["pipeline"] for row in rows if row["pipeline"] is not None})
    events = query_event_stats(db_path, PROBES_EVENT, run_id=run_id)
    with _checking_details(db_path):
        names = {event.details["pipeline"]: _name_of(event) for event in events}
    return {number: names.get(number, "") for number in numbers}


def stats_of_file(
    db_path: str | os.PathLike[str], run_id: int, pipeline: int | None, begins: Sequence[float]
) -> PipelineStats:
    """Return the sum of a run's windows; ``begins``: as for :func:`stats_of_rows`. Errors as for
    :func:`report_of_file`."""
    queue_rows = query_queue_stats(db_path, run_id=run_id, pipeline=pipeline)
    if not queue_rows:
        raise ValueError(f"{db_path}: no figures of a queue were logged in run {run_id}.")
    task_rows = query_task_stats(db_path, run_id=run_id, pipeline=pipeline)
    return stats_of_rows(task_rows, queue_rows, begins)


def begins_of_events(events: Iterable[EventLogEntry], pipeline: int) -> list[float]:
    """Return when the first window of each pass of a loader ended; [] = of hooks, whose windows
    have percentiles of their own."""
    return [
        event.timestamp
        for event in events
        if event.event_name == PROBES_EVENT
        and event.details["pipeline"] == pipeline
        and event.details["begins"]
    ]


def probes_of_events(
    events: Iterable[EventLogEntry], pipeline: int
) -> tuple[Probes | None, tuple[str, ...]]:
    """Return the probes' readings over all passes of a pipeline, None if none was logged, and the
    stages that share threads.

    events: oldest first. Each covers its pass so far, so the last one of a pass counts.
    """
    passes: list[EventLogEntry] = []
    for event in events:
        if event.event_name == PROBES_EVENT and event.details["pipeline"] == pipeline:
            if passes and not event.details["begins"]:
                passes.pop()
            passes.append(event)
    if not passes:
        return None, ()
    readings = [event.details for event in passes]

    def mean(key: str) -> float | None:
        known = [reading for reading in readings if reading.get(key) is not None]
        if len(known) <= 1:  # exactly as it was
            return known[0][key] if known else None
        return mean_of(known, key, lambda reading: reading["elapsed"])

    known = readings[-1]  # an older file lacks the later fields
    values: dict[str, Any] = {
        each.name: known[each.name] if each.name in _OF_LAST else mean(each.name)
        for each in fields(Probes)
        if each.name in known
    }
    return Probes(**values), tuple(readings[-1]["pooled"])


def _data_of(events: Iterable[EventLogEntry], pipeline: int) -> Mapping[str, float]:
    """Return the last statistics of a loader's dataset: those of its last epoch."""
    figures: Mapping[str, float] = {}
    for event in events:
        if event.details["pipeline"] == pipeline:
            figures = event.details["figures"]
    return figures


def _placements_of(events: Iterable[EventLogEntry], pipeline: int) -> tuple[Placement, ...]:
    """Return where a loader's workers lived; an epoch that begins in the same place adds none."""
    found: list[Placement] = []
    for event in events:
        if event.details["pipeline"] == pipeline:
            placement = Placement.from_details(event.details, event.timestamp)
            if not placement.is_as(found[-1] if found else None):
                found.append(placement)
    return tuple(found)


def choose_pipeline(
    db_path: str | os.PathLike[str], run_id: int, pipeline: int | None
) -> int | None:
    """Return the given pipeline or the first; None where no name in the run has a number."""
    numbers = list(pipelines_of_file(db_path, run_id=run_id))
    if pipeline is None:
        return numbers[0] if numbers else None
    if pipeline not in numbers:
        there = ", ".join(map(str, numbers)) or "none has a number"
        raise ValueError(f"{db_path}: pipeline must be in run {run_id} ({there}), got {pipeline}.")
    return pipeline


def stats_of_rows(
    task_rows: Iterable[Row], queue_rows: Iterable[Row], begins: Sequence[float]
) -> PipelineStats:
    """Return the sum of a pipeline's windows: rows of the views, newest first; at least one of a
    queue.

    Percentiles cannot be added up: of several passes, or of several windows of hooks, the median is
    their mean and p90 and p99 are the largest.

    begins: when the first window of each pass ended, if the percentiles of a window are those of
        its pass so far; () = each window has its own.
    """
    tasks = rows_by_stage(task_rows)
    (_, inlet), *others = queues = sorted(rows_by_stage(queue_rows).items())
    stages = []
    for key, outlet in others[:-1]:  # the first queue is the source's, the last one the sink's
        stages.append(_stage(tasks.get(key, []), inlet, outlet, begins))
        inlet = outlet
    sink = queues[-1][1]
    elapsed = _sum(sink, "elapsed")
    return PipelineStats(
        elapsed=elapsed,
        consumer_wait_ratio=min(1.0, _sum(sink, "get_wait_time") / max(elapsed, 1e-9)),
        stages=tuple(stages),
    )


def as_measured(stats: PipelineStats, pooled: Sequence[str]) -> PipelineStats:
    """Return the statistics as the run itself had them: a loader without workers has no queues, and
    its file gives them windows in which nothing ever waits. Even the one worker of a loader waits,
    at least for its first job.

    pooled: the stages that share threads, as in the event ``probes``.
    """
    waits = any(
        stage.wait_in_ratio or stage.wait_out_ratio or stage.queue.occupancy_rate
        for stage in stats.stages
    )
    if waits or not pooled:
        return stats
    none = QueuePerfStats(0.0, 0, 0.0, 0.0, 0.0)
    return replace(stats, stages=tuple(replace(stage, queue=none) for stage in stats.stages))


def _stage(
    tasks: Sequence[Row],
    inlet: Sequence[Row],
    outlet: Sequence[Row],
    begins: Sequence[float],
) -> StageStats:
    concurrency, elapsed = outlet[0]["concurrency"], _sum(outlet, "elapsed")
    thread_seconds = max(sum(row["elapsed"] * row["concurrency"] for row in outlet), 1e-9)
    figures, queue = _tasks(tasks, elapsed, begins), _queue(outlet, elapsed, begins)
    return StageStats(
        name=outlet[0]["label"],
        concurrency=concurrency,
        tasks=figures,
        queue=queue,
        num_dropped=sum(row["num_dropped"] or 0 for row in tasks),
        busy_ratio=min(1.0, figures.busy_time / thread_seconds),
        wait_in_ratio=min(1.0, _sum(inlet, "get_wait_time") / thread_seconds),
        wait_out_ratio=min(1.0, _sum(outlet, "put_wait_time") / thread_seconds),
        thread_time=thread_seconds,
    )


def _tasks(rows: Sequence[Row], elapsed: float, begins: Sequence[float]) -> TaskPerfStats:
    parts = _parts(rows, begins)
    return TaskPerfStats(
        num_tasks=total_of(rows, "num_tasks"),
        num_failures=total_of(rows, "num_failures"),
        ave_time=mean_of(rows, "ave_time", num_timed),
        p90_time=_largest(parts, "p90_time"),
        p99_time=_largest(parts, "p99_time"),
        elapsed=elapsed,
        ave_cpu_time=mean_of(rows, "ave_cpu_time", lambda row: row["num_tasks"]),
        p50_time=_middle(parts, "p50_time"),
        busy_time=_sum(rows, "busy_time"),
    )


def _queue(rows: Sequence[Row], elapsed: float, begins: Sequence[float]) -> QueuePerfStats:
    parts = _parts(rows, begins)
    return QueuePerfStats(
        elapsed=elapsed,
        num_items=total_of(rows, "num_items"),
        ave_put_time=mean_of(rows, "ave_put_time", num_timed),
        ave_get_time=mean_of(rows, "ave_get_time", num_timed),
        occupancy_rate=mean_of(rows, "occupancy_rate", lambda row: row["elapsed"]),
        p90_put_time=_largest(parts, "p90_put_time"),
        p99_put_time=_largest(parts, "p99_put_time"),
        p90_get_time=_middle(parts, "p90_get_time"),
        p99_get_time=_largest(parts, "p99_get_time"),
        put_wait_time=_sum(rows, "put_wait_time"),
        get_wait_time=_sum(rows, "get_wait_time"),
    )


def _parts(rows: Sequence[Row], begins: Sequence[float]) -> list[list[Row]]:
    """Return the rows in groups whose percentiles are those of the first, newest row."""
    if not begins:
        return [[row] for row in rows]
    passes: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        passes[bisect_right(begins, row["timestamp"])].append(row)
    return list(passes.values())


def _largest(parts: Sequence[Sequence[Row]], column: str) -> float:
    return max((float(part[0][column]) for part in parts), default=0.0)


def _middle(parts: Sequence[Sequence[Row]], column: str) -> float:
    """Return the mean, weighted by what was timed; of one part exactly its value."""
    if len(parts) == 1:
        return float(parts[0][0][column])
    weights = [sum(map(num_timed, part)) for part in parts]
    total = sum(weights)
    values = (weight * part[0][column] for weight, part in zip(weights, parts, strict=True))
    return sum(values) / total if total else 0.0


def _sum(rows: Sequence[Row], column: str) -> float:
    return sum(float(row[column]) for row in rows)
