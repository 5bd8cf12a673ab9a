"""The figures of a part of a run: the difference of two readings."""

from __future__ import annotations

from dataclasses import replace

from ..pipeline.stats import PipelineStats, StageStats

__all__ = ["lap_between"]


def lap_between(before: PipelineStats | None, after: PipelineStats) -> PipelineStats:
    """What came between two readings of one run; all of ``after`` where ``before`` is None or of
    an earlier run.

    Counts and ratios are of the lap. Percentiles and occupancy are those of ``after``: they are of
    the run so far.
    """
    names = [stage.name for stage in after.stages]
    if (
        before is None
        or before.elapsed >= after.elapsed
        or [stage.name for stage in before.stages] != names
        or any(b.tasks.num_tasks > a.tasks.num_tasks for b, a in _pairs(before, after))
    ):
        return after
    elapsed = after.elapsed - before.elapsed

    def share(then: float, now: float) -> float:
        """A share of the time so far, then and now, as a share of the time between."""
        seconds = now * after.elapsed - then * before.elapsed if before is not None else 0.0
        return min(1.0, max(0.0, seconds / elapsed))

    return PipelineStats(
        elapsed=elapsed,
        consumer_wait_ratio=share(before.consumer_wait_ratio, after.consumer_wait_ratio),
        stages=tuple(
            replace(
                now,
                tasks=replace(
                    now.tasks,
                    num_tasks=now.tasks.num_tasks - then.tasks.num_tasks,
                    num_failures=now.tasks.num_failures - then.tasks.num_failures,
                    elapsed=elapsed,
                    busy_time=now.tasks.busy_time - then.tasks.busy_time,
                ),
                num_dropped=now.num_dropped - then.num_dropped,
                busy_ratio=share(then.busy_ratio, now.busy_ratio),
                wait_in_ratio=share(then.wait_in_ratio, now.wait_in_ratio),
                wait_out_ratio=share(then.wait_out_ratio, now.wait_out_ratio),
            )
            for then, now in _pairs(before, after)
        ),
    )


def _pairs(before: PipelineStats, after: PipelineStats) -> list[tuple[StageStats, StageStats]]:
    return list(zip(before.stages, after.stages, strict=True))
