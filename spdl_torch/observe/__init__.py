"""The figures of a run: judged, stored, traced and drawn.

``page`` draws a page of sentences, tables and charts; ``verdict`` names what holds training back;
``store`` is the statistics file, ``trace`` the traces of what every thread did, ``plot`` the
pictures. Each uses only those before it, but ``plot`` uses no traces.
"""

from spdl_torch.observe.page.showing import showing
from spdl_torch.observe.plot.plot import plot_queue_stats, plot_stats, plot_task_stats
from spdl_torch.observe.store.entries import (
    EventLogEntry,
    LogEntry,
    QueueStatsLogEntry,
    TaskStatsLogEntry,
    entries_of,
)
from spdl_torch.observe.store.logging_hooks import (
    QueueStatsRecorder,
    TaskStatsRecorder,
    recorders,
    recording_gc,
)
from spdl_torch.observe.store.query import (
    QueueStatsQueryResult,
    QueueStatsRow,
    TaskStatsQueryResult,
    TaskStatsRow,
    query_event_stats,
    query_queue_stats,
    query_task_stats,
)
from spdl_torch.observe.store.recording import recording
from spdl_torch.observe.store.stored_run import pipelines_of_file, report_of_file
from spdl_torch.observe.store.summary import QueueSummary, TaskSummary, summarize
from spdl_torch.observe.store.summary_text import log_stats_summary
from spdl_torch.observe.store.writer import SQLiteStatsWriter
from spdl_torch.observe.trace.check import TraceSummary, check_trace
from spdl_torch.observe.trace.last_seconds import flight_recorder
from spdl_torch.observe.trace.merge import merge_ranks, merge_with_torch
from spdl_torch.observe.trace.profile import Profile
from spdl_torch.observe.trace.tracing import tracing
from spdl_torch.observe.verdict.causes import Cause, Probes
from spdl_torch.observe.verdict.placement import Placement
from spdl_torch.observe.verdict.report import Report, make_report
from spdl_torch.observe.verdict.verdict import Verdict, judge
from spdl_torch.observe.verdict.what_if import Prediction

__all__ = [
    "Cause",
    "EventLogEntry",
    "LogEntry",
    "Placement",
    "Prediction",
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
    "recording",
    "recording_gc",
    "report_of_file",
    "showing",
    "summarize",
    "tracing",
]
