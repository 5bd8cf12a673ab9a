"""The whole of a statistics file on one page: totals and averages of every stage and queue."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .interval_rows import key_of, mean_of, num_timed, total_of
from .query import query_queue_stats, query_task_stats

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Sequence

    from .interval_rows import Key, Row


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
    tasks = rows_by_name(query_task_stats(db_path, run_id=run_id))
    queues = rows_by_name(query_queue_stats(db_path, run_id=run_id))
    return [_of_tasks(*item) for item in tasks], [_of_queue(*item) for item in queues]


def _of_tasks(name: str, rows: Sequence[Row]) -> TaskSummary:
    num_tasks, num_failures = total_of(rows, "num_tasks"), total_of(rows, "num_failures")
    return TaskSummary(
        name=name,
        num_tasks=num_tasks,
        num_failures=num_failures,
        ave_time=mean_of(rows, "ave_time", num_timed),
        success_rate=1 - num_failures / num_tasks if num_tasks else 0.0,
        num_entries=len(rows),
    )


def _of_queue(name: str, rows: Sequence[Row]) -> QueueSummary:
    num_items, elapsed = total_of(rows, "num_items"), sum(row["elapsed"] for row in rows)
    return QueueSummary(
        name=name,
        num_items=num_items,
        qps=num_items / elapsed if elapsed else 0.0,
        ave_put_time=mean_of(rows, "ave_put_time", num_timed),
        ave_get_time=mean_of(rows, "ave_get_time", num_timed),
        occupancy_rate=mean_of(rows, "occupancy_rate", lambda row: row["elapsed"]),
        num_entries=len(rows),
    )


def rows_by_name(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    """Return the rows of each name, pipeline by pipeline, in the order of its stages."""
    groups: dict[tuple[Key, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[key_of(row), row["name"]].append(row)
    return [(name, groups[key, name]) for key, name in sorted(groups)]
