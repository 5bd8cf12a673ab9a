"""The statistics of a stage, read while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..hooks.task_hooks import TaskStatsHook
from ..stats.perf_stats import StageStats, queue_stats, task_stats

if TYPE_CHECKING:
    from ..stage.stage import Stage


def stage_stats(stage: Stage) -> StageStats:
    """Return the statistics of a stage since the start, open waits included."""
    recorder = next(iter(stage.hooks.recorders), None)
    tasks = recorder.counters() if recorder else TaskStatsHook(stage.info).counters()
    inlet, outlet = stage.inlet.counters(), stage.outlet.counters()
    thread_ns = max(1, stage.threads.thread_count.thread_ns(tasks.elapsed_ns))
    return StageStats(
        name=stage.spec.name,
        concurrency=stage.threads.wanted,
        tasks=task_stats(tasks),
        queue=queue_stats(outlet),
        num_dropped=stage.tally.num_dropped,
        busy_ratio=tasks.busy_ns / thread_ns,
        wait_in_ratio=min(1.0, (inlet.get_wait[0] + stage.turn_wait_ns) / thread_ns),
        wait_out_ratio=min(1.0, outlet.put_wait[0] / thread_ns),
        thread_time=thread_ns / 1e9,
    )
