"""Made-up readings of a pipeline, and how a report is shown."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

from spdl_torch.machine.histogram import bucket_of
from spdl_torch.observe import QueueStatsLogEntry, SQLiteStatsWriter, TaskStatsLogEntry
from spdl_torch.observe.store.following import Follower
from spdl_torch.observe.verdict.causes import Reading
from spdl_torch.observe.verdict.verdict import rule_of_waits
from spdl_torch.pipeline import PipelineStats, QueuePerfStats, StageStats, TaskPerfStats


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


def entries_of(*reports, number=0, name="", started=0.0):
    """What is recorded of a loader with these reports, one after another in one pass."""
    entries, source = [], SimpleNamespace()
    follower = Follower(source, number, name, log=entries.append)
    for report in reports:
        source.report = lambda report=report: report
        follower.write()
    ends = [started + report.stats.elapsed for report in reports]
    return [replace(each, timestamp=end) for each, end in zip(entries, ends, strict=False)]


def write(path, *entries, **options):
    """Log the entries as one run; return the path."""
    with SQLiteStatsWriter(path, flush_interval=3600.0, **options) as writer:
        for entry in entries:
            writer.log(entry)
    return path


def stage_stats(
    name,
    concurrency,
    tasks,
    queue,
    num_dropped=0,
    busy_ratio=0.0,
    wait_in_ratio=0.0,
    wait_out_ratio=0.0,
    thread_time=None,
):
    """The sums that give these figures, percentiles to the width of a bucket."""
    num_good = tasks.num_tasks - tasks.num_failures
    calls = {0.51: tasks.p50_time, 0.4: tasks.p90_time, 0.09: tasks.p99_time}
    puts = {0.4: queue.p90_put_time, 0.09: queue.p99_put_time}
    gets = {0.4: queue.p90_get_time, 0.09: queue.p99_get_time}
    thread_ns = ns(tasks.elapsed * concurrency if thread_time is None else thread_time)
    return StageStats(
        name=name,
        concurrency=concurrency,
        elapsed_ns=ns(tasks.elapsed),
        thread_ns=thread_ns,
        num_tasks=tasks.num_tasks,
        num_failures=tasks.num_failures,
        num_dropped=num_dropped,
        busy_ns=round(busy_ratio * thread_ns),
        good_ns=ns(tasks.ave_time * num_good),
        cpu_ns=ns(tasks.ave_cpu_time * tasks.num_tasks),
        calls=spread(calls, num_good),
        wait_in_ns=round(wait_in_ratio * thread_ns),
        wait_out_ns=round(wait_out_ratio * thread_ns),
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
        counts[bucket_of(ns(seconds))] += round(share * number)
    return {bucket: count for bucket, count in counts.items() if count}


def pipeline_stats(elapsed, consumer_wait_ratio, stages, counts=None):
    """A window of so many seconds."""
    waited_ns = round(ns(elapsed) * consumer_wait_ratio)
    return PipelineStats(ns(elapsed), waited_ns, tuple(stages), counts or {})


def stage(name, busy=0.1, cpu=1.0, wait_in=0.0, wait_out=0.0, threads=4, seconds=10.0, **counts):
    """A stage that is busy, computing and waiting for these shares of its time."""
    tasks = {"num_tasks": 1000, "num_failures": 0, **counts}
    dropped, delivered = tasks.pop("num_dropped", 0), tasks.pop("num_delivered", 1000)
    times = {"ave_time": 0.01, "p90_time": 0.02, "p99_time": 0.03, "ave_cpu_time": 0.01 * cpu}
    tasks = TaskPerfStats(**tasks, **times, elapsed=seconds, p50_time=0.009)
    queue = QueuePerfStats(seconds, delivered, 0.0, 0.0, 0.5)
    return stage_stats(name, threads, tasks, queue, dropped, busy, wait_in, wait_out)


def reading(wait, *stages):
    """A window of 10 s, in which the loop waits for this share."""
    if stages and stages[-1].queue_ns:
        *others, last = stages
        stages = (*others, replace(last, get_ns=ns(10.0 * wait)))
    return pipeline_stats(10.0, wait, stages)


def found_in(report):
    """The cause of the waits and the stage to name, however long the window is."""
    found = Reading(report.stats, report.probes, report.pooled)
    return rule_of_waits(found).cause, found.bottleneck.name


def shown(report):
    """A report, or its text, in one line, wherever it is wrapped."""
    return " ".join(str(report).split())
