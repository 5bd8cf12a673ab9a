"""The statistics of a run: judged, stored, traced and drawn.

``page`` draws a page of sentences, tables and charts; ``verdict`` names what holds training back;
``store`` is the statistics file, ``trace`` the traces of what every thread did, ``plot`` the
pictures. Each uses only those before it, and ``plot`` uses no traces. The names below are imported
when they are first used: a loader needs few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import spdl_torch.lazy_names as lazy_names

if TYPE_CHECKING:
    from ..machine.readings import Probes
    from .plot.plot import plot_queue_stats, plot_stats, plot_task_stats
    from .store.entries import (
        EventLogEntry,
        LogEntry,
        QueueStatsLogEntry,
        TaskStatsLogEntry,
        entries_of,
    )
    from .store.logging_hooks import (
        QueueStatsRecorder,
        TaskStatsRecorder,
        recorders,
        recording_gc,
    )
    from .store.query import (
        QueueStatsQueryResult,
        QueueStatsRow,
        TaskStatsQueryResult,
        TaskStatsRow,
        query_event_stats,
        query_queue_stats,
        query_task_stats,
    )
    from .store.recording import recording
    from .store.stored_run import pipelines_of_file, report_of_file
    from .store.summary import QueueSummary, TaskSummary, summarize
    from .store.summary_text import log_stats_summary
    from .store.writer import SQLiteStatsWriter
    from .trace.last_seconds import flight_recorder
    from .trace.merge import merge_ranks, merge_with_torch
    from .trace.profile import Profile
    from .trace.tracing import tracing
    from .trace.user_events import trace_counter, trace_event
    from .verdict.causes import Cause
    from .verdict.placement import Placement
    from .verdict.report import Report, make_report
    from .verdict.verdict import Verdict, judge
    from .verdict.what_if import Prediction

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
    "Verdict",
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
    "summarize",
    "trace_counter",
    "trace_event",
    "tracing",
]

_HOMES = {
    ".plot.plot": ("plot_queue_stats", "plot_stats", "plot_task_stats"),
    ".store.entries": (
        "EventLogEntry",
        "LogEntry",
        "QueueStatsLogEntry",
        "TaskStatsLogEntry",
        "entries_of",
    ),
    ".store.logging_hooks": (
        "QueueStatsRecorder",
        "TaskStatsRecorder",
        "recorders",
        "recording_gc",
    ),
    ".store.query": (
        "QueueStatsQueryResult",
        "QueueStatsRow",
        "TaskStatsQueryResult",
        "TaskStatsRow",
        "query_event_stats",
        "query_queue_stats",
        "query_task_stats",
    ),
    ".store.recording": ("recording",),
    ".store.stored_run": ("pipelines_of_file", "report_of_file"),
    ".store.summary": ("QueueSummary", "TaskSummary", "summarize"),
    ".store.summary_text": ("log_stats_summary",),
    ".store.writer": ("SQLiteStatsWriter",),
    ".trace.last_seconds": ("flight_recorder",),
    ".trace.merge": ("merge_ranks", "merge_with_torch"),
    ".trace.profile": ("Profile",),
    ".trace.tracing": ("tracing",),
    ".trace.user_events": ("trace_counter", "trace_event"),
    ".verdict.causes": ("Cause",),
    "..machine.readings": ("Probes",),
    ".verdict.placement": ("Placement",),
    ".verdict.report": ("Report", "make_report"),
    ".verdict.verdict": ("Verdict", "judge"),
    ".verdict.what_if": ("Prediction",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    return lazy_names.import_name(__name__, _HOME_OF, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
