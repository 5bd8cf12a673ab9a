"""Query a statistics file: rows of a time span, by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from ...shown_text import printable_line
from .entries import EventLogEntry
from .schema import reading

if TYPE_CHECKING:
    import os
    import sqlite3
    from collections.abc import Mapping


class _Row(TypedDict):
    """The stage of a row, where it ran, and the interval."""

    timestamp: float
    name: str
    elapsed: float
    label: str
    stage_number: int | None
    concurrency: int
    run_id: int
    rank: int
    host: str
    pipeline: int | None


class TaskStatsRow(_Row):
    """Statistics of a stage's tasks in one interval; times in seconds."""

    num_tasks: int
    num_failures: int
    ave_time: float
    p90_time: float
    p99_time: float
    ave_cpu_time: float
    p50_time: float
    busy_time: float
    num_dropped: int | None


class QueueStatsRow(_Row):
    """Statistics of a queue in one interval; times in seconds."""

    num_items: int
    ave_put_time: float
    ave_get_time: float
    p90_put_time: float
    p99_put_time: float
    p90_get_time: float
    p99_get_time: float
    occupancy_rate: float
    put_wait_time: float
    get_wait_time: float


TaskStatsQueryResult: TypeAlias = TaskStatsRow
"""The row under its name in SPDL's example; it has that example's columns, and more."""

QueueStatsQueryResult: TypeAlias = QueueStatsRow
"""The row under its name in SPDL's example; it has that example's columns, and more."""


def query_task_stats(
    db_path: str | os.PathLike[str],
    name: str | None = None,
    start_time: float | None = None,
    end_time: float | None = None,
    *,
    run_id: int | None = None,
    pipeline: int | None = None,
) -> list[TaskStatsRow]:
    """Return rows of the view ``task_stats``, newest first.

    name: a stage as logged (``0:1:decode[10]``) or without its numbers (``decode``).
    start_time, end_time: bounds of ``timestamp``, both inclusive; seconds since 1970.
    run_id: the number of a run; None = all runs in the file.
    pipeline: the first number in stages' names, one for each loader of a run; None = all.
    Raises: FileNotFoundError; ValueError: not a statistics file, or one of a newer release.
    """
    return _select(db_path, "task_stats", (name, start_time, end_time, run_id, pipeline), "DESC")


def query_queue_stats(
    db_path: str | os.PathLike[str],
    name: str | None = None,
    start_time: float | None = None,
    end_time: float | None = None,
    *,
    run_id: int | None = None,
    pipeline: int | None = None,
) -> list[QueueStatsRow]:
    """Return rows of the view ``queue_stats``, newest first; arguments as for
    :func:`query_task_stats`.

    name: a queue (``0:1:decode[10]_queue``), or the stage that fills it.
    """
    return _select(db_path, "queue_stats", (name, start_time, end_time, run_id, pipeline), "DESC")


def query_event_stats(
    db_path: str | os.PathLike[str],
    event_name: str | None = None,
    start_time: float | None = None,
    end_time: float | None = None,
    *,
    run_id: int | None = None,
) -> list[EventLogEntry]:
    """Return events, oldest first; arguments as for :func:`query_task_stats`, less ``pipeline``."""
    rows = _select(db_path, "event_stats", (event_name, start_time, end_time, run_id, None), "ASC")
    return list(map(event_of, rows))


def event_of(row: Mapping[str, Any]) -> EventLogEntry:
    """Return the event of a row of ``event_stats``."""
    return EventLogEntry(row["timestamp"], row["event_name"], row["details"])


def _select(
    db_path: str | os.PathLike[str],
    view: str,
    filters: tuple[str | None, float | None, float | None, int | None, int | None],
    order: str,
) -> list[Any]:
    named = "event_name = ?" if view == "event_stats" else "? IN (name, label)"
    if view == "queue_stats":  # also by the name of the stage that fills it
        named = "? IN (name, label, substr(name, 1, length(name) - length('_queue')))"
    conditions = (named, "timestamp >= ?", "timestamp <= ?", "run_id = ?", "pipeline = ?")
    given = [(c, value) for c, value in zip(conditions, filters, strict=True) if value is not None]
    where = " AND ".join(condition for condition, _ in given) or "TRUE"
    columns = ", ".join(_COLUMNS[view])
    query = f"SELECT {columns} FROM {view} WHERE {where} ORDER BY timestamp {order}, id {order}"
    with reading(db_path) as connection:
        return rows_of(connection, query, *(value for _, value in given))


_COLUMNS = {
    "task_stats": tuple(TaskStatsRow.__annotations__),
    "queue_stats": tuple(QueueStatsRow.__annotations__),
    "event_stats": ("timestamp", "event_name", "details"),
}
_TEXTS = ("name", "label", "kind", "host", "event_name", "totals")  # shown wherever the row is
_JSON = ("details", "versions", "config")
_MAY_BE_NULL = ("pipeline", "stage_number", "num_dropped", "ended", "details")


def rows_of(connection: sqlite3.Connection, query: str, *values: Any) -> list[dict[str, Any]]:
    """Return the rows of a query within :func:`reading`, with the content of JSON. Their values are
    what the writer writes: SQLite does not see to that."""
    rows = []
    for each in connection.execute(query, values):
        row = dict(each)
        for column, value in row.items():
            if value is None and column in _MAY_BE_NULL:
                pass
            elif column in _TEXTS:
                row[column] = printable_line(value)
            elif column in _JSON:
                row[column] = dict(**json.loads(value))
            else:
                int(value)  # raises for what is no number, or an infinite one
        rows.append(row)
    return rows
