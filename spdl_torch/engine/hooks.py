"""Task hooks: code of users around stages and tasks, and the statistics of a stage's tasks.

A subclass overrides ``interval_stats_callback``; it is called with the statistics of each interval,
and once more with the last, partial one when the run ends, so that the sums of all callbacks
equal what was processed. Callbacks run on one reporter thread of the pipeline, never on a worker.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, Any

from .counters import TaskCell, TaskCounters
from .reporter import call_back, check_interval, is_heard

if TYPE_CHECKING:
    from .loop import AnyContext, LazyRunner
    from .statistics import TaskPerfStats

_logger = logging.getLogger("spdl_torch.pipeline")


@dataclass(frozen=True, slots=True)
class StageInfo:
    """The identity of a stage; prints ``0:1:decode[10]``."""

    pipeline_id: int
    """0 unless the caller gives another; it does not change from epoch to epoch."""
    stage_id: int
    """The stage's number in the pipeline: 0 is the source."""
    stage_name: str
    concurrency: int = 1

    def __str__(self) -> str:
        threads = f"[{self.concurrency}]" if self.concurrency > 1 else ""
        return f"{self.pipeline_id}:{self.stage_id}:{self.stage_name}{threads}"


class TaskHook:
    """Code around every stage and every task. Both methods may return a plain or an asynchronous
    context manager; the asynchronous kind costs an event-loop step (tens of µs) a task.

    A ``task_hook`` that raises fails its item; a ``stage_hook`` that raises fails the pipeline.
    """

    def stage_hook(self) -> AnyContext:
        """Return a context, entered once before the stage's first task, left after its last."""
        return nullcontext()

    def task_hook(self, input_item: Any = None) -> AnyContext:
        """Return a context, entered before the op is called with ``input_item`` and left after it,
        on the same thread; an exception of the op passes through it. Around a generator it is left
        after the last output was passed on: its time includes waits for room, which the statistics
        leave out."""
        return nullcontext()


# Threads count on while these are read, in this order. Each counts a task before its failure, and
# here failures are read before tasks: so there are never more failures than tasks.
_SUMMED = (
    *("num_failures", "failed_ns", "num_tasks", "busy_ns"),
    *("cpu_ns", "clocked_ns", "long_cpu_ns", "long_ns"),
)


class TaskStatsHook(TaskHook):
    """Time every task inside the thread that runs it: wall and thread CPU time.

    ``interval``: seconds between two calls of ``interval_stats_callback``; None, or SPDL's -1 =
    only the one call at the end, with everything.
    """

    def __init__(self, info: StageInfo, interval: float | None = None) -> None:
        self.info = info
        self.interval = check_interval(interval, f"{info}: interval")
        # Each thread that begins appends its cell, in one step; counters() goes through a copy.
        self._cells: list[TaskCell] = []
        self._of_thread = threading.local()
        self._started_ns = perf_counter_ns()
        self._ended_ns: int | None = None
        self._last = TaskCounters()  # the reporter thread's alone

    async def interval_stats_callback(self, stats: TaskPerfStats) -> None:
        """Override to export; ``async def`` or plain. The default logs at INFO level."""
        _logger.info(
            "%s: %d tasks, %d failed, %.3f ms a task (CPU %.3f), p99 %.3f ms, in %.1f s",
            self.info,
            stats.num_tasks,
            stats.num_failures,
            stats.ave_time * 1e3,
            stats.ave_cpu_time * 1e3,
            stats.p99_time * 1e3,
            stats.elapsed,
        )

    def task_hook(self, input_item: Any = None) -> AnyContext:
        """Return a context that times a task. The engine enters it only if it is overridden:
        otherwise workers write their times into :class:`TaskCell` directly, which costs a
        quarter."""
        if not hasattr(self._of_thread, "cell"):
            self._of_thread.cell = self.new_cell()
        return _Timed(self._of_thread.cell)

    def new_cell(self) -> TaskCell:
        """Return a new cell for one thread; no two threads share one, so none needs a lock."""
        cell = TaskCell()
        self.share(cell)
        return cell

    def share(self, cell: TaskCell) -> None:
        """Count what is written into ``cell``, too; several recorders may share one."""
        self._cells.append(cell)

    def counters(self) -> TaskCounters:
        """Return everything counted so far, over all threads."""
        cells = tuple(self._cells)
        elapsed_ns = (self._ended_ns or perf_counter_ns()) - self._started_ns
        numbers: dict[str, Any] = {n: sum(getattr(c, n) for c in cells) for n in _SUMMED}
        if not cells:
            return TaskCounters(elapsed_ns)
        histograms = zip(*(cell.histogram.counts() for cell in cells), strict=True)
        return TaskCounters(elapsed_ns, histogram=tuple(map(sum, histograms)), **numbers)

    def start(self) -> None:
        """Start the clock with the stage. Called by the engine."""
        self._started_ns = perf_counter_ns()

    def end(self) -> None:
        """Stop the clock at the end of the stage. Called by the engine."""
        self._ended_ns = self._ended_ns or perf_counter_ns()

    @property
    def is_heard(self) -> bool:
        """Whether the callback has any effect."""
        return is_heard(self.interval_stats_callback, TaskStatsHook.interval_stats_callback)

    def report_interval(self, runner: LazyRunner) -> None:
        """Call ``interval_stats_callback`` with the statistics since the last call."""
        from .statistics import task_stats  # a loader's own hooks report no intervals

        now = self.counters()
        interval, self._last = now.since(self._last), now
        call_back(self.interval_stats_callback, task_stats(interval), self.info, runner)


class _Timed:
    """The clock of one task, where a subclass calls ``super().task_hook()``."""

    def __init__(self, cell: TaskCell) -> None:
        self._cell = cell

    def __enter__(self) -> None:
        self._wall, self._cpu = perf_counter_ns(), thread_time_ns()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        add = self._cell.add if kind is None else self._cell.add_failure
        add(perf_counter_ns() - self._wall, thread_time_ns() - self._cpu)

    async def __aenter__(self) -> None:
        self.__enter__()  # SPDL's hooks are asynchronous: `async with super().task_hook(item)`

    async def __aexit__(self, kind: type[BaseException] | None, *details: object) -> None:
        self.__exit__(kind, *details)


HookFactory = Callable[[StageInfo], list[TaskHook]]
