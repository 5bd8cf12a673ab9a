"""The figures of a stage: one table, from which texts, pages, metrics and dicts are made."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, NamedTuple

from ...shown_text import percent, shown_rate

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...engine.statistics import PipelineStats, StageStats
    from .report import Report

UNKNOWN = "-"

# MLflow accepts no other characters; the name of a stage may have more ("aggregate(8)").
_ILLEGAL = re.compile(r"[^A-Za-z0-9_. -]+")


class Figure(NamedTuple):
    """A figure of a stage in a window."""

    key: str
    heading: str
    unit: Literal["count", "percent", "ms", "rate"]
    meaning: str
    of: Callable[[StageStats, float], float]
    """The value, given the seconds of the window: times in seconds, ratios 0 to 1."""
    needs_calls: bool
    """Whether it is unknown before the first call that succeeds."""
    on: str
    """Where it is given: in texts, on pages, to loggers as a metric, by ``Profile.statistics``."""

    def shown(self, stage: StageStats, seconds: float) -> str:
        """Return the value as a text."""
        if self.needs_calls and stage.tasks.num_tasks <= stage.tasks.num_failures:
            return UNKNOWN
        value = self.of(stage, seconds)
        if self.unit == "percent":
            return percent(value)
        if self.unit == "ms":
            return f"{1e3 * value:.1f}"
        return shown_rate(value) if self.unit == "rate" else str(value)


FIGURES = (
    Figure("concurrency", "workers", "count", "Threads, or processes with one thread each.",
           lambda s, _: s.concurrency, False, "text page metrics"),
    Figure("busy_ratio", "busy", "percent", "Share of the workers' time inside the op.",
           lambda s, _: s.busy_ratio, False, "text page metrics"),
    Figure("cpu_ratio", "CPU/wall", "percent",
           "CPU time over wall time inside the op; far below 100 %: it waits.",
           lambda s, _: s.cpu_ratio, True, "text page metrics"),
    Figure("wait_in_ratio", "wait in", "percent",
           "Share of the workers' time without an item to work on.",
           lambda s, _: s.wait_in_ratio, False, "text page metrics"),
    Figure("wait_out_ratio", "wait out", "percent",
           "Share of the workers' time without room for the result.",
           lambda s, _: s.wait_out_ratio, False, "text page metrics"),
    Figure("task_seconds_mean", "mean ms", "ms", "Mean time of a call that succeeded.",
           lambda s, _: s.tasks.ave_time, True, "page statistics"),
    Figure("task_seconds_p50", "p50 ms", "ms", "Half of the calls take less.",
           lambda s, _: s.tasks.p50_time, True, "text page metrics statistics"),
    Figure("task_seconds_p90", "p90 ms", "ms", "Nine of ten calls take less.",
           lambda s, _: s.tasks.p90_time, True, "page statistics"),
    Figure("task_seconds_p99", "p99 ms", "ms", "99 of 100 calls take less.",
           lambda s, _: s.tasks.p99_time, True, "text page metrics statistics"),
    Figure("num_tasks", "tasks", "count", "Calls of the op.",
           lambda s, _: s.tasks.num_tasks, False, "page statistics"),
    Figure("items_per_second", "items/s", "rate", "Calls a second.",
           lambda s, seconds: s.tasks.num_tasks / seconds if seconds else 0.0, False,
           "text page metrics"),
    Figure("capacity_per_second", "at most/s", "rate",
           "Calls a second if the workers never waited.",
           lambda s, _: s.capacity, True, "text page statistics"),
    Figure("queue_occupancy_ratio", "queue held", "percent",
           "Share of the time in which the queue after it held an item.",
           lambda s, _: s.queue.occupancy_rate, False, "page statistics"),
    Figure("num_failures", "failed", "count", "Calls that raised.",
           lambda s, _: s.tasks.num_failures, False, "text page metrics statistics"),
    Figure("num_dropped", "dropped", "count", "Calls that returned None.",
           lambda s, _: s.num_dropped, False, "page metrics statistics"),
)  # fmt: skip


def figures_of(stage: StageStats, seconds: float, place: str) -> dict[str, float]:
    """Return the figures of a stage that are given at a place, by their keys."""
    return {each.key: each.of(stage, seconds) for each in FIGURES if place in each.on.split()}


def table_of(
    stats: PipelineStats, notes: list[str], crew: str, place: str
) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the rows of the table of the stages, each with a note at its end.
    ``place``: where it is shown, ``text`` or ``page``."""
    chosen = [each for each in FIGURES if place in each.on.split()]
    headings = [crew if each.key == "concurrency" else each.heading for each in chosen]
    rows = [
        [stage.name, *(each.shown(stage, stats.elapsed) for each in chosen), note]
        for stage, note in zip(stats.stages, notes, strict=True)
    ]
    return ["stage", *headings, ""], rows


def legal_name(name: str) -> str:
    """Return the name with ``_`` for characters that some logger does not accept."""
    return _ILLEGAL.sub("_", name)


def metrics_of(report: Report, start: str, *, stages: bool = True) -> dict[str, float]:
    """Return ``<start>/wait_ratio`` and the metrics of every stage, ``<start>/<stage>/...``.

    stages: False = ``wait_ratio`` alone.
    """
    stats = report.stats
    metrics = {f"{start}/wait_ratio": stats.consumer_wait_ratio}
    if stages:
        for stage in stats.stages:
            figures = figures_of(stage, stage.tasks.elapsed, "metrics")
            place = f"{start}/{legal_name(stage.name)}"
            metrics |= {f"{place}/{key}": float(value) for key, value in figures.items()}
        if report.placement is not None:
            metrics[f"{start}/num_processes"] = float(report.placement.num_processes)
    return metrics
