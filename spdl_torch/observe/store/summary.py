"""The whole of a statistics file on one page: SPDL's totals and averages of every stage and queue,
and their meaning."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...shown_text import printable
from .query import rows_of
from .schema import reading
from .stored_run import StoredRun

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

_logger = logging.getLogger("spdl_torch.observe")

_DOUBLE_RULE, _RULE = "=" * 80, "-" * 80

# Task times are averaged over the tasks that succeeded, waits over the items, the rest over time.
_SUMS = """
    SELECT name, {figures}, count(*) AS num_entries
    FROM {view} WHERE run_id = ?1 OR ?1 IS NULL GROUP BY name, label
    ORDER BY pipeline IS NOT NULL, pipeline, stage_number, name
"""
_GOOD = "num_tasks - num_failures"
_OF_TASKS = {
    "num_tasks": "sum(num_tasks)",
    "num_failures": "sum(num_failures)",
    "ave_time": f"total(ave_time * ({_GOOD})) / sum({_GOOD})",
    "success_rate": f"total({_GOOD}) / sum(num_tasks)",
}
_OF_QUEUES = {
    "num_items": "sum(num_items)",
    "qps": "total(num_items) / total(elapsed)",
    "ave_put_time": "total(ave_put_time * num_items) / sum(num_items)",
    "ave_get_time": "total(ave_get_time * num_items) / sum(num_items)",
    "occupancy_rate": "total(occupancy_rate * elapsed) / total(elapsed)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSummary:
    """A stage over all intervals."""

    name: str
    num_tasks: int
    num_failures: int
    ave_time: float
    """Mean time of the tasks that succeeded, seconds."""
    success_rate: float
    """Share of the tasks that succeeded, 0 to 1."""
    num_entries: int

    def lines(self) -> list[str]:
        """Return the lines that SPDL's example prints, which programs may read too."""
        return [
            f"  Stage: {self.name}",
            f"    Total tasks processed: {self.num_tasks}",
            f"    Total failures: {self.num_failures}",
            f"    Average task time: {self.ave_time:.4f}s",
            f"    Success rate: {self.success_rate:.1%}",
            f"    Number of log entries: {self.num_entries}",
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueSummary:
    """A queue over all intervals."""

    name: str
    num_items: int
    qps: float
    """Items a second."""
    ave_put_time: float
    """Mean time that a put waited for room, seconds."""
    ave_get_time: float
    """Mean time that a get waited for an item, seconds."""
    occupancy_rate: float
    """Share of the time in which an item waited, 0 to 1."""
    num_entries: int

    def lines(self) -> list[str]:
        """Return the lines that SPDL's example prints."""
        return [
            f"  Queue: {self.name}",
            f"    Total items processed: {self.num_items}",
            f"    Average QPS: {self.qps:.2f}",
            f"    Average put time: {self.ave_put_time:.4f}s",
            f"    Average get time: {self.ave_get_time:.4f}s",
            f"    Average occupancy rate: {self.occupancy_rate:.1%}",
            f"    Number of log entries: {self.num_entries}",
        ]


def summarize(
    db_path: str | os.PathLike[str], *, run_id: int | None = None
) -> tuple[list[TaskSummary], list[QueueSummary]]:
    """Return every stage and every queue of a statistics file, in the order of the pipeline.

    Task times are averaged over the tasks that succeeded, waits of puts and gets over the items,
    occupancy and QPS over the time.
    Raises: FileNotFoundError; ValueError: not a statistics file.
    """
    with reading(db_path) as connection:
        tasks, queues = (
            rows_of(connection, _SUMS.format(view=view, figures=_columns(figures)), run_id)
            for view, figures in (("task_stats", _OF_TASKS), ("queue_stats", _OF_QUEUES))
        )
    return [TaskSummary(**row) for row in tasks], [QueueSummary(**row) for row in queues]


def _columns(figures: dict[str, str]) -> str:
    return ", ".join(f"ifnull({sql}, 0.0) AS {name}" for name, sql in figures.items())


def log_stats_summary(
    db_path: str | os.PathLike[str],
    *,
    run_id: int | None = None,
    write: Callable[[str], object] | None = None,
) -> None:
    """Log the summary of a statistics file at INFO level, or give it to ``write``, as one text:
    first every stage and queue, in the words and the order of SPDL's example program; then the
    report of the last run, or of ``run_id``, for each pipeline in it.

    Raises: FileNotFoundError; ValueError: not a statistics file.
    """
    tasks, queues = summarize(db_path, run_id=run_id)
    lines = ["", *_titled("PIPELINE PERFORMANCE SUMMARY")]
    parts: Any
    for title, parts in ("📊 Task Statistics:", tasks), ("📈 Queue Statistics:", queues):
        lines += [title, _RULE, ""]
        for part in parts:
            lines += [*part.lines(), ""]
    if queues:
        run = StoredRun.read(db_path, run_id)
        lines += _titled(f"WHAT IT MEANS: run {run.facts['run_id']} of {db_path}")
        for pipeline, name in run.pipelines().items():
            report = run.report(pipeline)
            lines += [f"Pipeline {pipeline}{name and f' ({name})'}", str(report), ""]
    # An empty line first, so that a logger's prefix has a line of its own.
    (write or _logger.info)(printable("\n".join(lines)))


def _titled(title: str) -> list[str]:
    return [_DOUBLE_RULE, title, _DOUBLE_RULE]
