"""The whole of a statistics file on one page: totals and averages of every stage and queue."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .query import query_queue_stats, query_task_stats

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence


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


def _of_tasks(name: str, rows: Sequence[Mapping[str, Any]]) -> TaskSummary:
    num_tasks, num_failures = total_of(rows, "num_tasks"), total_of(rows, "num_failures")
    return TaskSummary(
        name=name,
        num_tasks=num_tasks,
        num_failures=num_failures,
        ave_time=mean_of(rows, "ave_time", lambda row: row["num_tasks"] - row["num_failures"]),
        success_rate=1 - num_failures / num_tasks if num_tasks else 0.0,
        num_entries=len(rows),
    )


def _of_queue(name: str, rows: Sequence[Mapping[str, Any]]) -> QueueSummary:
    num_items, elapsed = total_of(rows, "num_items"), sum(row["elapsed"] for row in rows)
    return QueueSummary(
        name=name,
        num_items=num_items,
        qps=num_items / elapsed if elapsed else 0.0,
        ave_put_time=mean_of(rows, "ave_put_time", lambda row: row["num_items"]),
        ave_get_time=mean_of(rows, "ave_get_time", lambda row: row["num_items"]),
        occupancy_rate=mean_of(rows, "occupancy_rate", lambda row: row["elapsed"]),
        num_entries=len(rows),
    )


def rows_by_name(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Return the rows of each name, pipeline by pipeline, in the order of its stages."""
    groups: dict[tuple[int, int, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        pipeline, stage_number = row["pipeline"], row["stage_number"]
        place = (-1, -1) if stage_number is None else (pipeline, stage_number)
        groups[*place, row["name"]].append(row)
    return [(key[-1], groups[key]) for key in sorted(groups)]


def total_of(rows: Iterable[Mapping[str, Any]], column: str) -> int:
    """Return the sum of a column."""
    return sum(int(row[column]) for row in rows)


def mean_of(
    rows: Iterable[Mapping[str, Any]], column: str, weight: Callable[[Mapping[str, Any]], float]
) -> float:
    """Return the mean of a column, weighted by ``weight``; 0.0 if the weights are all 0."""
    weighted = [(float(row[column]), weight(row)) for row in rows]
    total = sum(w for _, w in weighted)
    return sum(value * w for value, w in weighted) / total if total else 0.0
