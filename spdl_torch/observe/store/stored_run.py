"""A run in a statistics file: the intervals of its loaders and pipelines, its events, the report on
it; and the whole of a file in SPDL's totals and averages of every stage and queue."""

from __future__ import annotations

import json
import logging
import math
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from ...engine.failures import LEFT_OUT, MOST_KEPT, SKIPPED, remarks_on_left_out
from ...engine.statistics import AS_LATER, PipelineStats
from ...machine.readings import probes_over
from ...scopes import scope
from ...shown_text import printable
from ..verdict.report import Report, report_on
from .file import damaged, event_of, reading, rows_of

if TYPE_CHECKING:
    from .entries import EventLogEntry

_logger = logging.getLogger("spdl_torch.observe")

Row: TypeAlias = "Mapping[str, Any]"

_FACTS = "SELECT *, (SELECT count(*) FROM run) AS num_runs FROM run WHERE run_id = ?"

_WITH_FIGURES = """
    SELECT run_id FROM interval UNION SELECT run_id FROM task_window
    UNION SELECT run_id FROM queue_window ORDER BY run_id
"""

# Details are long: only those of the last interval of each pass are read.
_INTERVALS = """
    timestamp, pipeline, name, begins, totals, CASE WHEN id IN (
        SELECT id FROM (
            SELECT id, lead(begins, 1, 1) OVER (PARTITION BY pipeline ORDER BY timestamp, id)
                AS is_last FROM interval WHERE run_id = :run AND timestamp BETWEEN :begin AND :end
        ) WHERE is_last
    ) THEN details END AS details FROM interval
"""


def report_of_file(
    db_path: str | os.PathLike[str], *, run_id: int | None = None, pipeline: int | None = None
) -> Report:
    """Return the report on one run of a statistics file; None = the last one that has statistics.

    pipeline: one of several in that run, see :func:`pipelines_of_file`; None = the one with the
        lowest number.

    Raises: FileNotFoundError; ValueError: not a statistics file, no such run or pipeline in it, or
        nothing was recorded by :func:`recording` or Lightning's monitor, as where a pipeline's own
        hooks log it.
    """
    with StoredRun.opened(db_path, run_id) as run:
        return run.report(pipeline)


def pipelines_of_file(
    db_path: str | os.PathLike[str], *, run_id: int | None = None
) -> dict[int, str]:
    """Return the numbers of a run's pipelines and loaders, in order, with their names (``train``;
    "" = none). Arguments and errors as for :func:`report_of_file`.
    """
    with StoredRun.opened(db_path, run_id) as run:
        return run.pipelines()


@dataclass(frozen=True)
class StoredRun:
    """A run in an open file, or the part of it that ended in a time; everything oldest first."""

    connection: sqlite3.Connection
    path: Path
    facts: Row
    """Its row in the table ``run``, and ``num_runs``, the number of runs in the file."""
    begin: float = -math.inf
    end: float = math.inf

    @staticmethod
    @scope
    def opened(path: str | os.PathLike[str], run_id: int | None = None) -> Iterator[StoredRun]:
        """Open a run in a file for the block; arguments and errors as of :func:`report_of_file`."""
        with reading(path) as connection:
            yield StoredRun.of(connection, Path(path), run_id)

    @classmethod
    def of(cls, connection: sqlite3.Connection, path: Path, run_id: int | None) -> Self:
        """Return a run in a file that is open; None = the last one with figures."""
        with damaged(path):
            run_ids = [run for (run,) in connection.execute(_WITH_FIGURES)]
        if not run_ids:
            raise ValueError(f"{path}: no figures of a stage or a queue were logged to it.")
        chosen = run_ids[-1] if run_id is None else run_id
        if chosen not in run_ids:
            there = ", ".join(map(str, run_ids))
            raise ValueError(
                f"{path}: run_id must be of a run with figures ({there}), got {run_id}."
            )
        with damaged(path):
            (facts,) = rows_of(connection, _FACTS, [chosen])
        return cls(connection, path, facts)

    def rows(self, what: str) -> list[dict[str, Any]]:
        """Return rows of a table or a view."""
        condition = "run_id = :run AND timestamp BETWEEN :begin AND :end ORDER BY timestamp, id"
        query = f"SELECT {what} WHERE {condition}"
        with damaged(self.path):
            values = {"run": self.facts["run_id"], "begin": self.begin, "end": self.end}
            return rows_of(self.connection, query, values)

    @cached_property
    def intervals(self) -> Sequence[Row]:
        """``details``: of the last one of a pass, whose readings are of all of it."""
        return self.rows(_INTERVALS)

    @cached_property
    def events(self) -> Sequence[EventLogEntry]:
        """The events of the run."""
        return list(map(event_of, self.rows("* FROM event")))

    def described(self, started: float) -> str:
        """Return which run it is. ``started``: seconds since 1970."""
        facts, date = self.facts, datetime.fromtimestamp(started).astimezone()
        return (
            f"{self.path.name} | run {facts['run_id']} of {facts['num_runs']} | rank "
            f"{facts['rank']} of {facts['world_size']} on {facts['host']} | started "
            f"{date.isoformat(sep=' ', timespec='seconds')}"
        )

    def pipelines(self) -> dict[int, str]:
        """Return the numbers of loaders and pipelines, in order, with their names."""
        return dict(sorted((row["pipeline"], row["name"]) for row in self.intervals))

    def chosen(self, pipeline: int | None) -> int:
        """Return the given pipeline, or the first."""
        numbers, run = list(self.pipelines()), self.facts["run_id"]
        if not numbers:
            raise ValueError(
                f"{self.path}: run {run} has no intervals of a loader or a pipeline, on which a "
                "report is made. Record it by recording()."
            )
        if pipeline is None:
            return numbers[0]
        if pipeline not in numbers:
            there = ", ".join(map(str, numbers))
            raise ValueError(
                f"{self.path}: pipeline must be in run {run} ({there}), got {pipeline}."
            )
        return pipeline

    def report(self, pipeline: int | None = None) -> Report:
        """Return the report on one of its pipelines; None = the first."""
        number = self.chosen(pipeline)
        with damaged(self.path):
            own = [row for row in self.intervals if row["pipeline"] == number]
            events = [e for e in self.events if e.details.get("pipeline", number) == number]
            totals: dict[str, Any] = {}
            for each in own:  # decoded one by one: all of hours at once fill the memory
                _add(totals, json.loads(each["totals"]))
            stats = PipelineStats.from_dict(totals)
            passes = [each["details"] for each in own if each["details"] is not None]
            # What is no figure is the last pass's, but for samples left out, which events tell.
            others = [each for each in passes[-1]["notes"] if not each.startswith(LEFT_OUT)]
            notes = [*_remarks_on_skipped(events, stats), *others]
            report = report_on(stats, probes_over(passes), passes[-1] | {"notes": notes})
            _ = report.verdict  # figures that are none are found here
            return report

    def reports(self, pipeline: int | None = None) -> dict[int, Report]:
        """Return the report on each of its pipelines by number, or on one alone."""
        chosen = self.chosen(pipeline)
        numbers = self.pipelines() if pipeline is None else [chosen]
        return {number: self.report(number) for number in numbers}


def _add(whole: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Add an interval to the sum of those before it."""
    for key, value in part.items():
        if value.__class__ is dict:
            _add(whole.setdefault(key, {}), value)
        elif key in AS_LATER:
            whole[key] = value
        else:
            whole[key] = whole.get(key, 0) + value


def _remarks_on_skipped(events: Iterable[EventLogEntry], stats: PipelineStats) -> tuple[str, ...]:
    """Return the remark that names the samples that were left out. Events of the program's own may
    have the same name, and any details; ``stats`` count every call of the dataset that failed."""
    samples = [
        (event.details["key"], str(event.details["error"]))
        for event in events
        if event.event_name == SKIPPED and {"pipeline", "key", "error"} <= event.details.keys()
    ]
    # More than a loader remembers may have failed between two readings, so that some have no event.
    # With fewer, the others that failed are in batches that the loop has not taken.
    number = len(samples)
    if number >= MOST_KEPT:
        failed = [each.num_failures for each in stats.stages if each.name == "fetch"]
        number = max(number, *failed)
    return remarks_on_left_out(samples, number)


_DOUBLE_RULE, _RULE = "=" * 80, "-" * 80

# Task times are averaged over the tasks that succeeded, waits over the items, the rest over time.
_SUMS = """
    SELECT name, count(*) AS num_entries, {figures}
    FROM {view} WHERE run_id = ifnull(?, run_id) GROUP BY name, label
    ORDER BY pipeline IS NOT NULL, pipeline, stage_number, name
"""
_SUMS_OF_TASKS = """
    sum(num_tasks) AS num_tasks, sum(num_failures) AS num_failures,
    ifnull(total(num_tasks - num_failures) / sum(num_tasks), 0.0) AS success_rate,
    ifnull(
        total(ave_time * (num_tasks - num_failures)) / sum(num_tasks - num_failures), 0.0
    ) AS ave_time
"""
_SUMS_OF_QUEUES = """
    sum(num_items) AS num_items,
    ifnull(total(num_items) / total(elapsed), 0.0) AS qps,
    ifnull(total(ave_put_time * num_items) / sum(num_items), 0.0) AS ave_put_time,
    ifnull(total(ave_get_time * num_items) / sum(num_items), 0.0) AS ave_get_time,
    ifnull(total(occupancy_rate * elapsed) / total(elapsed), 0.0) AS occupancy_rate
"""

# What SPDL's example prints, which programs may read too.
_TASKS = """\
  Stage: {name}
    Total tasks processed: {num_tasks}
    Total failures: {num_failures}
    Average task time: {ave_time:.4f}s
    Success rate: {success_rate:.1%}
    Number of log entries: {num_entries}
"""
_QUEUES = """\
  Queue: {name}
    Total items processed: {num_items}
    Average QPS: {qps:.2f}
    Average put time: {ave_put_time:.4f}s
    Average get time: {ave_get_time:.4f}s
    Average occupancy rate: {occupancy_rate:.1%}
    Number of log entries: {num_entries}
"""
_SUMMARIES = (
    ("📊 Task Statistics:", "task_stats", _SUMS_OF_TASKS, _TASKS),
    ("📈 Queue Statistics:", "queue_stats", _SUMS_OF_QUEUES, _QUEUES),
)


def log_stats_summary(
    db_path: str | os.PathLike[str],
    *,
    run_id: int | None = None,
    write: Callable[[str], object] | None = None,
) -> None:
    """Log the summary of a statistics file at INFO level, or give it to ``write``, as one text:
    first every stage and queue, in the words and the order of SPDL's example program; then the
    report of the last run, or of ``run_id``, for each loader and pipeline that was recorded.

    Task times are averaged over the tasks that succeeded, waits of puts and gets over the items,
    occupancy and QPS over the time.
    Raises: FileNotFoundError; ValueError: not a statistics file.
    """
    lines = ["", *_titled("PIPELINE PERFORMANCE SUMMARY")]
    with reading(db_path) as connection:
        for title, view, figures, text in _SUMMARIES:
            with damaged(db_path):
                rows = rows_of(connection, _SUMS.format(view=view, figures=figures), [run_id])
                lines += [title, _RULE, "", *(text.format(**row) for row in rows)]
        if rows:
            run = StoredRun.of(connection, Path(db_path), run_id)
            names, title = run.pipelines(), f"run {run.facts['run_id']} of {db_path}"
            lines += _titled(f"WHAT IT MEANS: {title}") if names else []
            for pipeline, name in names.items():
                report = run.report(pipeline)
                lines += [f"Pipeline {pipeline}{name and f' ({name})'}", str(report), ""]
    # An empty line first, so that a logger's prefix has a line of its own.
    (write or _logger.info)(printable("\n".join(lines)))


def _titled(title: str) -> list[str]:
    return [_DOUBLE_RULE, title, _DOUBLE_RULE]
