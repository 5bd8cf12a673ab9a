"""The statistics of stages and queues as users read them: times in seconds, ratios 0 to 1."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..machine.histogram import percentile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .counters import QueueCounters, TaskCounters


@dataclass(frozen=True, slots=True)
class TaskPerfStats:
    """One stage in one interval. Times are taken inside the worker thread, around the op alone."""

    num_tasks: int
    """Calls that ended in this interval, failures included."""
    num_failures: int
    ave_time: float
    """Mean wall time of the calls that succeeded, in seconds."""
    p90_time: float
    p99_time: float
    elapsed: float = 0.0
    """Length of the interval, in seconds."""
    ave_cpu_time: float = 0.0
    """Mean CPU time of a call in its own thread, in seconds; of calls below 0.2 ms, one in eight
    is measured, of longer ones every one, to 0.05 ms. Far below ``ave_time`` means that the op
    waits: for I/O, the GIL or a core."""
    p50_time: float = 0.0
    busy_time: float = 0.0
    """Seconds that the threads spent inside the op, added up, failures included."""


@dataclass(frozen=True, slots=True)
class QueuePerfStats:
    """One queue in one interval; a wait that is still open counts up to now."""

    elapsed: float
    """Length of the interval, in seconds."""
    num_items: int
    """Items that left the queue; the end of the data is not an item."""
    ave_put_time: float
    """Mean seconds that a put waited for room: high means that the next stage is slower."""
    ave_get_time: float
    """Mean seconds that a get waited for an item: high means that the stages before are slower."""
    occupancy_rate: float
    """Share of the interval in which the queue held an item: near 1 the next stage is always
    served, near 0 it starves."""
    p90_put_time: float = 0.0
    p99_put_time: float = 0.0
    p90_get_time: float = 0.0
    p99_get_time: float = 0.0
    put_wait_time: float = 0.0
    """Seconds that all puts waited for room, added up over the threads."""
    get_wait_time: float = 0.0
    """Seconds that all gets waited for an item, added up over the threads."""

    @property
    def qps(self) -> float:
        """Items a second."""
        return self.num_items / self.elapsed if self.elapsed > 0 else 0.0


def task_stats(interval: TaskCounters) -> TaskPerfStats:
    """Return the statistics of an interval."""
    num_ok = interval.num_tasks - interval.num_failures
    return TaskPerfStats(
        num_tasks=interval.num_tasks,
        num_failures=interval.num_failures,
        ave_time=_mean_seconds(interval.busy_ns - interval.failed_ns, num_ok),
        p90_time=percentile(interval.histogram, 0.90) / 1e9,
        p99_time=percentile(interval.histogram, 0.99) / 1e9,
        elapsed=interval.elapsed_ns / 1e9,
        ave_cpu_time=_mean_seconds(_cpu_ns(interval), interval.num_tasks),
        p50_time=percentile(interval.histogram, 0.50) / 1e9,
        busy_time=interval.busy_ns / 1e9,
    )


def _cpu_ns(interval: TaskCounters) -> float:
    """Return the CPU time of all tasks: of long ones as it was read, of the others in proportion to
    those of them for which it was."""
    cpu_ns, clocked_ns = interval.cpu_ns, interval.clocked_ns
    if clocked_ns > interval.long_ns:
        cpu_ns, clocked_ns = cpu_ns - interval.long_cpu_ns, clocked_ns - interval.long_ns
    if clocked_ns <= 0:
        return 0.0
    others_ns = max(0, interval.busy_ns - interval.long_ns)
    return interval.long_cpu_ns + others_ns * cpu_ns / clocked_ns


def queue_stats(interval: QueueCounters) -> QueuePerfStats:
    """Return the statistics of an interval."""
    put_ns, puts_open, put_histogram = interval.put_wait
    get_ns, gets_open, get_histogram = interval.get_wait
    put_zeros = max(0, interval.num_put - sum(put_histogram))
    get_zeros = max(0, interval.num_got - sum(get_histogram))
    empty = interval.empty_ns / interval.elapsed_ns if interval.elapsed_ns > 0 else 1.0
    return QueuePerfStats(
        elapsed=interval.elapsed_ns / 1e9,
        num_items=interval.num_got,
        ave_put_time=_mean_seconds(put_ns, interval.num_put + puts_open),
        ave_get_time=_mean_seconds(get_ns, interval.num_got + gets_open),
        occupancy_rate=min(1.0, max(0.0, 1.0 - empty)),
        p90_put_time=percentile(put_histogram, 0.90, put_zeros) / 1e9,
        p99_put_time=percentile(put_histogram, 0.99, put_zeros) / 1e9,
        p90_get_time=percentile(get_histogram, 0.90, get_zeros) / 1e9,
        p99_get_time=percentile(get_histogram, 0.99, get_zeros) / 1e9,
        put_wait_time=put_ns / 1e9,
        get_wait_time=get_ns / 1e9,
    )


def _mean_seconds(total_ns: float, count: int) -> float:
    return total_ns / count / 1e9 if count > 0 else 0.0


@dataclass(frozen=True, slots=True)
class StageStats:
    """The statistics of one stage since the run started."""

    name: str
    concurrency: int
    tasks: TaskPerfStats
    queue: QueuePerfStats
    """The statistics of the queue that this stage fills."""
    num_dropped: int
    """Tasks whose op returned None."""
    busy_ratio: float
    """Share of the threads' time spent inside the op."""
    wait_in_ratio: float
    """Share of the threads' time spent waiting for an item."""
    wait_out_ratio: float
    """Share of the threads' time spent waiting for room after the stage."""
    thread_time: float = 0.0
    """Seconds that the stage's threads existed, added up: elapsed time times concurrency, unless
    that changed."""

    @property
    def cpu_ratio(self) -> float:
        """CPU time over wall time inside the op; 0.0 before the first task."""
        t = self.tasks
        return min(1.0, t.ave_cpu_time / t.ave_time) if t.ave_time > 0 else 0.0

    @property
    def capacity(self) -> float:
        """Items a second if the stage never waited: concurrency over the mean task time."""
        return self.concurrency / self.tasks.ave_time if self.tasks.ave_time > 0 else 0.0


@dataclass(frozen=True, slots=True)
class PipelineStats:
    """The statistics of a whole run, in the order of the stages."""

    elapsed: float
    """Seconds since the run (for a loader: the epoch) started."""
    consumer_wait_ratio: float
    """Share of that time in which the consumer waited for an item."""
    stages: tuple[StageStats, ...]
    data: Mapping[str, float] = field(default_factory=dict)
    """For a loader, the statistics of its dataset in this epoch by name, e.g. ``cache/found``."""
