"""Hooks and queues that log a pipeline's statistics, and a block that logs collections."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ...engine.hooks import TaskHook, TaskStatsHook
from ...engine.stage_hooks import StatsQueue
from ...engine.threads import repeating
from ...engine.timeline import TwoClocks
from ...machine.garbage import Collections
from ...machine.probes import is_probing, probe_counters
from ...machine.readings import probes_between
from ...scopes import scope
from .entries import PROBES_EVENT, EventLogEntry, LogEntry, QueueStatsLogEntry, TaskStatsLogEntry

if TYPE_CHECKING:
    from ...engine.hooks import StageInfo
    from ...engine.statistics import QueuePerfStats, TaskPerfStats

_PASS_ON_SECONDS = 0.2

Log = Callable[[LogEntry], Any]


class TaskStatsRecorder(TaskStatsHook):
    """A ``TaskStatsHook`` that logs an entry every ``interval`` seconds, and one at the end."""

    def __init__(self, info: StageInfo, log: Log, interval: float | None = None) -> None:
        super().__init__(info, interval=interval)
        self._log = log
        self._num_dropped = 0  # as logged so far

    async def interval_stats_callback(self, stats: TaskPerfStats) -> None:
        """Log the statistics."""
        num_dropped = sum(cell.num_dropped for cell in self._cells)
        newly_dropped, self._num_dropped = num_dropped - self._num_dropped, num_dropped
        self._log(TaskStatsLogEntry(time.time(), str(self.info), stats, newly_dropped))


class QueueStatsRecorder(StatsQueue):
    """A ``StatsQueue`` that logs an entry every ``interval`` seconds, and one at the end; the
    sink's also logs the probes' readings, while a ``PipelineDataset`` or a loader probes.
    """

    def __init__(
        self, info: StageInfo, buffer_size: int, interval: float | None = None, *, log: Log
    ) -> None:
        super().__init__(info, buffer_size, interval)
        self._log = log
        self._probes_before = probe_counters() if info.stage_name == "sink" else None
        self._begins = True

    async def interval_stats_callback(self, stats: QueuePerfStats) -> None:
        """Log the statistics."""
        now = time.time()
        self._log(QueueStatsLogEntry(now, self.name, stats))
        before = self._probes_before
        if before is not None and is_probing():
            after = probe_counters()
            details: dict[str, Any] = {"pipeline": self.info.pipeline_id, "begins": self._begins}
            details["elapsed"] = (after.wall_ns - before.wall_ns) / 1e9
            details |= asdict(probes_between(before, after))  # over the pass so far
            self._log(EventLogEntry(now, PROBES_EVENT, details))
            self._begins = False


def recorders(log: Log, interval: float | None = None, *, pipeline_id: int = 0) -> dict[str, Any]:
    """Return the options of ``PipelineBuilder.build`` that send all statistics to ``log``:
    ``builder.build(**recorders(writer.log, interval=60))``.

    interval: seconds between two entries of a stage; None = a single one, at the end.
    pipeline_id: the first number in the stages' names. Pipelines that log to one writer need
        different numbers, or stages of the same name are added up.
    """

    def numbered(info: StageInfo) -> StageInfo:
        return replace(info, pipeline_id=pipeline_id)

    def make_hooks(info: StageInfo) -> list[TaskHook]:
        return [TaskStatsRecorder(numbered(info), log, interval)]

    def make_queue(
        info: StageInfo, buffer_size: int, interval: float | None = interval
    ) -> QueueStatsRecorder:
        return QueueStatsRecorder(numbered(info), buffer_size, interval, log=log)

    return {"queue_class": make_queue, "task_hook_factory": make_hooks}


@scope
def recording_gc(log: Log, *, generation: int = 0) -> Iterator[None]:
    """Log ``gc_start`` and ``gc_stop`` of garbage collections while the block runs.

    generation: the youngest generation to log; 2 = full collections only, which take long.

    ``log`` is called some moments after the collection, with the times of its start and stop, on a
    thread of its own, or when the block ends. What it raises on that thread is logged, and ends it.
    """
    collections, clock = Collections(), TwoClocks.now()

    def pass_on() -> None:
        for began_ns, ended_ns, info in collections.taken():
            if info["generation"] >= generation:
                at_start = {**info, "collected": 0, "uncollectable": 0}  # as Python has it
                log(EventLogEntry(clock.system(began_ns) / 1e9, "gc_start", at_start))
                log(EventLogEntry(clock.system(ended_ns) / 1e9, "gc_stop", info))

    collections.begin()
    try:
        with repeating("collections", _PASS_ON_SECONDS, pass_on):
            yield
    finally:
        collections.end()
        pass_on()
