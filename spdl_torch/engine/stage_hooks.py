"""What users have around a stage: the queue after it, and its hooks, from its first thread to its
last; how they are made and checked when a pipeline is built, and entered when it runs."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from .channel import Channel, Mark
from .counters import QueueCounters
from .failures import attach_note
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
    """Return the queue after a stage.

    queue_class: called as ``queue_class(info, buffer_size=n)``; ``interval=`` is passed too where
        one was given to ``build``, the class takes it and a partial has none of its own.
    """
    options = {"interval": interval} if interval and _takes_interval(queue_class) else {}
    try:
        queue = queue_class(info, buffer_size=buffer_size, **options)
    except Exception as error:
        attach_note(error, f"build: raised by queue_class({info}, buffer_size={buffer_size})")
        raise
    _check(queue)
    return queue


def _takes_interval(queue_class: Callable[..., Any]) -> bool:
    if isinstance(queue_class, functools.partial) and "interval" in queue_class.keywords:
        return False
    try:
        inspect.signature(queue_class).bind_partial(interval=None)
    except (TypeError, ValueError):
        return False
    return True


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


class BadHookError(TypeError):
    """Raised where a hook's method returns no context manager. No item is to blame, so it ends the
    pipeline.
    """


def checked_hooks(hooks: Any, stage: str) -> list[TaskHook]:
    """Return the hooks that a factory made for a stage. Raises: TypeError: no list of hooks."""
    if not isinstance(hooks, list | tuple):
        raise TypeError(
            f"build: task_hook_factory must return a list of hooks for stage {stage!r}, got "
            f"{type(hooks).__name__}. Return [] for none."
        )
    return list(hooks)


def checked_context(hook: object, name: str, stage: str, given: Any) -> AnyContext:
    """Return what a method of a hook has returned. Raises: BadHookError: it cannot be entered."""
    if isinstance(given, AbstractContextManager | AbstractAsyncContextManager):
        return given
    if hasattr(given, "close"):
        given.close()  # a coroutine: no warning that it was never awaited
    raise BadHookError(
        f"stage {stage!r}: {type(hook).__name__}.{name} must return a context manager, got "
        f"{type(given).__name__}. Decorate it with contextlib.contextmanager or "
        "contextlib.asynccontextmanager."
    )


def _stage_hook(
    owner: TaskHook | StatsQueue, stage: str, loop: LoopThread
) -> AbstractContextManager[Any]:
    """Return ``owner.stage_hook()``, on the loop if it is asynchronous. Raises: BadHookError."""
    context = checked_context(owner, "stage_hook", stage, owner.stage_hook())
    return context if isinstance(context, AbstractContextManager) else loop.entered(context)


class StageHooks:
    """The hooks that a factory made for a stage, and those of the queues after it. A source has
    none of the former. Raises: TypeError: no list of hooks.
    """

    def __init__(self, hooks: list[TaskHook], stage: str, loop: LoopThread) -> None:
        self._stage = stage
        self._loop = loop
        self._hooks = hooks = checked_hooks(hooks, stage)
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
                context = _stage_hook(queue, queue.info.stage_name, self._loop)
                self._entered.enter_context(context)
        for hook in self._hooks:
            if isinstance(hook, TaskStatsHook):
                hook.start()
            self._entered.enter_context(_stage_hook(hook, self._stage, self._loop))

    def leave(self) -> None:
        """Leave what was entered, and stop the clocks. Raises: what a hook raises."""
        try:
            self._entered.close()
        finally:
            for recorder in self.recorders:
                recorder.end()

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
                    context = hook.task_hook(given)
                    context = checked_context(hook, "task_hook", self._stage, context)
                    stack.enter_context(runner.blocking(context))
                return call(item)
            raise RuntimeError("a task hook must not swallow the exception of the op.")

        return call_hooked


def _is_plain_recorder(hook: TaskHook) -> bool:
    return isinstance(hook, TaskStatsHook) and type(hook).task_hook is TaskStatsHook.task_hook
