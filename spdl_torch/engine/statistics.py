"""The statistics of stages and queues: sums that add up, and what users read of them.

An interval is the difference of two readings, and a longer time the sum of intervals; ratios, means
and percentiles are computed from those when somebody asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import compress
from typing import Any, Final, Literal, Self

from ..machine.histogram import percentile
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
    or fewer are measured, of longer ones every one, to 0.05 ms. Far below ``ave_time`` means that
    the op waits: for I/O, the GIL or a core."""
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
    return StageStats.of("", 1, interval, QueueCounters()).tasks


def queue_stats(interval: QueueCounters) -> QueuePerfStats:
    """Return the statistics of an interval."""
    return StageStats.of("", 1, TaskCounters(), interval).queue


AS_LATER: Final = ("name", "concurrency")
"""What is no sum: the later of two readings says it."""


class Totals:
    """Sums over a time. ``later - earlier`` is the time between two readings, ``a + b`` both times,
    ``a`` first."""

    __slots__ = ()

    def __sub__(self, earlier: Self) -> Self:
        between: Self = _combined(self, earlier, -1)
        return between

    def __add__(self, later: Self) -> Self:
        both: Self = _combined(later, self, 1)
        return both

    def __radd__(self, nothing: Literal[0]) -> Self:
        """Return itself: ``sum()`` begins with 0."""
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return what is not 0, in JSON's types: stages by number and name."""
        found: dict[str, Any] = {}
        for each in fields(self):  # type: ignore[arg-type]  # of dataclasses
            value = getattr(self, each.name)
            if isinstance(value, tuple):
                value = {f"{number}:{s.name}": s.as_dict() for number, s in enumerate(value, 1)}
            elif isinstance(value, dict):
                value = {str(key): number for key, number in value.items()}
            if value:
                found[each.name] = value
        return found


def _combined(later: Any, other: Any, sign: int) -> Any:
    values = {}
    for each in fields(later):
        now, then = getattr(later, each.name), getattr(other, each.name)
        if each.name in AS_LATER:
            pass
        elif isinstance(now, tuple):
            now = tuple(_combined(*pair, sign) for pair in zip(now, then, strict=True))
        elif isinstance(now, dict):
            sums = {key: now.get(key, 0) + sign * then.get(key, 0) for key in {**then, **now}}
            is_histogram = each.name != "counts"
            now = {key: number for key, number in sums.items() if number or not is_histogram}
        else:
            now += sign * then
        values[each.name] = now
    return type(later)(**values)


@dataclass(frozen=True, kw_only=True)
class StageStats(Totals):
    """The statistics of one stage, and of the queue that it fills; times in nanoseconds."""

    name: str
    concurrency: int
    elapsed_ns: int = 0
    thread_ns: int = 0
    """The time that the stage's threads had together."""
    num_tasks: int = 0
    num_failures: int = 0
    num_dropped: int = 0
    """Tasks whose op returned None."""
    busy_ns: int = 0
    """The time inside the op, failures included."""
    good_ns: int = 0
    """The same of the calls that succeeded."""
    cpu_ns: int = 0
    calls: Mapping[int, float] = field(default_factory=dict)
    """The histogram of the calls that succeeded, here and below by bucket."""
    wait_in_ns: int = 0
    wait_out_ns: int = 0
    queue_ns: int = 0
    """The time of the queue; 0 = the stage fills none."""
    held_ns: int = 0
    """The part of it in which the queue held an item."""
    num_items: int = 0
    put_ns: int = 0
    num_puts: int = 0
    """Puts, with those that wait."""
    puts: Mapping[int, float] = field(default_factory=dict)
    get_ns: int = 0
    num_gets: int = 0
    gets: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        name: str,
        concurrency: int,
        tasks: TaskCounters,
        queue: QueueCounters,
        **own: int,
    ) -> Self:
        """Return the statistics on what was counted. ``own``: fields that are of neither."""
        (put_ns, puts_open, puts), (get_ns, gets_open, gets) = queue.put_wait, queue.get_wait
        return cls(
            name=name,
            concurrency=concurrency,
            elapsed_ns=tasks.elapsed_ns,
            num_tasks=tasks.num_tasks,
            num_failures=tasks.num_failures,
            busy_ns=tasks.busy_ns,
            good_ns=tasks.busy_ns - tasks.failed_ns,
            cpu_ns=_cpu_ns(tasks),
            calls=_counted(tasks.histogram),
            queue_ns=queue.elapsed_ns,
            held_ns=max(0, queue.elapsed_ns - queue.empty_ns),
            num_items=queue.num_got,
            put_ns=put_ns,
            num_puts=queue.num_put + puts_open,
            puts=_counted(puts),
            get_ns=get_ns,
            num_gets=queue.num_got + gets_open,
            gets=_counted(gets),
            **own,
        )

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Return them from the result of :meth:`as_dict`."""
        counted = {
            key: {int(bucket): number for bucket, number in content.get(key, {}).items()}
            for key in ("calls", "puts", "gets")
        }
        return cls(**{**content, **counted})

    @cached_property
    def tasks(self) -> TaskPerfStats:
        """The statistics of the calls."""
        p50, p90, p99 = (percentile(self.calls, share) / 1e9 for share in (0.5, 0.9, 0.99))
        return TaskPerfStats(
            num_tasks=self.num_tasks,
            num_failures=self.num_failures,
            ave_time=_mean_seconds(self.good_ns, self.num_tasks - self.num_failures),
            p90_time=p90,
            p99_time=p99,
            elapsed=self.elapsed_ns / 1e9,
            ave_cpu_time=_mean_seconds(self.cpu_ns, self.num_tasks),
            p50_time=p50,
            busy_time=self.busy_ns / 1e9,
        )

    @cached_property
    def queue(self) -> QueuePerfStats:
        """The statistics of the queue that this stage fills."""
        # Who did not wait is in no histogram.
        puts_at_once = max(0, self.num_puts - sum(self.puts.values()))
        gets_at_once = max(0, self.num_gets - sum(self.gets.values()))
        return QueuePerfStats(
            elapsed=self.queue_ns / 1e9,
            num_items=self.num_items,
            ave_put_time=self._mean_wait(self.put_ns, self.num_puts),
            ave_get_time=self._mean_wait(self.get_ns, self.num_gets),
            occupancy_rate=_share(self.held_ns, self.queue_ns),
            p90_put_time=percentile(self.puts, 0.90, puts_at_once) / 1e9,
            p99_put_time=percentile(self.puts, 0.99, puts_at_once) / 1e9,
            p90_get_time=percentile(self.gets, 0.90, gets_at_once) / 1e9,
            p99_get_time=percentile(self.gets, 0.99, gets_at_once) / 1e9,
            put_wait_time=self.put_ns / 1e9,
            get_wait_time=self.get_ns / 1e9,
        )

    def _mean_wait(self, wait_ns: int, count: int) -> float:
        # Waits that go on from one interval into the next were counted in the first. No wait is
        # longer than the interval: there were at least so many.
        least = round(wait_ns / self.queue_ns) if self.queue_ns else 0
        return _mean_seconds(wait_ns, max(count, least, wait_ns > 0))

    @property
    def thread_time(self) -> float:
        """Seconds that the stage's threads existed, added up: elapsed time times concurrency,
        unless that changed."""
        return self.thread_ns / 1e9

    @property
    def busy_ratio(self) -> float:
        """Share of the threads' time spent inside the op."""
        return _share(self.busy_ns, self.thread_ns)

    @property
    def wait_in_ratio(self) -> float:
        """Share of the threads' time spent waiting for an item."""
        return _share(self.wait_in_ns, self.thread_ns)

    @property
    def wait_out_ratio(self) -> float:
        """Share of the threads' time spent waiting for room after the stage."""
        return _share(self.wait_out_ns, self.thread_ns)

    @property
    def cpu_ratio(self) -> float:
        """CPU time over wall time inside the op; 0.0 before the first task."""
        t = self.tasks
        return min(1.0, t.ave_cpu_time / t.ave_time) if t.ave_time > 0 else 0.0

    @property
    def capacity(self) -> float:
        """Items a second if the stage never waited: concurrency over the mean task time."""
        mean = _mean_seconds(self.good_ns, self.num_tasks - self.num_failures)
        return self.concurrency / mean if mean > 0 else 0.0


@dataclass(frozen=True, slots=True)
class PipelineStats(Totals):
    """The statistics of a whole run, or of an interval of it, in the order of the stages."""

    elapsed_ns: int
    waited_ns: int
    """The time in which the consumer waited for an item."""
    stages: tuple[StageStats, ...]
    counts: Mapping[str, float] = field(default_factory=dict)
    """What a loader's dataset counted, from which ``data`` is computed."""

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Return them from the result of :meth:`as_dict`."""
        stages = map(StageStats.from_dict, content.get("stages", {}).values())
        given = {"elapsed_ns": 0, "waited_ns": 0, **content}
        return cls(**{**given, "stages": tuple(stages)})

    @property
    def data(self) -> dict[str, float]:
        """For a loader, the statistics of its dataset by name, e.g. ``cache/found``."""
        counts = self.counts
        data = {name: count for name, count in counts.items() if not name.startswith("packing/")}
        if room := counts.get("packing/room", 0):
            data["packing/waste"] = 1 - counts["packing/size"] / room
        return data

    @property
    def elapsed(self) -> float:
        """Seconds since the run (for a loader: the epoch) started."""
        return self.elapsed_ns / 1e9

    @property
    def consumer_wait_ratio(self) -> float:
        """Share of that time in which the consumer waited for an item."""
        return _share(self.waited_ns, self.elapsed_ns)

    def since(self, before: PipelineStats | None) -> PipelineStats:
        """Return the interval from an earlier reading; all of this one where that is None or of an
        earlier run."""
        if before is None or before.elapsed_ns > self.elapsed_ns:
            return self
        then, now = ([(s.name, s.num_tasks) for s in each.stages] for each in (before, self))
        is_same_run = len(then) == len(now) and all(
            name == other and earlier <= later
            for (name, earlier), (other, later) in zip(then, now, strict=True)
        )
        return self - before if is_same_run else self


def _counted(histogram: Sequence[int]) -> dict[int, float]:
    """Return the buckets that are not empty."""
    return dict(compress(enumerate(histogram), histogram))


def _cpu_ns(tasks: TaskCounters) -> int:
    """Return the CPU time of all tasks: of long ones as it was read, of the others in proportion to
    those of them for which it was."""
    cpu_ns, clocked_ns = tasks.cpu_ns, tasks.clocked_ns
    if clocked_ns > tasks.long_ns:
        cpu_ns, clocked_ns = cpu_ns - tasks.long_cpu_ns, clocked_ns - tasks.long_ns
    if clocked_ns <= 0:
        return 0
    others_ns = max(0, tasks.busy_ns - tasks.long_ns)
    return round(tasks.long_cpu_ns + others_ns * cpu_ns / clocked_ns)


def _mean_seconds(total_ns: float, count: float) -> float:
    return max(0.0, total_ns / count / 1e9) if count > 0 else 0.0


def _share(part_ns: float, whole_ns: float) -> float:
    return min(1.0, max(0.0, part_ns / whole_ns)) if whole_ns > 0 else 0.0
