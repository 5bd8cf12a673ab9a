"""Task hooks: code of users around stages and tasks, and the statistics of a stage's tasks; and the
thread that calls users back with statistics.

A subclass overrides ``interval_stats_callback``; it is called with the statistics of each interval,
and once more with the last, partial one when the run ends, so that the sums of all callbacks
equal what was processed. Callbacks run on one reporter thread of the pipeline, never on a worker.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from operator import add
from time import monotonic, perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, Any, Protocol

from .counters import Stopwatch, TaskCell, TaskCounters

if TYPE_CHECKING:
    from .loop import AnyContext, LazyRunner
    from .statistics import TaskPerfStats
    from .threads import ThreadGroup

_logger = logging.getLogger("spdl_torch.pipeline")

_TAIL_SECONDS = 1.0  # the last interval's wait for running ops; then it is reported without them


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
        self.watch = Stopwatch().start()
        """Counts from the stage's start to its end."""
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
        elapsed_ns = self.watch.elapsed_ns()
        if not cells:
            return TaskCounters(elapsed_ns)
        numbers = map(sum, zip(*(cell.numbers() for cell in cells), strict=True))
        histogram, *others = (cell.histogram.counts() for cell in cells)
        for other in others:
            histogram = tuple(map(add, histogram, other))
        return TaskCounters._make((elapsed_ns, *numbers, histogram))

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


def is_heard(callback: Callable[..., Any], default: Callable[..., Any]) -> bool:
    """Return whether a callback is not the default, which logs at INFO level, or that level is
    logged.
    """
    is_default = getattr(callback, "__func__", None) is default
    return not is_default or _logger.isEnabledFor(logging.INFO)


def call_back(
    callback: Callable[[Any], Awaitable[None] | None], stats: Any, who: object, runner: LazyRunner
) -> None:
    """Run a user's callback, awaiting it on the runner's loop if needed. Its error is logged, never
    fatal.
    """
    try:
        result = callback(stats)
        if inspect.isawaitable(result):
            runner.run(_await(result))
    except Exception:
        _logger.exception("%s: interval_stats_callback failed; the pipeline goes on.", who)


async def _await(result: Awaitable[None]) -> None:
    await result


def check_interval(interval: float | None, where: object) -> float | None:
    """Return the interval; SPDL's -1 means None, and stays -1 for subclasses that compare it.

    Raises: ValueError: 0, or a negative number other than -1.
    """
    if interval is not None and interval <= 0 and interval != -1:
        raise ValueError(f"{where} must be > 0 seconds or None, got {interval}.")
    return interval


class Reports(Protocol):
    """A task hook or a queue."""

    interval: float | None
    """The seconds of an interval; None or below 0 = only one, up to the end."""

    @property
    def is_heard(self) -> bool:
        """Whether somebody listens: else no thread is needed."""

    def report_interval(self, runner: LazyRunner) -> None:
        """Report the statistics since the last call; await on the runner's loop."""


class Reporter:
    """Report every interval, the last and partial one included, before the run is closed.

    One event loop, if any is needed, serves all asynchronous callbacks of the run: what they keep
    open, such as a connection, belongs to a loop.
    """

    def __init__(self, subjects: Sequence[Reports], join: Callable[[float | None], bool]) -> None:
        self._subjects: Sequence[Reports] = subjects
        self._join_workers = join
        # Held while the run goes on. A bare lock, not an Event: request_stop() may come from a
        # finalizer on the very thread that is inside the wait, where an Event's lock is held.
        self._going_on = threading.Lock()
        self._going_on.acquire()

    def start(self, threads: ThreadGroup) -> None:
        """Begin the first interval, if somebody listens."""
        self._subjects = [subject for subject in self._subjects if subject.is_heard]
        if self._subjects:
            threads.spawn("stats", self._run)

    def request_stop(self) -> None:
        """Report the last intervals and end. Never blocks."""
        with suppress(RuntimeError):  # it was asked before
            self._going_on.release()

    def _run(self) -> None:
        from .loop import LazyRunner  # asyncio, which a loader does without

        with closing(LazyRunner()) as runner:
            self._report_until_the_end(runner)

    def _report_until_the_end(self, runner: LazyRunner) -> None:
        clock = monotonic()
        # A hook made with SPDL's default has an interval of -1, which means none.
        regular = [(s, s.interval) for s in self._subjects if s.interval and s.interval > 0]
        due = {id(subject): clock + interval for subject, interval in regular}
        while not self._going_on.acquire(timeout=self._until(due)):
            for subject, interval in regular:
                if monotonic() >= due[id(subject)]:
                    due[id(subject)] += interval
                    subject.report_interval(runner)
        # A stop does not wait for running ops, but the last interval does, since it includes them.
        # If that takes too long, it is reported without them, and another when they have ended.
        if not self._join_workers(_TAIL_SECONDS):
            self._report_all(runner)
            self._join_workers(None)
        self._report_all(runner)

    def _until(self, due: dict[int, float]) -> float:
        return max(0.0, min(due.values()) - monotonic()) if due else -1

    def _report_all(self, runner: LazyRunner) -> None:
        for subject in self._subjects:
            subject.report_interval(runner)
