"""The queue after a stage, which users subclass to export its statistics.

``interval_stats_callback`` is called like that of a :class:`~.task_hooks.TaskStatsHook`.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from ..channel.channel import Channel
from ..stats.counters import QueueCounters
from ..stats.perf_stats import QueuePerfStats, queue_stats
from .callbacks import call_back, check_interval, is_heard

if TYPE_CHECKING:
    from .context_managers import AnyContext, LazyRunner
    from .stage_info import StageInfo


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

    def report_interval(self, runner: LazyRunner) -> None:
        """Call ``interval_stats_callback`` with the statistics since the last call."""
        if not is_heard(self.interval_stats_callback, StatsQueue.interval_stats_callback):
            return
        now = self.counters()
        interval, self._last = now.since(self._last), now
        call_back(self.interval_stats_callback, queue_stats(interval), self.name, runner)
