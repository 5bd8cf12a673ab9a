"""What is counted about stages and queues, and the figures computed from it.

Counters only grow: a *lap* (one reporting interval) is the difference of two readings, so
nothing is reset and no reading can lose what another one saw. Times inside are integer
nanoseconds; times in the public classes are seconds, ratios are 0 to 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "BUCKETS_OF_SMALL",
    "NUM_SMALL",
    "Histogram",
    "PipelineStats",
    "QueueCounters",
    "QueuePerfStats",
    "StageStats",
    "TaskCounters",
    "TaskPerfStats",
    "queue_stats",
    "task_stats",
]

_SUB_BITS = 3
_SUB = 1 << _SUB_BITS
_NUM_BUCKETS = (64 - _SUB_BITS) * _SUB


class Histogram:
    """Counts durations in buckets whose width is 1/8 of their value (percentiles within 6.3 %).

    A value of n bits falls into one of 8 buckets by its 3 bits below the leading one, the layout
    of HdrHistogram (http://hdrhistogram.org) with 3 significant bits.
    """

    __slots__ = ("buckets",)

    def __init__(self) -> None:
        self.buckets = [0] * _NUM_BUCKETS
        """How many values lie in each; for those that cannot afford the call of ``add``."""

    def add(self, nanoseconds: int) -> None:
        """Count one duration."""
        self.buckets[bucket_of(nanoseconds)] += 1

    def counts(self) -> tuple[int, ...]:
        """The count of every bucket."""
        return tuple(self.buckets)


def bucket_of(nanoseconds: int) -> int:
    """The bucket of a duration."""
    if nanoseconds < _SUB:
        return max(nanoseconds, 0)
    shift = nanoseconds.bit_length() - _SUB_BITS - 1
    return ((shift + 1) << _SUB_BITS) | ((nanoseconds >> shift) & (_SUB - 1))


NUM_SMALL = 4096
BUCKETS_OF_SMALL = tuple(map(bucket_of, range(NUM_SMALL)))
"""The buckets of the durations of cheap tasks, which a call of ``bucket_of`` would cost dearly."""


def _middle_of(bucket: int) -> float:
    if bucket < _SUB:
        return float(bucket)
    shift = (bucket >> _SUB_BITS) - 1
    return float((_SUB | (bucket & (_SUB - 1))) << shift) + (1 << shift) / 2


def percentile(counts: Sequence[int], share: float, num_zero: int = 0) -> float:
    """The duration in ns below which ``share`` of the values lie; 0.0 if there are none.

    ``num_zero`` more values of 0 are taken as counted (calls that did not wait).
    """
    total = sum(counts) + num_zero
    rank = share * total
    seen = num_zero
    if total == 0 or seen >= rank:
        return 0.0
    for bucket, count in enumerate(counts):
        seen += count
        if count and seen >= rank:
            return _middle_of(bucket)
    raise AssertionError("guaranteed by rank <= total")


def _difference(now: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(now, before, strict=True))


_NO_COUNTS = (0,) * _NUM_BUCKETS


@dataclass(frozen=True, slots=True)
class TaskCounters:
    """A reading of one stage's tasks since it started."""

    elapsed_ns: int = 0
    num_tasks: int = 0
    num_failures: int = 0
    busy_ns: int = 0
    """Wall time inside the op, failures included."""
    failed_ns: int = 0
    """Wall time inside the op, of the failures."""
    cpu_ns: int = 0
    """CPU time, of the tasks of which it was read."""
    clocked_ns: int = 0
    """Wall time of those tasks."""
    histogram: tuple[int, ...] = _NO_COUNTS
    """Of the tasks that succeeded."""

    def since(self, before: TaskCounters) -> TaskCounters:
        """The lap between ``before`` and this reading."""
        return TaskCounters(
            self.elapsed_ns - before.elapsed_ns,
            self.num_tasks - before.num_tasks,
            self.num_failures - before.num_failures,
            self.busy_ns - before.busy_ns,
            self.failed_ns - before.failed_ns,
            self.cpu_ns - before.cpu_ns,
            self.clocked_ns - before.clocked_ns,
            _difference(self.histogram, before.histogram),
        )


_NO_WAIT = (0, 0, _NO_COUNTS)


@dataclass(frozen=True, slots=True)
class QueueCounters:
    """A reading of one queue since it was made."""

    elapsed_ns: int = 0
    num_put: int = 0
    num_got: int = 0
    put_wait: tuple[int, int, tuple[int, ...]] = _NO_WAIT
    """Total ns (open waits included), waits open now, histogram of the closed waits."""
    get_wait: tuple[int, int, tuple[int, ...]] = _NO_WAIT
    empty_ns: int = 0
    peak_items: int = 0

    def since(self, before: QueueCounters) -> QueueCounters:
        """The lap between ``before`` and this reading."""
        return QueueCounters(
            self.elapsed_ns - before.elapsed_ns,
            self.num_put - before.num_put,
            self.num_got - before.num_got,
            _wait_since(self.put_wait, before.put_wait),
            _wait_since(self.get_wait, before.get_wait),
            self.empty_ns - before.empty_ns,
            self.peak_items,
        )


def _wait_since(
    now: tuple[int, int, tuple[int, ...]], before: tuple[int, int, tuple[int, ...]]
) -> tuple[int, int, tuple[int, ...]]:
    return now[0] - before[0], now[1], _difference(now[2], before[2])


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
    """Mean CPU time of a call in its own thread, in seconds; of calls below 20 µs it is read of one
    in eight. Far below ``ave_time`` means that
    the op waits: for I/O, for the GIL or for a core."""
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


def task_stats(lap: TaskCounters) -> TaskPerfStats:
    """The figures of a lap."""
    num_ok = lap.num_tasks - lap.num_failures
    cpu_share = lap.cpu_ns / lap.clocked_ns if lap.clocked_ns > 0 else 0.0
    return TaskPerfStats(
        num_tasks=lap.num_tasks,
        num_failures=lap.num_failures,
        ave_time=_mean_seconds(lap.busy_ns - lap.failed_ns, num_ok),
        p90_time=percentile(lap.histogram, 0.90) / 1e9,
        p99_time=percentile(lap.histogram, 0.99) / 1e9,
        elapsed=lap.elapsed_ns / 1e9,
        ave_cpu_time=_mean_seconds(lap.busy_ns, lap.num_tasks) * cpu_share,
        p50_time=percentile(lap.histogram, 0.50) / 1e9,
        busy_time=lap.busy_ns / 1e9,
    )


def queue_stats(lap: QueueCounters) -> QueuePerfStats:
    """The figures of a lap."""
    put_ns, puts_open, put_histogram = lap.put_wait
    get_ns, gets_open, get_histogram = lap.get_wait
    put_zeros = max(0, lap.num_put - sum(put_histogram))
    get_zeros = max(0, lap.num_got - sum(get_histogram))
    empty = lap.empty_ns / lap.elapsed_ns if lap.elapsed_ns > 0 else 1.0
    return QueuePerfStats(
        elapsed=lap.elapsed_ns / 1e9,
        num_items=lap.num_got,
        ave_put_time=_mean_seconds(put_ns, lap.num_put + puts_open),
        ave_get_time=_mean_seconds(get_ns, lap.num_got + gets_open),
        occupancy_rate=min(1.0, max(0.0, 1.0 - empty)),
        p90_put_time=percentile(put_histogram, 0.90, put_zeros) / 1e9,
        p99_put_time=percentile(put_histogram, 0.99, put_zeros) / 1e9,
        p90_get_time=percentile(get_histogram, 0.90, get_zeros) / 1e9,
        p99_get_time=percentile(get_histogram, 0.99, get_zeros) / 1e9,
        put_wait_time=put_ns / 1e9,
        get_wait_time=get_ns / 1e9,
    )


def _mean_seconds(total_ns: int, count: int) -> float:
    return total_ns / count / 1e9 if count > 0 else 0.0


@dataclass(frozen=True, slots=True)
class StageStats:
    """One stage since the run started, as a person reads it."""

    name: str
    concurrency: int
    tasks: TaskPerfStats
    queue: QueuePerfStats
    """Of the queue that this stage fills."""
    num_dropped: int
    """Tasks whose op returned None."""
    busy_ratio: float
    """Share of the threads' time spent inside the op."""
    wait_in_ratio: float
    """Share of the threads' time spent waiting for an item."""
    wait_out_ratio: float
    """Share of the threads' time spent waiting for room after the stage."""
    thread_time: float = 0.0
    """Seconds that all threads of the stage were there, added up: elapsed time by concurrency, if
    that never changed."""

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
    """A reading of a whole run, in the order of the stages."""

    elapsed: float
    """Seconds since the run (for a loader: the epoch) started."""
    consumer_wait_ratio: float
    """Share of that time in which the consumer waited for an item."""
    stages: tuple[StageStats, ...]
