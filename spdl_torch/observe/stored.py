"""A whole run of a statistics file as one reading, from which the verdict can be given again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..pipeline.stats import PipelineStats, QueuePerfStats, StageStats, TaskPerfStats
from .query import choose_run, query_queue_stats, query_task_stats
from .report import Report, make_report
from .summary import mean_of, rows_by_name, total_of

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["report_of_file", "stats_of_file", "stats_of_rows"]


def report_of_file(db_path: str | os.PathLike[str], *, run_id: int | None = None) -> Report:
    """The verdict over one run of a statistics file; None = the last one that has figures.

    The file has no probes of the GIL and of the cores: the cause is told from CPU time alone.
    Raises: FileNotFoundError; ValueError: not a statistics file, or no such run in it.
    """
    return make_report(stats_of_file(db_path, run_id=run_id))


def stats_of_file(db_path: str | os.PathLike[str], *, run_id: int | None = None) -> PipelineStats:
    """One run's windows added up. Arguments and errors as of :func:`report_of_file`."""
    run_id = choose_run(db_path, run_id)
    return stats_of_rows(
        query_task_stats(db_path, run_id=run_id), query_queue_stats(db_path, run_id=run_id)
    )


def stats_of_rows(
    task_rows: Iterable[Mapping[str, Any]], queue_rows: Iterable[Mapping[str, Any]]
) -> PipelineStats:
    """Windows of one pipeline added up: rows of the views; at least one of a queue."""
    tasks = dict(rows_by_name(task_rows))
    (_, inlet), *others = queues = rows_by_name(queue_rows)
    stages = []
    for name, outlet in others[:-1]:  # the first queue is the source's, the last one the sink's
        stages.append(_stage(tasks.get(name.removesuffix("_queue"), []), inlet, outlet))
        inlet = outlet
    sink = queues[-1][1]
    elapsed = _sum(sink, "elapsed")
    return PipelineStats(
        elapsed=elapsed,
        consumer_wait_ratio=min(1.0, _sum(sink, "get_wait_time") / max(elapsed, 1e-9)),
        stages=tuple(stages),
    )


def _stage(
    tasks: Sequence[Mapping[str, Any]],
    inlet: Sequence[Mapping[str, Any]],
    outlet: Sequence[Mapping[str, Any]],
) -> StageStats:
    concurrency, elapsed = outlet[0]["concurrency"], _sum(outlet, "elapsed")
    thread_seconds = max(elapsed * concurrency, 1e-9)
    figures, queue = _tasks(tasks, elapsed), _queue(outlet, elapsed)
    return StageStats(
        name=outlet[0]["label"],
        concurrency=concurrency,
        tasks=figures,
        queue=queue,
        num_dropped=0,  # not in the file
        busy_ratio=min(1.0, figures.busy_time / thread_seconds),
        wait_in_ratio=min(1.0, _sum(inlet, "get_wait_time") / thread_seconds),
        wait_out_ratio=min(1.0, _sum(outlet, "put_wait_time") / thread_seconds),
    )


def _tasks(rows: Sequence[Mapping[str, Any]], elapsed: float) -> TaskPerfStats:
    def mean(column: str) -> float:
        return mean_of(rows, column, lambda row: row["num_tasks"] - row["num_failures"])

    return TaskPerfStats(
        num_tasks=total_of(rows, "num_tasks"),
        num_failures=total_of(rows, "num_failures"),
        ave_time=mean("ave_time"),
        p90_time=max((row["p90_time"] for row in rows), default=0.0),
        p99_time=max((row["p99_time"] for row in rows), default=0.0),
        elapsed=elapsed,
        ave_cpu_time=mean_of(rows, "ave_cpu_time", lambda row: row["num_tasks"]),
        p50_time=mean("p50_time"),
        busy_time=_sum(rows, "busy_time"),
    )


def _queue(rows: Sequence[Mapping[str, Any]], elapsed: float) -> QueuePerfStats:
    def mean(column: str) -> float:
        return mean_of(rows, column, lambda row: row["num_items"])

    return QueuePerfStats(
        elapsed=elapsed,
        num_items=total_of(rows, "num_items"),
        ave_put_time=mean("ave_put_time"),
        ave_get_time=mean("ave_get_time"),
        occupancy_rate=mean_of(rows, "occupancy_rate", lambda row: row["elapsed"]),
        put_wait_time=_sum(rows, "put_wait_time"),
        get_wait_time=_sum(rows, "get_wait_time"),
    )


def _sum(rows: Sequence[Mapping[str, Any]], column: str) -> float:
    return sum(float(row[column]) for row in rows)
