"""The queue after a stage, which users subclass to export its statistics.

``interval_stats_callback`` is called like that of a :class:`~.hooks.TaskStatsHook`.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from .channel import Channel
from .counters import QueueCounters
from .failures import attach_note
from .hooks import call_back, check_interval, is_heard
from .statistics import QueuePerfStats, queue_stats

if TYPE_CHECKING:
    from .hooks import StageInfo
    from .loop import AnyContext, LazyRunner

    QueueMaker = Callable[[StageInfo, int], "StatsQueue"]

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


def queue_maker(
    queue_class: Callable[..., StatsQueue] | None, interval: float | None
) -> QueueMaker:
    """Return the function that creates the queue after a stage: ``make(info, buffer_size)``.

    queue_class: called as ``queue_class(info, buffer_size=n)``; ``interval=`` is passed too where
        one was given to ``build``, the class takes it and a partial has none of its own.
    """
    make_queue = queue_class or StatsQueue
    options = {"interval": interval} if interval and _takes_interval(make_queue) else {}
    checked: set[type] = set()

    def make(info: StageInfo, buffer_size: int) -> StatsQueue:
        try:
            queue = make_queue(info, buffer_size=buffer_size, **options)
        except Exception as error:
            attach_note(error, f"build: raised by queue_class({info}, buffer_size={buffer_size})")
            raise
        if type(queue) not in checked:
            _check(queue)
            checked.add(type(queue))
        return queue

    return make


def _takes_interval(queue_class: Callable[..., Any]) -> bool:
    if isinstance(queue_class, functools.partial) and "interval" in queue_class.keywords:
        return False
    try:
        parameters = inspect.signature(queue_class).parameters
    except (TypeError, ValueError):
        return False
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return takes_any or "interval" in parameters


def _check(queue: Any) -> None:
    name = type(queue).__name__
    if not isinstance(queue, StatsQueue):
        raise TypeError(
            f"build: queue_class must make a spdl_torch.pipeline.StatsQueue, got {name}. Subclass "
            "StatsQueue and override interval_stats_callback."
        )
    for method in ("put", "get"):
        own = getattr(type(queue), method)
        if own is getattr(StatsQueue, method):
            continue
        if inspect.iscoroutinefunction(own):
            raise TypeError(
                f"build: {name}.{method} is a coroutine function, and threads use the queues here, "
                "without an event loop. Override interval_stats_callback, which is given the waits "
                f"of put and get; or make {method} a plain method."
            )
        if method == "get":
            raise TypeError(
                f"build: {name}.get would never be called: stages take items by get_numbered("
                "timeout), which returns (number, item). Override that instead."
            )
