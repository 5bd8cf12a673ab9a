"""Made-up readings of a pipeline, and how a report is shown."""

from __future__ import annotations

from dataclasses import replace

from spdl_torch.pipeline import (
    PipelineStats,
    QueuePerfStats,
    StageStats,
    TaskPerfStats,
)


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


def shown(report):
    """A report, or its text, in one line, wherever it is wrapped."""
    return " ".join(str(report).split())


def html_in_notebook(shown_object):
    """What a notebook shows of an object that ends a cell."""
    return shown_object._repr_html_()
