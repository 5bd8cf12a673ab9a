"""A run in a statistics file: its loaders' intervals, what hooks logged of pipelines, its events;
and the report on it."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from ...engine.statistics import PipelineStats, StageStats
from ...machine.histogram import bucket_of
from ...machine.readings import Probes
from ..verdict.placement import PLACEMENT_EVENT, Placement
from ..verdict.report import Report, make_report
from ..verdict.skipped import MOST_KEPT, SKIPPED, remarks_on_left_out
from .entries import PROBES_EVENT
from .query import event_of, rows_of
from .schema import reading

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

    from .entries import EventLogEntry

Row: TypeAlias = "Mapping[str, Any]"

_OF_LAST = ("num_cores", "switch_interval", "own_gil", "could_go_without_gil")
"""The probes that are as they were last; the others are means."""

_LATEST = 1e11  # seconds since 1970: the year 5138

_WITH_FIGURES = """
    SELECT run_id FROM interval UNION SELECT run_id FROM stage WHERE stage_id IN
    (SELECT stage_id FROM task_window UNION SELECT stage_id FROM queue_window) ORDER BY run_id
"""


def report_of_file(
    db_path: str | os.PathLike[str], *, run_id: int | None = None, pipeline: int | None = None
) -> Report:
    """Return the report on one run of a statistics file; None = the last one that has statistics.

    pipeline: one of several in that run, see :func:`pipelines_of_file`; None = the one with the
        lowest number.

    Of a pipeline whose hooks logged it, without the event ``probes``, the cause is inferred from
    CPU time alone.
    Raises: FileNotFoundError; ValueError: not a statistics file, or no such run or pipeline in it.
    """
    return StoredRun.read(db_path, run_id).report(pipeline)


def pipelines_of_file(
    db_path: str | os.PathLike[str], *, run_id: int | None = None
) -> dict[int, str]:
    """Return the numbers of a run's pipelines and loaders, in order, with their names (``train``;
    "" = none). Arguments and errors as for :func:`report_of_file`.
    """
    return StoredRun.read(db_path, run_id).pipelines()


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRun:
    """A run as the file has it, everything oldest first."""

    path: Path
    facts: Row
    """Its row in the table ``run``, and ``num_runs``, the number of runs in the file."""
    intervals: Sequence[Row]
    """Of loaders."""
    tasks: Sequence[Row]
    """The windows that hooks logged, as these and ``queues``."""
    queues: Sequence[Row]
    events: Sequence[EventLogEntry]

    @classmethod
    def read(cls, path: str | os.PathLike[str], run_id: int | None = None) -> Self:
        """Read a run; None = the last one with figures. Errors as for :func:`report_of_file`."""
        with reading(path) as connection:
            run_ids = [run for (run,) in connection.execute(_WITH_FIGURES)]
            chosen = run_ids[-1] if run_ids and run_id is None else run_id
            of_run = "WHERE run_id = ? ORDER BY timestamp, id", chosen
            facts = rows_of(
                connection,
                "SELECT *, (SELECT count(*) FROM run) AS num_runs FROM run WHERE run_id = ?",
                chosen,
            )
            is_sound = facts and 0 <= facts[0]["started"] <= _LATEST
            if chosen in run_ids and not is_sound:
                raise ValueError(f"run {chosen} is not in it, or has no time")
            tasks, queues = (
                rows_of(connection, f"SELECT * FROM {kind}_window JOIN stage USING (stage_id) "
                        f"{of_run[0]}", chosen)
                for kind in ("task", "queue")
            )  # fmt: skip
            # Most of the details are never asked for: they stay a text.
            columns = "timestamp, pipeline, name, begins, totals, details AS text"
            intervals = rows_of(connection, f"SELECT {columns} FROM interval {of_run[0]}", chosen)
            events = rows_of(connection, f"SELECT * FROM event {of_run[0]}", chosen)
        if not run_ids:
            raise ValueError(f"{path}: no figures of a stage or a queue were logged to it.")
        if chosen not in run_ids:
            there = ", ".join(map(str, run_ids))
            raise ValueError(
                f"{path}: run_id must be of a run with figures ({there}), got {run_id}."
            )
        return cls(
            path=Path(path),
            facts=facts[0],
            intervals=intervals,
            tasks=tasks,
            queues=queues,
            events=list(map(event_of, events)),
        )

    def pipelines(self) -> dict[int, str]:
        """Return the numbers of pipelines and loaders, in order, with their names."""
        numbers = {row["pipeline"]: "" for row in self.queues if row["pipeline"] is not None}
        names = {row["pipeline"]: row["name"] for row in self.intervals}
        return dict(sorted((numbers | names).items()))

    def chosen(self, pipeline: int | None) -> int | None:
        """Return the given pipeline or the first; None where no name in the run has a number."""
        numbers = list(self.pipelines())
        if pipeline is None:
            return numbers[0] if numbers else None
        if pipeline not in numbers:
            there = ", ".join(map(str, numbers)) or "none has a number"
            raise ValueError(
                f"{self.path}: pipeline must be in run {self.facts['run_id']} ({there}), got "
                f"{pipeline}."
            )
        return pipeline

    def within(self, begin: float, end: float) -> StoredRun:
        """Return the part of the run that ended in this time, seconds since 1970."""

        def cut(rows: Sequence[Row]) -> list[Row]:
            return [row for row in rows if begin <= row["timestamp"] <= end]

        events = [event for event in self.events if begin <= event.timestamp <= end]
        return replace(
            self,
            intervals=cut(self.intervals),
            tasks=cut(self.tasks),
            queues=cut(self.queues),
            events=events,
        )

    def report(self, pipeline: int | None = None) -> Report:
        """Return the report on one of its pipelines; None = the first."""
        pipeline = self.chosen(pipeline)
        if not (self.intervals or self.queues):
            run = self.facts["run_id"]
            raise ValueError(f"{self.path}: no figures of a queue were logged in run {run}.")
        try:
            return self._report(pipeline)
        except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise ValueError(f"{self.path} is damaged: {error!r}.") from error

    def _report(self, pipeline: int | None) -> Report:
        own = [row for row in self.intervals if row["pipeline"] == pipeline]
        events = [e for e in self.events if e.details.get("pipeline", pipeline) == pipeline]
        if own:
            stats = _sum_of(each["totals"] for each in own)
            passes = [json.loads(each["text"]) for each in _last_of_passes(own)]
            probes, pooled = _probes_of(passes), tuple(passes[-1]["pooled"])
        else:
            stats, pooled = self._stats_of_windows(pipeline), ()
            noted = [each.details for each in events if each.event_name == PROBES_EVENT]
            probes = _probes_of(
                [{"seconds": each["elapsed"], "probes": each} for each in _last_of_passes(noted)]
            )
        report = make_report(stats, probes, pooled=pooled)
        remarks = _remarks_on_skipped(events, stats)
        if missing := self.facts["num_dropped"]:
            remarks += (f"entries of this run that were not written to the file: {missing}.",)
        verdict = replace(report.verdict, remarks=(*report.verdict.remarks, *remarks))
        return replace(report, verdict=verdict, placements=_placements_of(events))

    def _stats_of_windows(self, pipeline: int | None) -> PipelineStats:
        """Return the sum of what hooks logged of a pipeline: the first of its queues is the
        source's, the last one the sink's."""
        tasks, queues = (
            by_stage(row for row in rows if row["pipeline"] == pipeline)
            for rows in (self.tasks, self.queues)
        )
        (_, inlet), *others = sorted(queues.items())
        sink, stages = (others or [("", inlet)])[-1][1], []
        for key, outlet in others[:-1]:
            stages.append(_stage_of_windows(tasks.get(key, []), inlet, outlet))
            inlet = outlet
        return PipelineStats(_ns(sink, "elapsed"), _ns(sink, "get_wait_time"), tuple(stages))


def by_stage(rows: Iterable[Row]) -> dict[Any, list[Row]]:
    """Return the rows of each stage, whose name as logged changes with its concurrency, by keys in
    the order of the pipeline; names of another form come first, in alphabetical order."""
    groups: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        key = row["pipeline"], row["stage_number"], row["label"]
        groups[(-1, 0, row["name"].removesuffix("_queue")) if None in key else key].append(row)
    return groups


def _stage_of_windows(
    tasks: Sequence[Row], inlet: Sequence[Row], outlet: Sequence[Row]
) -> StageStats:
    calls: dict[int, float] = defaultdict(float)
    for row in tasks:
        num_good = row["num_tasks"] - row["num_failures"]
        _spread(calls, row, num_good, p50_time=0.51, p90_time=0.4, p99_time=0.09)
    waits: dict[str, dict[int, float]] = {kind: defaultdict(float) for kind in ("put", "get")}
    for kind, found in waits.items():
        for row in outlet:
            columns = {f"p90_{kind}_time": 0.4, f"p99_{kind}_time": 0.09}
            _spread(found, row, row["num_items"], **columns)
    num_items = _sum(outlet, "num_items")
    return StageStats(
        name=outlet[-1]["label"],
        concurrency=outlet[-1]["concurrency"],
        elapsed_ns=_ns(outlet, "elapsed"),
        thread_ns=max(1, round(1e9 * sum(row["elapsed"] * row["concurrency"] for row in outlet))),
        num_tasks=_sum(tasks, "num_tasks"),
        num_failures=_sum(tasks, "num_failures"),
        num_dropped=sum(row["num_dropped"] or 0 for row in tasks),
        busy_ns=_ns(tasks, "busy_time"),
        good_ns=round(
            1e9 * sum(r["ave_time"] * (r["num_tasks"] - r["num_failures"]) for r in tasks)
        ),
        cpu_ns=round(1e9 * sum(row["ave_cpu_time"] * row["num_tasks"] for row in tasks)),
        calls=dict(calls),
        wait_in_ns=_ns(inlet, "get_wait_time"),
        wait_out_ns=_ns(outlet, "put_wait_time"),
        queue_ns=_ns(outlet, "elapsed"),
        held_ns=round(1e9 * sum(row["occupancy_rate"] * row["elapsed"] for row in outlet)),
        num_items=num_items,
        put_ns=_ns(outlet, "put_wait_time"),
        num_puts=num_items,
        puts=dict(waits["put"]),
        get_ns=_ns(outlet, "get_wait_time"),
        num_gets=num_items,
        gets=dict(waits["get"]),
    )


def _spread(counts: dict[int, float], row: Row, number: int, **shares: float) -> None:
    """Add a window whose percentiles alone are known to a histogram: so many of its calls took as
    long as each of them, so that its own percentiles come out again."""
    for column, share in shares.items():
        counts[bucket_of(round(1e9 * row[column]))] += share * number


def _sum(rows: Iterable[Row], column: str) -> int:
    return sum(int(row[column]) for row in rows)


def _ns(rows: Iterable[Row], column: str) -> int:
    return round(1e9 * sum(float(row[column]) for row in rows))


def _sum_of(totals: Iterable[Mapping[str, Any]]) -> PipelineStats:
    """Return the sum of a loader's intervals."""
    whole: dict[str, Any] = {}
    for each in totals:
        _add(whole, each)
    return PipelineStats.from_dict(whole)


def _add(whole: dict[str, Any], part: Mapping[str, Any]) -> None:
    for key, value in part.items():
        if key in ("name", "concurrency", "data"):
            whole[key] = value
        elif isinstance(value, dict):
            _add(whole.setdefault(key, {}), value)
        else:
            whole[key] = whole.get(key, 0) + value


def _last_of_passes(rows: Iterable[Row]) -> list[Row]:
    """Return the last row of each pass: readings are of the pass so far."""
    passes: list[Row] = []
    for row in rows:
        if passes and not row["begins"]:
            passes.pop()
        passes.append(row)
    return passes


def _probes_of(passes: Sequence[Mapping[str, Any]]) -> Probes | None:
    """Return the probes over all passes of a pipeline; None = none were logged."""
    if not passes:
        return None
    values: dict[str, Any] = {}
    for name in (each.name for each in fields(Probes)):
        known = [each for each in passes if each["probes"].get(name) is not None]
        if known and (name in _OF_LAST or len(known) == 1):
            values[name] = known[-1]["probes"][name]
        elif known:
            seconds = sum(each["seconds"] for each in known)
            weighed = sum(each["probes"][name] * each["seconds"] for each in known)
            values[name] = weighed / seconds if seconds else 0.0
    return Probes(**values)


def _placements_of(events: Iterable[EventLogEntry]) -> tuple[Placement, ...]:
    """Return where a loader's workers lived; an epoch that begins in the same place adds none."""
    found: list[Placement] = []
    for event in events:
        if event.event_name == PLACEMENT_EVENT:
            placement = Placement.from_details(event.details, event.timestamp)
            if not placement.is_as(found[-1] if found else None):
                found.append(placement)
    return tuple(found)


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
