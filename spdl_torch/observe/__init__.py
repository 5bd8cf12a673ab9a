"""What a run measured, kept and read: a SQLite file, its queries and its summary."""

from spdl_torch.observe.entries import (
    EventLogEntry,
    LogEntry,
    QueueStatsLogEntry,
    TaskStatsLogEntry,
)
from spdl_torch.observe.query import (
    QueueStatsRow,
    TaskStatsRow,
    query_event_stats,
    query_queue_stats,
    query_task_stats,
)
from spdl_torch.observe.recorders import (
    QueueStatsRecorder,
    TaskStatsRecorder,
    recorders,
    recording_gc,
)
from spdl_torch.observe.sqlite import SQLiteStatsWriter
from spdl_torch.observe.summary import QueueSummary, TaskSummary, log_stats_summary, summarize

__all__ = [
    "EventLogEntry",
    "LogEntry",
    "QueueStatsLogEntry",
    "QueueStatsRecorder",
    "QueueStatsRow",
    "QueueSummary",
    "SQLiteStatsWriter",
    "TaskStatsLogEntry",
    "TaskStatsRecorder",
    "TaskStatsRow",
    "TaskSummary",
    "log_stats_summary",
    "query_event_stats",
    "query_queue_stats",
    "query_task_stats",
    "recorders",
    "recording_gc",
    "summarize",
]
