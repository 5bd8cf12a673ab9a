"""Made-up readings of a pipeline, and how a report is shown."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from spdl_torch import pipeline
from spdl_torch.machine.histogram import bucket_of
from spdl_torch.observe import QueueStatsLogEntry, SQLiteStatsWriter, TaskStatsLogEntry
from spdl_torch.observe.verdict.causes import Reading
from spdl_torch.observe.verdict.verdict import rule_of_waits
from spdl_torch.pipeline import QueuePerfStats, TaskPerfStats


def task_entry(timestamp=1.0, name="0:1:decode[2]", **figures):
    """A log entry of a stage: 10 tasks of 100 ms."""
    times = {"ave_time": 0.1, "p90_time": 0.2, "p99_time": 0.3, "ave_cpu_time": 0.05}
    figures = {"num_tasks": 10, "num_failures": 0, "elapsed": 5.0, **times, **figures}
    return TaskStatsLogEntry(timestamp, name, TaskPerfStats(**figures))


def queue_entry(timestamp=1.0, name="0:1:decode[2]_queue", **figures):
    """A log entry of a queue: 10 items, each waited for 10 ms; half of the time occupied."""
    waits = {f"{kind}_{of}_time": 0.01 for kind in ("ave", "p90", "p99") for of in ("put", "get")}
    figures = {"elapsed": 5.0, "num_items": 10, "occupancy_rate": 0.5, **waits, **figures}
    return QueueStatsLogEntry(timestamp, name, QueuePerfStats(**figures))


def write(path, *entries, **options):
    """Log the entries as one run; return the path."""
    with SQLiteStatsWriter(path, flush_interval=3600.0, **options) as writer:
        for entry in entries:
            writer.log(entry)
    return path


@dataclass(frozen=True, slots=True)
class StageStats:
    """A stage with figures as stated, which need not fit together."""

    name: str
    concurrency: int
    tasks: TaskPerfStats
    queue: QueuePerfStats
    num_dropped: int
    busy_ratio: float
    wait_in_ratio: float
    wait_out_ratio: float
    thread_time: float = 0.0

    def __post_init__(self):
        """As long as the threads are the same."""
        if not self.thread_time:
            object.__setattr__(self, "thread_time", self.tasks.elapsed * self.concurrency)

    num_tasks = property(lambda self: self.tasks.num_tasks)
    num_failures = property(lambda self: self.tasks.num_failures)
    num_items = property(lambda self: self.queue.num_items)

    @property
    def cpu_ratio(self):
        """Of the ops."""
        t = self.tasks
        return min(1.0, t.ave_cpu_time / t.ave_time) if t.ave_time > 0 else 0.0

    @property
    def capacity(self):
        """Items a second."""
        return self.concurrency / self.tasks.ave_time if self.tasks.ave_time > 0 else 0.0

    def totals(self):
        """The sums that give these figures again, percentiles to the width of a bucket."""
        tasks, queue = self.tasks, self.queue
        num_good = tasks.num_tasks - tasks.num_failures
        calls = {0.51: tasks.p50_time, 0.4: tasks.p90_time, 0.09: tasks.p99_time}
        puts = {0.4: queue.p90_put_time, 0.09: queue.p99_put_time}
        gets = {0.4: queue.p90_get_time, 0.09: queue.p99_get_time}
        thread_ns = ns(self.thread_time)
        return pipeline.StageStats(
            name=self.name,
            concurrency=self.concurrency,
            elapsed_ns=ns(tasks.elapsed),
            thread_ns=thread_ns,
            num_tasks=tasks.num_tasks,
            num_failures=tasks.num_failures,
            num_dropped=self.num_dropped,
            busy_ns=round(self.busy_ratio * thread_ns),
            good_ns=ns(tasks.ave_time * num_good),
            cpu_ns=ns(tasks.ave_cpu_time * tasks.num_tasks),
            calls=spread(calls, num_good),
            wait_in_ns=round(self.wait_in_ratio * thread_ns),
            wait_out_ns=round(self.wait_out_ratio * thread_ns),
            queue_ns=ns(queue.elapsed),
            held_ns=ns(queue.elapsed * queue.occupancy_rate),
            num_items=queue.num_items,
            put_ns=ns(queue.put_wait_time),
            num_puts=queue.num_items,
            puts=spread(puts, queue.num_items),
            get_ns=ns(queue.get_wait_time),
            num_gets=queue.num_items,
            gets=spread(gets, queue.num_items),
        )


def ns(seconds):
    """As a whole number."""
    return round(1e9 * seconds)


def spread(shares, number):
    """The histogram of so many durations, shares of which are as given."""
    counts = Counter()
    for share, seconds in shares.items():
        counts[bucket_of(ns(seconds))] += share * number
    return {bucket: count for bucket, count in counts.items() if count}


@dataclass(frozen=True, slots=True)
class PipelineStats:
    """A window with figures as stated."""

    elapsed: float
    consumer_wait_ratio: float
    stages: tuple[StageStats, ...]
    data: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)

    def totals(self):
        """The sums that give these figures again."""
        elapsed_ns = ns(self.elapsed)
        stages = tuple(stage.totals() for stage in self.stages)
        waited_ns = round(elapsed_ns * self.consumer_wait_ratio)
        return pipeline.PipelineStats(elapsed_ns, waited_ns, stages, self.data, self.counts)

    def as_dict(self):
        """As the real ones."""
        return self.totals().as_dict()


def stage(name, busy=0.1, cpu=1.0, wait_in=0.0, wait_out=0.0, threads=4, **counts):
    """A stage that is busy, computing and waiting for these shares of its time."""
    tasks = {"num_tasks": 1000, "num_failures": 0, **counts}
    dropped, delivered = tasks.pop("num_dropped", 0), tasks.pop("num_delivered", 1000)
    times = {"ave_time": 0.01, "p90_time": 0.02, "p99_time": 0.03, "ave_cpu_time": 0.01 * cpu}
    return StageStats(
        name=name,
        concurrency=threads,
        tasks=TaskPerfStats(**tasks, **times, elapsed=10.0, p50_time=0.009),
        queue=QueuePerfStats(10.0, delivered, 0.0, 0.0, 0.5),
        num_dropped=dropped,
        busy_ratio=busy,
        wait_in_ratio=wait_in,
        wait_out_ratio=wait_out,
    )


def reading(wait, *stages, own=0.0):
    """A window of 10 s. ``own``: the share in which the loop worked itself in the loader."""
    if stages and stages[-1].queue.elapsed:
        *others, last = stages
        queue = replace(last.queue, get_wait_time=10.0 * max(0.0, wait - own))
        stages = (*others, replace(last, queue=queue))
    return PipelineStats(elapsed=10.0, consumer_wait_ratio=wait, stages=stages)


def found_in(report):
    """The cause of the waits and the stage to name, however long the window is."""
    found = Reading(report.stats, report.probes, report.pooled)
    return rule_of_waits(found).cause, found.bottleneck.name


def shown(report):
    """A report, or its text, in one line, wherever it is wrapped."""
    return " ".join(str(report).split())


def html_in_notebook(shown_object):
    """What a notebook shows of an object that ends a cell."""
    return shown_object._repr_html_()
