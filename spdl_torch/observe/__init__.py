"""The statistics of a run: judged, stored, traced and drawn.

``page`` draws charts and makes a page of them; ``verdict`` names what holds training back;
``store`` is the statistics file, ``plot`` its pictures, ``trace`` the traces of what every thread
did. Each uses only those before it. The names below are imported when they are first used: a
loader needs few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spdl_torch.lazy_names import hand_on

if TYPE_CHECKING:
    from ..machine.readings import Probes as Probes
    from .plot import plot_stats as plot_stats
    from .store.entries import (
        EventLogEntry as EventLogEntry,
        LogEntry as LogEntry,
        QueueStatsLogEntry as QueueStatsLogEntry,
        TaskStatsLogEntry as TaskStatsLogEntry,
    )
    from .store.file import (
        query_event_stats as query_event_stats,
        query_queue_stats as query_queue_stats,
        query_task_stats as query_task_stats,
    )
    from .store.recording import recording as recording, recording_gc as recording_gc
    from .store.stored_run import (
        log_stats_summary as log_stats_summary,
        pipelines_of_file as pipelines_of_file,
        report_of_file as report_of_file,
    )
    from .store.writer import SQLiteStatsWriter as SQLiteStatsWriter
    from .trace.profile import Profile as Profile
    from .trace.trace_file import merge_ranks as merge_ranks, merge_with_torch as merge_with_torch
    from .trace.tracing import (
        flight_recorder as flight_recorder,
        trace_counter as trace_counter,
        trace_event as trace_event,
        tracing as tracing,
    )
    from .verdict.causes import Cause as Cause
    from .verdict.model import Prediction as Prediction
    from .verdict.placement import Placement as Placement
    from .verdict.report import Report as Report, make_report as make_report
    from .verdict.verdict import Verdict as Verdict, judge as judge

hand_on()
