"""What a run measured: kept in a SQLite file, read, summed up, and judged."""

from spdl_torch.observe.entries import (
    EventLogEntry,
    LogEntry,
    QueueStatsLogEntry,
    TaskStatsLogEntry,
    entries_of,
)
from spdl_torch.observe.plot import plot_queue_stats, plot_stats, plot_task_stats
from spdl_torch.observe.profile import Profile
from spdl_torch.observe.query import (
    QueueStatsQueryResult,
    QueueStatsRow,
    TaskStatsQueryResult,
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
from spdl_torch.observe.report import Report, make_report
from spdl_torch.observe.sqlite import SQLiteStatsWriter
from spdl_torch.observe.stored import pipelines_of_file, report_of_file
from spdl_torch.observe.summary import QueueSummary, TaskSummary, summarize
from spdl_torch.observe.summary_text import log_stats_summary
from spdl_torch.observe.trace_check import TraceSummary, check_trace
from spdl_torch.observe.trace_files import merge_ranks, merge_with_torch
from spdl_torch.observe.tracing import flight_recorder, tracing
from spdl_torch.observe.verdict import Cause, Probes, Verdict, judge

__all__ = [
    "Cause",
    "EventLogEntry",
    "LogEntry",
    "Probes",
    "Profile",
    "QueueStatsLogEntry",
    "QueueStatsQueryResult",
    "QueueStatsRecorder",
    "QueueStatsRow",
    "QueueSummary",
    "Report",
    "SQLiteStatsWriter",
    "TaskStatsLogEntry",
    "TaskStatsQueryResult",
    "TaskStatsRecorder",
    "TaskStatsRow",
    "TaskSummary",
    "TraceSummary",
    "Verdict",
    "check_trace",
    "entries_of",
    "flight_recorder",
    "judge",
    "log_stats_summary",
    "make_report",
    "merge_ranks",
    "merge_with_torch",
    "pipelines_of_file",
    "plot_queue_stats",
    "plot_stats",
    "plot_task_stats",
    "query_event_stats",
    "query_queue_stats",
    "query_task_stats",
    "recorders",
    "recording_gc",
    "report_of_file",
    "summarize",
    "tracing",
]
