"""The hooks and queues that send a pipeline's figures to a log, and the garbage collector's."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from ..pipeline.hooks import StageInfo, StatsQueue, TaskHook, TaskStatsHook
from .entries import EventLogEntry, LogEntry, QueueStatsLogEntry, TaskStatsLogEntry

if TYPE_CHECKING:
    from ..pipeline.stats import QueuePerfStats, TaskPerfStats

__all__ = ["QueueStatsRecorder", "TaskStatsRecorder", "recorders", "recording_gc"]

Log = Callable[[LogEntry], Any]


class TaskStatsRecorder(TaskStatsHook):
    """A ``TaskStatsHook`` that logs an entry every ``interval`` seconds, and one at the end."""

    def __init__(self, info: StageInfo, log: Log, interval: float | None = None) -> None:
        super().__init__(info, interval=interval)
        self._log = log

    async def interval_stats_callback(self, stats: TaskPerfStats) -> None:
        """Log the figures."""
        self._log(TaskStatsLogEntry(time.time(), str(self.info), stats))


class QueueStatsRecorder(StatsQueue):
    """A ``StatsQueue`` that logs an entry every ``interval`` seconds, and one at the end."""

    def __init__(
        self, info: StageInfo, buffer_size: int, interval: float | None = None, *, log: Log
    ) -> None:
        super().__init__(info, buffer_size, interval)
        self._log = log

    async def interval_stats_callback(self, stats: QueuePerfStats) -> None:
        """Log the figures."""
        self._log(QueueStatsLogEntry(time.time(), self.name, stats))


def recorders(log: Log, interval: float | None = None) -> dict[str, Any]:
    """The options of ``PipelineBuilder.build`` that send every figure to ``log``:
    ``builder.build(**recorders(writer.log, interval=60))``.

    ``interval``: seconds between two entries of a stage; None = one, at the end.
    """

    def make_hooks(info: StageInfo) -> list[TaskHook]:
        return [TaskStatsRecorder(info, log, interval)]

    return {
        "queue_class": partial(QueueStatsRecorder, interval=interval, log=log),
        "task_hook_factory": make_hooks,
    }


@contextmanager
def recording_gc(log: Log, *, generation: int = 0) -> Iterator[None]:
    """Log ``gc_start`` and ``gc_stop`` of garbage collections while the block runs.

    generation: of this and older ones; 2 = only full collections, the ones that take long.

    ``log`` is called inside the collection, on whichever thread it happens: it must not take a
    lock that this thread may hold. ``SQLiteStatsWriter.log`` is safe, ``queue.Queue.put`` is not.
    """

    def on_gc(phase: str, info: dict[str, int]) -> None:
        if info["generation"] >= generation:
            log(EventLogEntry(time.time(), f"gc_{phase}", info))

    gc.callbacks.append(on_gc)
    try:
        yield
    finally:
        gc.callbacks.remove(on_gc)
