"""``spdl.examples.sqlite_stats_logger``: the statistics file of :mod:`spdl_torch.observe`."""

from ...observe import (
    EventLogEntry,
    QueueStatsLogEntry,
    QueueStatsQueryResult,
    SQLiteStatsWriter,
    TaskStatsLogEntry,
    TaskStatsQueryResult,
    log_stats_summary,
    query_event_stats,
    query_queue_stats,
    query_task_stats,
)

__all__ = [
    "EventLogEntry",
    "QueueStatsLogEntry",
    "QueueStatsQueryResult",
    "SQLiteStatsWriter",
    "TaskStatsLogEntry",
    "TaskStatsQueryResult",
    "log_stats_summary",
    "query_event_stats",
    "query_queue_stats",
    "query_task_stats",
]
