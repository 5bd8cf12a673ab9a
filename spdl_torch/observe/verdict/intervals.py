"""The statistics of an interval of a run: the difference of two readings, and sums of those."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...engine.statistics import PipelineStats, QueuePerfStats, StageStats, TaskPerfStats

if TYPE_CHECKING:
    from collections.abc import Sequence


def interval_between(before: PipelineStats | None, after: PipelineStats) -> PipelineStats:
    """Return the statistics between two readings of a run; all of ``after`` where ``before`` is
    None or from an earlier run.

    Counts, means and ratios are those of the interval. Percentiles are those of the run so far.
    """
    names = [stage.name for stage in after.stages]
    if (
        before is None
        or before.elapsed > after.elapsed
        or [stage.name for stage in before.stages] != names
        or any(b.tasks.num_tasks > a.tasks.num_tasks for b, a in _pairs(before, after))
    ):
        return after
    elapsed = after.elapsed - before.elapsed
    waited = _waited(after) - _waited(before)
    return PipelineStats(
        elapsed=elapsed,
        consumer_wait_ratio=_share(waited, elapsed),
        stages=tuple(_stage_between(then, now) for then, now in _pairs(before, after)),
    )


def after_pause(begin: PipelineStats, end: PipelineStats) -> PipelineStats:
    """Return the reading at which the interval after a pause begins; the pause lasted from
    ``begin`` to ``end``.

    Items loaded ahead during the pause count in that interval, so that the sum misses none; the
    time of the pause counts nowhere.
    """
    if interval_between(begin, end) is end:
        return end  # of a later run
    stages = []
    for then, now in _pairs(begin, end):
        counts = {
            name: getattr(then.tasks, name)
            for name in ("num_tasks", "num_failures", "ave_time", "ave_cpu_time")
        }
        queue = replace(now.queue, num_items=then.queue.num_items)
        tasks = replace(now.tasks, **counts)
        stages.append(replace(now, tasks=tasks, queue=queue, num_dropped=then.num_dropped))
    return replace(end, stages=tuple(stages))


def sum_of_intervals(intervals: Sequence[PipelineStats]) -> PipelineStats:
    """Return the sum of one loader's intervals, at least one, oldest first, as if contiguous.

    Percentiles are those of the last interval.
    """
    whole, *others = intervals
    for interval in others:
        elapsed = whole.elapsed + interval.elapsed
        whole = PipelineStats(
            elapsed=elapsed,
            consumer_wait_ratio=_share(_waited(whole) + _waited(interval), elapsed),
            stages=tuple(_stage_between(then, now, -1) for then, now in _pairs(whole, interval)),
        )
    return whole


def _pairs(before: PipelineStats, after: PipelineStats) -> list[tuple[StageStats, StageStats]]:
    return list(zip(before.stages, after.stages, strict=True))


def _waited(stats: PipelineStats) -> float:
    return stats.consumer_wait_ratio * stats.elapsed


def _share(seconds: float, elapsed: float) -> float:
    return min(1.0, max(0.0, seconds / elapsed)) if elapsed > 0 else 0.0


def _stage_between(then: StageStats, now: StageStats, sign: int = 1) -> StageStats:
    """Return ``now`` minus ``then``; with ``sign`` -1, their sum."""
    tasks = _tasks_between(then.tasks, now.tasks, sign)

    # Shares of the time that all threads had: their number may have changed.
    then_threads, now_threads = thread_seconds(then), thread_seconds(now)
    threads = now_threads - sign * then_threads

    def share(before: float, after: float) -> float:
        return _share(after * now_threads - sign * before * then_threads, threads)

    return replace(
        now,
        tasks=tasks,
        queue=queue_between(then.queue, now.queue, sign),
        num_dropped=now.num_dropped - sign * then.num_dropped,
        # Not from the ratios, which are at most 1: a task that began in the interval before and
        # ends in this one adds all of its time here, and the sum of the intervals needs it.
        busy_ratio=_share(tasks.busy_time, threads),
        wait_in_ratio=share(then.wait_in_ratio, now.wait_in_ratio),
        wait_out_ratio=share(then.wait_out_ratio, now.wait_out_ratio),
        thread_time=max(0.0, threads),
    )


def thread_seconds(stage: StageStats) -> float:
    """Return the seconds of all threads of the stage together, also for statistics made by hand."""
    return stage.thread_time or stage.tasks.elapsed * stage.concurrency


def _tasks_between(then: TaskPerfStats, now: TaskPerfStats, sign: int) -> TaskPerfStats:
    num_tasks = now.num_tasks - sign * then.num_tasks
    num_failures = now.num_failures - sign * then.num_failures
    num_good = num_tasks - num_failures
    good = now.ave_time * (now.num_tasks - now.num_failures)
    good -= sign * then.ave_time * (then.num_tasks - then.num_failures)
    cpu = now.ave_cpu_time * now.num_tasks - sign * then.ave_cpu_time * then.num_tasks
    return replace(
        now,
        num_tasks=num_tasks,
        num_failures=num_failures,
        ave_time=max(0.0, good) / num_good if num_good > 0 else 0.0,
        ave_cpu_time=max(0.0, cpu) / num_tasks if num_tasks > 0 else 0.0,
        elapsed=max(0.0, now.elapsed - sign * then.elapsed),
        busy_time=max(0.0, now.busy_time - sign * then.busy_time),
    )


def queue_between(then: QueuePerfStats, now: QueuePerfStats, sign: int = 1) -> QueuePerfStats:
    """Return ``now`` minus ``then``; with ``sign`` -1, their sum."""
    elapsed = max(0.0, now.elapsed - sign * then.elapsed)
    num_items = now.num_items - sign * then.num_items
    put = max(0.0, now.put_wait_time - sign * then.put_wait_time)
    get = max(0.0, now.get_wait_time - sign * then.get_wait_time)
    held = now.occupancy_rate * now.elapsed - sign * then.occupancy_rate * then.elapsed
    return replace(
        now,
        elapsed=elapsed,
        num_items=num_items,
        ave_put_time=put / num_items if num_items > 0 else 0.0,
        ave_get_time=get / num_items if num_items > 0 else 0.0,
        occupancy_rate=_share(held, elapsed),
        put_wait_time=put,
        get_wait_time=get,
    )
