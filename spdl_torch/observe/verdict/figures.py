"""The figures of a stage: one table, from which texts, pages, metrics, JSON, pictures and the
reference are made."""

from __future__ import annotations

import re
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, NamedTuple

from ...shown_text import percent, shown_rate

if TYPE_CHECKING:
    from ...engine.statistics import StageStats

# MLflow accepts no other characters; the name of a stage may have more ("aggregate(8)").
_ILLEGAL = re.compile(r"[^A-Za-z0-9_. -]+")


class Figure(NamedTuple):
    """A figure of a stage in a window."""

    key: str
    unit: Literal["count", "1/s", "ratio", "s"]
    meaning: str
    of: str
    """The attribute of its statistics; of calls a second the one that counts them. The last name is
    the column in a statistics file, too."""
    on: str
    """Where it is given, besides pictures: ``report`` (as a text), ``page``, ``loggers`` (as a
    metric), ``JSON`` (a report's), ``statistics`` (of a profile)."""
    heading: str = ""
    """The heading of its column in a table."""
    panel: str = ""
    """The label of the axes on which a picture shows it; a count as a rate."""
    needs_calls: bool = False
    """Whether it is unknown before the first call that succeeds."""

    @property
    def column(self) -> str:
        """The column in a statistics file."""
        return self.of.rpartition(".")[2]

    def value(self, stage: StageStats, seconds: float) -> float:
        """Return the value in a window of so many seconds."""
        value: float = attrgetter(self.of)(stage)
        if self.of.endswith("_ns"):
            return value / 1e9
        if self.unit == "1/s" and self.of != "capacity":
            return value / seconds if seconds else 0.0
        return value

    def shown(self, stage: StageStats, seconds: float) -> str:
        """Return the value as a text."""
        if self.needs_calls and stage.tasks.num_tasks <= stage.tasks.num_failures:
            return "-"
        value = self.value(stage, seconds)
        if self.unit == "ratio":
            return percent(value)
        if self.unit == "s":
            return f"{1e3 * value:.1f}"
        return shown_rate(value) if self.unit == "1/s" else str(value)


_ALL = "report page loggers"
_TIMES = "task time\n(ms)"
_PUT, _GET = "put: wait for room\n(ms)", "get: wait for an item\n(ms)"
_SUMS = "Seconds of all threads together"

FIGURES = (
    Figure("concurrency", "count", "Threads, or processes with one thread each.",
           "concurrency", f"{_ALL} JSON statistics", "workers"),
    Figure("thread_time", "s", f"{_SUMS} for which they were there.", "thread_time", "JSON"),
    Figure("busy_ratio", "ratio", "Share of the workers' time inside the op.",
           "busy_ratio", f"{_ALL} JSON", "busy"),
    Figure("busy_seconds", "s", f"{_SUMS} inside the op.", "busy_ns", "statistics"),
    Figure("cpu_ratio", "ratio",
           "CPU time over wall time inside the op; far below 100 %: it waits.",
           "cpu_ratio", _ALL, "CPU/wall", needs_calls=True),
    Figure("cpu_seconds", "s", f"{_SUMS} inside the op, on a core.", "cpu_ns", "statistics"),
    Figure("wait_in_ratio", "ratio", "Share of the workers' time without an item to work on.",
           "wait_in_ratio", f"{_ALL} JSON", "wait in"),
    Figure("wait_in_seconds", "s", f"{_SUMS} without an item.", "wait_in_ns", "statistics"),
    Figure("wait_out_ratio", "ratio", "Share of the workers' time without room for the result.",
           "wait_out_ratio", f"{_ALL} JSON", "wait out"),
    Figure("wait_out_seconds", "s", f"{_SUMS} without room.", "wait_out_ns", "statistics"),
    Figure("task_seconds_mean", "s", "Mean time of a call that succeeded.",
           "tasks.ave_time", "page statistics", "mean ms", _TIMES, True),
    Figure("task_seconds_p50", "s", "Half of the calls take less.",
           "tasks.p50_time", f"{_ALL} statistics", "p50 ms", needs_calls=True),
    Figure("task_seconds_p90", "s", "Nine of ten calls take less.",
           "tasks.p90_time", "page statistics", "p90 ms", _TIMES, True),
    Figure("task_seconds_p99", "s", "99 of 100 calls take less.",
           "tasks.p99_time", f"{_ALL} statistics", "p99 ms", _TIMES, True),
    Figure("num_tasks", "count", "Calls of the op.",
           "tasks.num_tasks", "page statistics", "tasks", "tasks\n(1/s)"),
    Figure("items_per_second", "1/s", "Calls a second.",
           "tasks.num_tasks", f"{_ALL} statistics", "items/s"),
    Figure("capacity_per_second", "1/s", "Calls a second if the workers never waited.",
           "capacity", "report page statistics", "at most/s", needs_calls=True),
    Figure("queue_num_items", "count", "Items that left the queue after it.",
           "queue.num_items", "", panel="throughput (QPS)\n(items/s)"),
    Figure("queue_occupancy_ratio", "ratio",
           "Share of the time in which the queue after it held an item.",
           "queue.occupancy_rate", "page statistics", "queue held", "occupancy\n(% of the time)"),
    Figure("put_seconds_mean", "s", "Mean wait of a put for room.",
           "queue.ave_put_time", "", panel=_PUT),
    Figure("put_seconds_p90", "s", "Nine of ten puts wait less.",
           "queue.p90_put_time", "", panel=_PUT),
    Figure("put_seconds_p99", "s", "99 of 100 puts wait less.",
           "queue.p99_put_time", "", panel=_PUT),
    Figure("get_seconds_mean", "s", "Mean wait of a get for an item.",
           "queue.ave_get_time", "", panel=_GET),
    Figure("get_seconds_p90", "s", "Nine of ten gets wait less.",
           "queue.p90_get_time", "", panel=_GET),
    Figure("get_seconds_p99", "s", "99 of 100 gets wait less.",
           "queue.p99_get_time", "", panel=_GET),
    Figure("num_failures", "count", "Calls that raised.", "tasks.num_failures",
           f"{_ALL} statistics", "failed", "failures\n(1/s)"),
    Figure("num_dropped", "count", "Calls that returned None.",
           "num_dropped", "page loggers JSON statistics", "dropped"),
)  # fmt: skip


def figures_on(place: str) -> list[Figure]:
    """Return the figures that are given at a place, in order."""
    return [each for each in FIGURES if place in each.on.split()]


def values_on(place: str, stage: StageStats, seconds: float) -> dict[str, float]:
    """Return those of a stage, by their keys."""
    return {each.key: each.value(stage, seconds) for each in figures_on(place)}


def legal_name(name: str) -> str:
    """Return the name with ``_`` for characters that some logger does not accept."""
    return _ILLEGAL.sub("_", name)
