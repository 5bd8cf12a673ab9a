"""What is logged about a run: figures of a stage's tasks, of a queue, and events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..pipeline.stats import QueuePerfStats, TaskPerfStats

__all__ = ["EventLogEntry", "LogEntry", "QueueStatsLogEntry", "TaskStatsLogEntry"]


@dataclass(frozen=True, slots=True)
class TaskStatsLogEntry:
    """Figures of one stage's tasks in one interval."""

    timestamp: float
    """End of the interval; seconds since 1970."""
    name: str
    """Of the stage, as ``str(StageInfo)`` prints it: ``0:1:decode[10]``."""
    stats: TaskPerfStats


@dataclass(frozen=True, slots=True)
class QueueStatsLogEntry:
    """Figures of one queue in one interval."""

    timestamp: float
    """End of the interval; seconds since 1970."""
    name: str
    """Of the queue, as ``StatsQueue.name``: ``0:1:decode[10]_queue``."""
    stats: QueuePerfStats


@dataclass(frozen=True, slots=True)
class EventLogEntry:
    """Something that happened at one moment: ``gc_start``, ``gc_stop``, or the user's own."""

    timestamp: float
    """Seconds since 1970."""
    event_name: str
    details: Mapping[str, Any] = field(default_factory=dict)
    """Whatever JSON can hold."""


LogEntry: TypeAlias = TaskStatsLogEntry | QueueStatsLogEntry | EventLogEntry
