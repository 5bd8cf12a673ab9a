"""The profile of a run: statistics of every stage, verdict, and what each thread did when; measured
here, or loaded from a statistics file or a trace; and its page."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ...checks import check_whole
from ...whole_files import starts_like_json
from ..page.charts import Curve, Lanes, Panel, draw, svg_of
from ..page.page import Event, event_tables, html_of, write_page
from ..store.file import check_exists, damaged
from ..store.stored_run import StoredRun
from ..verdict.report import figures_of, part_of
from ..verdict.skipped import SKIPPED
from .chrome_trace import OURS, PROCESS, STEP, WAIT_IN, WAIT_OUT, Program, chrome_trace
from .trace_file import SQLITE, path_to_write, profiles_of, read, report_in, write

if TYPE_CHECKING:
    from ...engine.timeline import Timeline
    from ..page.charts import Axis
    from ..verdict.report import Report

_SHOWN_SECONDS = 5.0
"""The time at the end of a trace that a page shows; the trace has all."""
_LATEST = 1e9  # seconds: 30 years, in which a page shows microseconds
_MOST_KINDS = 12
"""Kinds of parts with a colour of their own; rarer ones share one."""
_OTHERS = "other parts"

Json = dict[str, Any]


_MOST_ON_A_PAGE = 50_000  # of the latest events, of which it shows the last seconds


class Profile:
    """A measured run, or a part of one. ``print(profile)`` shows the verdict."""

    timelines: tuple[Timeline, ...]
    """The timelines of the recorded time; all of one process."""
    rank: int

    def __init__(
        self,
        report: Report,
        timelines: tuple[Timeline, ...] = (),
        rank: int = 0,
        *,
        _program: Program | None = None,
        _loaded: MeasuredRun | None = None,
    ) -> None:
        """``_program``: the spans and counters that the program itself added. ``_loaded``: the run
        in the file that the profile was loaded from."""
        self._report, self.timelines, self.rank = report, tuple(timelines), rank
        self._program, self._loaded = _program or Program(), _loaded

    def __str__(self) -> str:
        """Return the report as a text."""
        return str(self._report)

    def _repr_html_(self) -> str:
        """Return the page for a notebook, or without matplotlib its texts and tables."""
        try:
            return page_of([self._measured()], is_fragment=True)
        except ModuleNotFoundError:
            return self._report._repr_html_()

    def report(self) -> Report:
        """Return the verdict with its evidence."""
        return self._report

    def write_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a page, one HTML file that needs no network: the verdict, the stages, what every
        worker did in the last five seconds, the queues, and the events; return its path. Needs
        matplotlib, the extra ``plot``.

        A profile that was loaded from a statistics file has the statistics of every interval in
        place of single tasks.

        path: folders are created, a file is replaced once the new one is complete.
        Raises: ModuleNotFoundError: matplotlib is not installed; ValueError: a folder.
        """
        return write_page(path, page_of([self._measured()]))

    def _measured(self) -> MeasuredRun:
        if self._loaded is not None:
            return self._loaded
        has_tasks = bool(self.timelines or self._program)
        trace = self._as_trace(None, _MOST_ON_A_PAGE) if has_tasks else None
        return MeasuredRun(report=self._report, name="this run", trace=trace)

    def statistics(self) -> dict[str, dict[str, float]]:
        """Return the statistics of each stage by its name, in order, and those of the ``"total"``.

        A stage has ``threads``; seconds that its threads spent, added up: ``busy_seconds`` (inside
        the op), ``cpu_seconds`` (of it, on a core), ``wait_in_seconds``, ``wait_out_seconds``;
        ``num_tasks``, ``num_failures``, ``num_dropped``; ``task_seconds_mean``, ``_p50``, ``_p90``,
        ``_p99``; ``tasks_per_second``; ``capacity_per_second`` (if it never waited);
        ``queue_occupancy_ratio`` of the queue after it.
        The total has ``elapsed_seconds``, ``wait_seconds`` (the consumer waited for an item),
        ``wait_ratio``. The name of a second stage of the same name ends in `` (2)``.
        """
        stats = self._report.stats
        statistics: dict[str, dict[str, float]] = {}
        for stage in stats.stages:
            name, number = stage.name, 1
            while name in statistics or name == "total":
                number += 1
                name = f"{stage.name} ({number})"
            statistics[name] = {
                "threads": stage.concurrency,
                "busy_seconds": stage.busy_ns / 1e9,
                "cpu_seconds": stage.cpu_ns / 1e9,
                "wait_in_seconds": stage.wait_in_ns / 1e9,
                "wait_out_seconds": stage.wait_out_ns / 1e9,
                "tasks_per_second": figures_of(stage, stats.elapsed, "metrics")["items_per_second"],
                **figures_of(stage, stats.elapsed, "statistics"),
            }
        statistics["total"] = {
            "elapsed_seconds": stats.elapsed,
            "wait_seconds": stats.elapsed * stats.consumer_wait_ratio,
            "wait_ratio": stats.consumer_wait_ratio,
        }
        return statistics

    def write_trace(
        self,
        path: str | os.PathLike[str],
        *,
        last_seconds: float | None = None,
        max_events: int = 200_000,
    ) -> Path:
        """Write a trace of each thread for Perfetto and chrome://tracing; return the path written.

        path: of any name; gzipped where it ends in ``.gz``. Folders are created; a file is
            replaced once the new one is complete.
        last_seconds: leave out what ended earlier, counted from the last moment recorded.
        max_events: the latest are kept; the file says how many are left out. 200,000 are about
            30 MB, gzipped 3 MB at most.
        Raises: ValueError: a folder; the profile has only sums, like one that was loaded from a
            statistics file; or it was loaded from a trace, which is written again as it is or not
            at all.
        """
        path = path_to_write(path)
        write(path, self._as_trace(last_seconds, max_events))
        return path

    def _as_trace(self, last_seconds: float | None, max_events: int) -> dict[str, Any]:
        if last_seconds is not None and last_seconds <= 0:
            raise ValueError(f"write_trace: last_seconds must be > 0, got {last_seconds}.")
        check_whole("write_trace", max_events=max_events)
        trace = None if self._loaded is None else self._loaded.trace
        if trace is not None:
            if last_seconds is not None or max_events < len(trace["traceEvents"]):
                raise ValueError(
                    "write_trace: this profile was loaded from a trace, which can only be written "
                    f"whole: {len(trace['traceEvents'])} events. Leave last_seconds out and "
                    "raise max_events."
                )
            return trace
        if not (self.timelines or self._program):
            raise ValueError(
                "write_trace: this profile holds sums and no single tasks, so there is nothing to "
                "draw. A statistics file never has them; profile a run while it goes on."
            )
        return chrome_trace(
            self.timelines,
            self._report,
            rank=self.rank,
            last_seconds=last_seconds,
            max_events=max_events,
            program=self._program,
        )

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, run_id: int | None = None, pipeline: int | None = None
    ) -> Self:
        """Load the profile of a finished run from a file.

        path: a statistics file of ``SQLiteStatsWriter``, or a trace that ``write_trace`` wrote.
            Either gives ``statistics()``, ``report()`` and ``write_html()``; only the trace can be
            written again.
        run_id: of several in a statistics file; None = the last one that has statistics.
        pipeline: of several in that run; None = the one with the lowest number.
        Raises: FileNotFoundError; ValueError: neither of the two, no such run, or a trace of
            several ranks.
        """
        first, *_ = load_runs(path, run_id=run_id, pipeline=pipeline)
        return cls(first.report, rank=first.rank, _loaded=first)


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """Everything that is known about one pipeline in one run."""

    report: Report
    name: str
    """The name for people: of a file, or of a pipeline in one."""
    rank: int = 0
    """The rank of the process that ran it."""
    run: StoredRun | None = None
    """The run in a statistics file; None = it is not in one."""
    pipeline: int | None = None
    trace: Json | None = None
    """None = only sums are known, no single tasks."""
    path: Path | None = None
    """The file of the trace; None = it was made here."""

    def facts(self) -> str:
        """Return where the statistics are from, if they were stored."""
        if self.run is None:
            return ""
        pipeline = f"pipeline {self.pipeline} {self.run.pipelines().get(self.pipeline or 0, '')}"
        facts = self.run.facts
        versions = ", ".join(map(" ".join, facts["versions"].items()))
        return f"{self.run.described(facts['started'])} | {pipeline.rstrip()} | {versions}"

    def events(self) -> list[Event]:
        """Return what happened; of a run that is in a file, those that the file has."""
        if self.run is not None:
            unsaid = ("gc_start", "gc_stop")
            return [
                Event(each.timestamp - self.run.facts["started"], each.event_name, each.details)
                for each in self.run.events
                if each.event_name not in unsaid
                and each.details.get("pipeline", self.pipeline) == self.pipeline
            ]
        return [] if self.trace is None else list(_events_of(self.trace))


def load_runs(
    path: str | os.PathLike[str], *, run_id: int | None = None, pipeline: int | None = None
) -> list[MeasuredRun]:
    """Load every pipeline of a run in a statistics file, or ``pipeline`` alone; or a trace.

    Raises: FileNotFoundError; ValueError: neither of the two, no such run or pipeline, or a trace
        of several ranks.
    """
    path = Path(path)
    writers = "recording, SQLiteStatsWriter or Profile.write_trace"
    check_exists(path, "statistics file or trace", writers)
    with path.open("rb") as file:
        start = file.read(len(SQLITE))
    if not start:
        raise ValueError(f"{path}: the file is empty: nothing was logged to it.")
    if start != SQLITE:
        if run_id is not None or pipeline is not None:
            raise ValueError(
                f"{path}: a run and a pipeline are chosen from a statistics file, and this is none."
            )
        if not starts_like_json(path):
            raise ValueError(f"{path}: not a trace in JSON, nor a statistics file.")
        return [load_trace(path)]
    run = StoredRun.read(path, run_id)
    names, chosen = run.pipelines(), run.chosen(pipeline)
    return [
        MeasuredRun(
            report=run.report(number),
            name=names[number] or f"pipeline {number}",
            rank=int(run.facts["rank"]),
            run=run,
            pipeline=number,
        )
        for number in ([*names] if pipeline is None else [chosen])
    ]


def load_trace(path: str | os.PathLike[str]) -> MeasuredRun:
    """Load a trace of one rank. Raises: FileNotFoundError; ValueError: it is not one."""
    path, trace = Path(path), read(path)
    profiles = profiles_of(trace, path)
    if len(profiles) != 1:
        raise ValueError(
            f"{path}: the trace holds {len(profiles)} profiles, one for each file that was "
            "merged. Load those."
        )
    report, rank = report_in(profiles[0], path), int(profiles[0]["rank"])
    return MeasuredRun(report=report, name=path.name, rank=rank, trace=trace, path=path)


def page_of(runs: Sequence[MeasuredRun], *, is_fragment: bool = False) -> str:
    """Return the page of one or several pipelines of a run.

    Raises: ModuleNotFoundError: it has charts, and matplotlib is not installed.
    """
    charts: list[tuple[str, str]] = []
    events: dict[int, Event] = {}
    for run in runs:
        with damaged(run.path):  # if it is a trace's
            charts += [] if run.trace is None else _chart_of(run.trace)
            events |= {id(each.details): each for each in run.events()}
    if runs[0].run is not None:
        charts += _charts_of_file(runs[0].run, runs)
    parts = [part_of(run.report, run.name if len(runs) > 1 else "", run.facts()) for run in runs]
    title = f"Loading: {', '.join(run.name for run in runs)}"
    tables = event_tables(events.values())
    return html_of(title, parts, charts=charts, tables=tables, is_fragment=is_fragment)


def _charts_of_file(run: StoredRun, runs: Sequence[MeasuredRun]) -> list[tuple[str, str]]:
    from ..plot import drawn_part  # brings it only where there is a file

    numbers = [each.pipeline for each in runs]
    drawn = drawn_part(run.path, run_id=run.facts["run_id"], pipelines=numbers)
    texts = {"tasks": "Every stage, interval by interval.", "queues": "Every queue."}
    return [
        (svg_of(drawn.figure(kind)), text) for kind, text in texts.items() if drawn.series[kind]
    ]


def _chart_of(trace: Json) -> list[tuple[str, str]]:
    panels, collections, span = panels_of(trace)
    if not panels:
        return []
    missing = sum(each["num_lost"] + each["num_left_out"] for each in trace[OURS]["profiles"])
    text = "What every worker did, at the end of the run; write_trace() writes a trace with more."
    if missing:
        text += f" {missing:,} older slices had no room in memory or in the trace."
    figure = draw(panels, collections, span, heading="What every worker did", since="the trace's")
    return [(svg_of(figure), text)]


def panels_of(
    trace: Json,
) -> tuple[list[Axis], list[tuple[float, float]], tuple[float, float]]:
    """Return the last seconds of a trace: a lane for every worker, the queues' lengths, and the
    program's own counters; the full garbage collections; and the time, in seconds since its
    begin."""
    events = _ours(trace)
    slices = [event for event in events if event["ph"] == "X"]
    stop = max(((event["ts"] + event["dur"]) / 1e6 for event in slices), default=0.0)
    start = max(0.0, stop - _SHOWN_SECONDS, min((e["ts"] / 1e6 for e in slices), default=0.0))
    if not 0 <= start <= stop < _LATEST:
        raise ValueError(f"its events are from {start} s to {stop} s after its beginning")
    shown = [event for event in slices if (event["ts"] + event["dur"]) / 1e6 >= start]
    panels: list[Axis] = [_lanes(events, shown, start)] if shown else []
    panels += _curves(events, start, stop)
    collections = [
        (event["ts"] / 1e6, event["ts"] / 1e6 + event["args"]["seconds"])
        for event in events
        if event["ph"] == "i" and event["name"] == "gc" and event["args"]["generation"] == 2
    ]
    return panels, collections, (start, stop)


def _ours(trace: Json) -> list[Json]:
    pids = {pid for profile in trace[OURS]["profiles"] for pid in profile["pids"]}
    return [event for event in trace["traceEvents"] if event.get("pid") in pids]


def _events_of(trace: Json) -> Iterator[Event]:
    for event in _ours(trace):
        if event["ph"] == "i" and event["name"] != "gc":
            name, details = event["name"], event.get("args", {})
            if name == "failure" and "key" in details:  # a sample that was left out of its batch
                name = SKIPPED
                details = {key: details[key] for key in ("key", "stage", "error") if key in details}
            yield Event(event["ts"] / 1e6, str(name), dict(details))


def _lanes(events: Sequence[Json], slices: Sequence[Json], start: float) -> Lanes:
    used = {(event["pid"], event["tid"]) for event in slices}
    several = len({pid for pid, _ in used}) > 1
    titles: dict[Any, str] = {}
    names: dict[tuple[Any, Any], str] = {}  # in the order of the rows, as the file has them
    for event in events:
        key, what = (event["pid"], event["tid"]), event.get("args", {})
        if event["ph"] == "M" and event["name"] == "process_name":
            titles[event["pid"]] = f"{what['name']} · " if several else ""
        elif event["ph"] == "M" and event["name"] == "thread_name" and key in used:
            names[key] = f"{titles[event['pid']]}{what['name']}"
    numbers, kinds = {key: number for number, key in enumerate(names)}, _kinds(slices)
    spans: dict[str, list[tuple[int, float, float]]] = {kind: [] for kind in kinds.values()}
    for event in slices:
        begin, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        lane = numbers[event["pid"], event["tid"]]
        spans[kinds[event["name"]]].append((lane, max(begin, start), end))
    inside = [kind for kind in spans if kind not in (WAIT_IN, WAIT_OUT, PROCESS, STEP)]
    return Lanes(names=list(names.values()), spans=spans, inside=inside)


def _kinds(slices: Sequence[Json]) -> dict[str, str]:
    """Return the kind of each slice by its name, enclosing ones first: they are drawn first."""
    main = [WAIT_IN, WAIT_OUT, PROCESS, STEP]
    counts = Counter(event["name"] for event in slices)
    parts = [name for name, _ in counts.most_common() if name not in main]
    kinds = {name: name for name in main if name in counts}
    kinds |= {name: name for name in parts[:_MOST_KINDS]}
    return kinds | dict.fromkeys(parts[_MOST_KINDS:], _OTHERS)


def _curves(events: Sequence[Json], start: float, stop: float) -> list[Panel]:
    """Return a panel of the queues' lengths, and one of the program's own counters."""
    readings: dict[str, dict[tuple[Any, str], dict[float, float]]] = {}
    for event in events:
        if event["ph"] == "C":
            for key, value in event["args"].items():
                curves = readings.setdefault(key, {})
                curve = curves.setdefault((event["pid"], event["name"]), {})
                curve[max(start, event["ts"] / 1e6)] = float(value)
    panels, held = [], partial(Curve, begin=start, is_step=True)
    for key, curves in readings.items():
        drawn = []
        for number, ((_, name), curve) in enumerate(curves.items()):
            times, values = [*curve], [*curve.values()]
            times.append(max(times[-1], stop))
            values.append(values[-1])  # which holds
            drawn.append(held(name=name, colour=number, times=times, values=values))
        panels.append(Panel(label="queues\n(items)" if key == "items" else key, curves=drawn))
    return panels
