"""``spdl.examples.sqlite_stats_logger``: the statistics file of :mod:`spdl_torch.observe`."""

from spdl_torch.lazy_names import hand_on

from ...observe import (
    EventLogEntry as EventLogEntry,
    QueueStatsLogEntry as QueueStatsLogEntry,
    SQLiteStatsWriter as SQLiteStatsWriter,
    TaskStatsLogEntry as TaskStatsLogEntry,
    log_stats_summary as log_stats_summary,
    query_event_stats as query_event_stats,
    query_queue_stats as query_queue_stats,
    query_task_stats as query_task_stats,
)
from ...observe.store.file import (
    QueueStatsQueryResult as QueueStatsQueryResult,
    TaskStatsQueryResult as TaskStatsQueryResult,
)

hand_on()
