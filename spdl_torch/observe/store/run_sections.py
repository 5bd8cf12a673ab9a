"""A stored run's part of a page: all statistics of every interval, and the events."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ..page.content import Band, Chart, Line, Text
from ..page.events import Event, event_tables
from .entries import PROBES_EVENT
from .interval_rows import (
    COLLECTION_EVENTS,
    begin_of,
    milliseconds_of,
    origin_of,
    pair_collections,
    rate_of,
    rows_by_stage,
)
from .query import choose_run, query_event_stats, query_queue_stats, query_task_stats, run_row
from .stored_run import choose_pipeline, pipelines_of_file, report_of_file

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ..page.content import Table
    from ..verdict.report import Report
    from .interval_rows import Row

_GAP = 0.05
"""The share of an interval from which a pause before the next one is shown as a gap."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """One pipeline of one run in a statistics file."""

    path: Path
    run_id: int
    pipeline: int | None
    """None = no name in the run has a number."""
    name: str
    facts: Mapping[str, Any]
    """The run's row in the table ``run``."""

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        run_id: int | None = None,
        pipeline: int | None = None,
    ) -> StoredRun:
        """Find a run. Arguments and errors as for :func:`report_of_file`."""
        run_id = choose_run(path, run_id)
        pipeline = choose_pipeline(path, run_id, pipeline)
        names = pipelines_of_file(path, run_id=run_id)
        row = run_row(path, run_id)
        return cls(Path(path), run_id, pipeline, names.get(pipeline or 0, ""), row)

    def report(self) -> Report:
        """Return the report on the whole of it."""
        return report_of_file(self.path, run_id=self.run_id, pipeline=self.pipeline)

    @property
    def label(self) -> str:
        """The name that tells it from the run's other pipelines."""
        return self.name or f"pipeline {self.pipeline}"

    @property
    def origin(self) -> float:
        """The moment from which time counts, seconds since 1970."""
        return origin_of(self.facts["started"], [*self._tasks(), *self._queues()])

    def heading(self) -> Text:
        """Return where the statistics are from."""
        facts = self.facts
        started = datetime.fromtimestamp(facts["started"]).astimezone()
        versions = facts["versions"]
        parts = [
            f"{self.path.name}, run {self.run_id}",
            *([f"pipeline {self.pipeline} {self.name}".rstrip()] if self.pipeline else []),
            *([self.name] if self.name and not self.pipeline else []),
            f"rank {facts['rank']} of {facts['world_size']} on {facts['host']}",
            f"started {started.isoformat(sep=' ', timespec='seconds')}",
            ", ".join(f"{package} {version}" for package, version in versions.items()),
        ]
        return Text(word="run", text=" | ".join(parts))

    def charts(self, origin: float, unit: str) -> list[Chart]:
        """Return the statistics of every stage and queue over time.

        unit: what the consumer takes: ``batches``.
        """
        queues = _stages(self._queues())
        tasks = _stages(self._tasks())
        sink = queues[-1:]
        charts = [
            _chart("Waiting for data", "share of the time", sink, _wait_share, origin),
            _chart("Delivered", f"{unit}/s", sink, rate_of("num_items"), origin),
            _chart("Busy", "share of the workers' time", tasks, _busy, origin),
            _chart("Workers", "count", tasks, lambda row: float(row["concurrency"]), origin),
            _chart("Calls", "1/s", tasks, rate_of("num_tasks"), origin),
            _percentiles(
                "Time of a call", tasks, ("ave_time", "p50_time", "p90_time", "p99_time"), origin
            ),
            _chart("Queue held an item", "share of the time", queues, _held, origin),
            _percentiles(
                "Wait for an item", queues, ("ave_get_time", "p90_get_time", "p99_get_time"), origin
            ),
            _percentiles(
                "Wait for room", queues, ("ave_put_time", "p90_put_time", "p99_put_time"), origin
            ),
            _chart("Failed calls", "1/s", tasks, rate_of("num_failures"), origin),
        ]
        return [
            chart
            for chart in charts
            if chart.title in ("Waiting for data", "Delivered", "Busy") or _says_anything(chart)
        ]

    def events(self, origin: float) -> tuple[list[Table], list[Band]]:
        """Return tables of the events, whatever their names, and the spans that they mark."""
        events = query_event_stats(self.path, run_id=self.run_id)
        noted = [
            Event(entry.timestamp - origin, entry.event_name, entry.details)
            for entry in events
            if entry.event_name not in (PROBES_EVENT, *COLLECTION_EVENTS)
            and entry.details.get("pipeline", self.pipeline) == self.pipeline
        ]
        bands = [
            Band(
                name=f"garbage collection, generation {each.generation}",
                start=each.start - origin,
                stop=each.stop - origin,
            )
            for each in pair_collections(events)
        ]
        bands += [Band(name=each.name, start=each.time, stop=each.time) for each in noted]
        return event_tables(noted), bands

    def _tasks(self) -> Sequence[Row]:
        """Return the rows of calls, oldest first."""
        rows = query_task_stats(self.path, run_id=self.run_id, pipeline=self.pipeline)
        return rows[::-1]

    def _queues(self) -> Sequence[Row]:
        """Return the rows of queues, oldest first."""
        rows = query_queue_stats(self.path, run_id=self.run_id, pipeline=self.pipeline)
        return rows[::-1]


Stages: TypeAlias = "list[tuple[str, list[Row]]]"


def _stages(rows: Iterable[Row]) -> Stages:
    """Return the stages in the order of the pipeline, with their rows."""
    return [(key[-1], those) for key, those in sorted(rows_by_stage(rows).items())]


def _chart(
    title: str, unit: str, stages: Stages, value: Callable[[Row], float], origin: float
) -> Chart:
    lines = [
        _line(label, rows, value, origin, colour=number)
        for number, (label, rows) in enumerate(stages)
    ]
    return Chart(title=title, unit=unit, lines=lines, is_share=unit.startswith("share"))


def _percentiles(title: str, stages: Stages, columns: Sequence[str], origin: float) -> Chart:
    """Return a chart in ms with the mean and the percentiles of each stage in one colour."""
    styles = {"ave": ("mean", "solid"), "p50": ("p50", "dashed")}
    styles |= {"p90": ("p90", "dashed"), "p99": ("p99", "dotted")}
    lines = []
    for number, (label, rows) in enumerate(stages):
        for column in columns:
            word, style = styles[column[:3]]
            line = _line(
                f"{label} {word}", rows, milliseconds_of(column), origin, colour=number, style=style
            )
            if any(value > 0 for value in line.values):  # a loader's queues have means alone
                lines.append(line)
    return Chart(title=title, unit="ms", lines=lines)


def _line(
    name: str,
    rows: Sequence[Row],
    value: Callable[[Row], float],
    origin: float,
    *,
    colour: int,
    style: Any = "solid",
) -> Line:
    """Return the values of the intervals, each from its start to its end."""
    times: list[float] = []
    values: list[float] = []
    for row in rows:
        begin, end = begin_of(row) - origin, row["timestamp"] - origin
        is_apart = not times or begin - times[-1] > _GAP * row["elapsed"]
        if is_apart:
            times += [begin, begin]
            values += [math.nan, value(row)]
        times.append(end)
        values.append(value(row))
    return Line(name=name, times=times, values=values, holds="since", colour=colour, style=style)


def _says_anything(chart: Chart) -> bool:
    return any(value > 0 for line in chart.lines for value in line.values)


def _wait_share(row: Row) -> float:
    return min(1.0, row["get_wait_time"] / row["elapsed"]) if row["elapsed"] else math.nan


def _busy(row: Row) -> float:
    seconds = row["elapsed"] * row["concurrency"]
    return min(1.0, row["busy_time"] / seconds) if seconds else math.nan


def _held(row: Row) -> float:
    return float(row["occupancy_rate"])
