"""What users have around a stage: the queue after it, and its hooks, from its first thread to its
last; how they are made and checked when a pipeline is built, and entered when it runs."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from .channel import Channel, Mark
from .counters import QueueCounters
from .hooks import TaskHook, TaskStatsHook, call_back, check_interval, is_heard
from .statistics import QueuePerfStats, queue_stats

if TYPE_CHECKING:
    from .counters import TaskCell
    from .hooks import StageInfo
    from .loop import AnyContext, LazyRunner, LoopThread

R = TypeVar("R")

_logger = logging.getLogger("spdl_torch.pipeline")


class StatsQueue(Channel[Any]):
    """The queue after a stage, named after the stage that fills it: ``0:1:decode[10]_queue``.

    ``interval``: as for :class:`TaskStatsHook`.
    """

    def __init__(self, info: StageInfo, buffer_size: int, interval: float | None = None) -> None:
        super().__init__(buffer_size)
        self.info = info
        self.buffer_size = buffer_size
        self.interval = check_interval(interval, f"{info}: interval")
        self._last = QueueCounters()
        self._shown: StatsQueue | None = None

    def show(self, queue: StatsQueue) -> None:
        """Show the figures of another queue: nothing passes through this one."""
        self._shown = queue

    def counters(self) -> QueueCounters:
        """Return everything counted so far, open waits and open empty time included."""
        return super().counters() if self._shown is None else self._shown.counters()

    def stage_hook(self) -> AnyContext:
        """Return a context, entered before the first item is put and left after the last one."""
        return nullcontext()

    @property
    def name(self) -> str:
        """Stage name plus ``_queue``; the same in every epoch."""
        return f"{self.info}_queue"

    async def interval_stats_callback(self, stats: QueuePerfStats) -> None:
        """Override to export; ``async def`` or plain. The default logs at INFO level."""
        _logger.info(
            "%s: %d items, %.1f items/s, put waits %.3f ms, get waits %.3f ms, occupied %.0f %%",
            self.name,
            stats.num_items,
            stats.qps,
            stats.ave_put_time * 1e3,
            stats.ave_get_time * 1e3,
            stats.occupancy_rate * 100,
        )

    @property
    def is_heard(self) -> bool:
        """Whether the callback has any effect."""
        return is_heard(self.interval_stats_callback, StatsQueue.interval_stats_callback)

    def report_interval(self, runner: LazyRunner) -> None:
        """Call ``interval_stats_callback`` with the statistics since the last call."""
        now = self.counters()
        interval, self._last = now.since(self._last), now
        call_back(self.interval_stats_callback, queue_stats(interval), self.name, runner)


def new_queue(
    queue_class: Callable[..., StatsQueue],
    interval: float | None,
    info: StageInfo,
    buffer_size: int,
) -> StatsQueue:
    """Return the queue after a stage. ``interval``: for one whose class gives it none."""
    queue = queue_class(info, buffer_size=buffer_size)
    _check(queue)
    if interval and queue.interval in (None, -1):
        queue.interval = interval
    return queue


def _check(queue: Any) -> None:
    name = type(queue).__name__
    if not isinstance(queue, StatsQueue):
        raise TypeError(
            f"build: queue_class must make a spdl_torch.pipeline.StatsQueue, got {name}. Subclass "
            "StatsQueue and override interval_stats_callback."
        )
    for method in ("put", "get"):
        if inspect.iscoroutinefunction(getattr(type(queue), method)):
            raise TypeError(
                f"build: {name}.{method} is a coroutine function, and threads use the queues here, "
                "without an event loop. Override interval_stats_callback, which is given the waits "
                f"of put and get; or make {method} a plain method."
            )
    if type(queue).get is not StatsQueue.get:
        raise TypeError(
            f"build: {name}.get would never be called: stages take items by get_numbered(timeout), "
            "which returns (number, item). Override that instead."
        )


class StageHooks:
    """The hooks that a factory made for a stage, and those of the queues after it. A source has
    none of the former.
    """

    def __init__(self, hooks: Sequence[TaskHook], loop: LoopThread) -> None:
        self._loop = loop
        self._hooks = hooks = list(hooks)
        self.recorders = [hook for hook in hooks if isinstance(hook, TaskStatsHook)]
        # Hooks without code of the user's are not entered: where task_hook is not overridden,
        # workers write into the recorder's cells directly.
        self.of_tasks = [hook for hook in hooks if not _is_plain_recorder(hook)]
        """Those that every task enters."""
        self._entered = ExitStack()

    def enter(self, queues: tuple[StatsQueue, ...]) -> None:
        """Enter the hooks of the queues, where their classes have some, and of the stage; start the
        clocks."""
        for queue in queues:
            if type(queue).stage_hook is not StatsQueue.stage_hook:
                self._enter(queue.stage_hook())
        for hook in self._hooks:
            if isinstance(hook, TaskStatsHook):
                hook.watch.start()
            self._enter(hook.stage_hook())

    def _enter(self, context: AnyContext) -> None:
        if not isinstance(context, AbstractContextManager):
            context = self._loop.entered(context)
        self._entered.enter_context(context)

    def leave(self) -> None:
        """Leave what was entered, and stop the clocks. Raises: what a hook raises."""
        try:
            self._entered.close()
        finally:
            for recorder in self.recorders:
                recorder.watch.stop()

    def share(self, cell: TaskCell) -> None:
        """Let the recorders count what a thread writes into its cell."""
        for recorder in self.recorders:
            if _is_plain_recorder(recorder):
                recorder.share(cell)

    def around(self, call: Callable[[Any], R], runner: LazyRunner) -> Callable[[Any], R]:
        """Return ``call`` inside the task hooks."""
        hooks = self.of_tasks
        if not hooks:
            return call

        def call_hooked(item: Any) -> R:
            given = None if type(item) is Mark else item  # where an aggregator is flushed
            with ExitStack() as stack:
                for hook in hooks:
                    stack.enter_context(runner.blocking(hook.task_hook(given)))
                return call(item)
            raise RuntimeError("a task hook must not swallow the exception of the op.")

        return call_hooked


def _is_plain_recorder(hook: TaskHook) -> bool:
    return isinstance(hook, TaskStatsHook) and type(hook).task_hook is TaskStatsHook.task_hook
