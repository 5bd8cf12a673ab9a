"""The profile of a run: statistics of every stage, verdict, and what each thread did when; measured
here, or loaded from a statistics file; and its page."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ...checks import check_whole
from ..page.charts import Curve, Lanes, Panel, draw, svg_of
from ..page.page import html_of, write_page
from ..store.stored_run import StoredRun
from ..verdict.figures import values_on
from ..verdict.report import part_of
from .chrome_trace import OURS, PROCESS, STEP, WAIT_IN, WAIT_OUT, chrome_trace
from .trace_file import path_to_write, write

if TYPE_CHECKING:
    from ...engine.timeline import Timeline
    from ..page.charts import Axis
    from ..verdict.report import Report

_SHOWN_SECONDS = 5.0
"""The time at the end of a trace that a page shows; the trace has all."""
_MOST_ON_A_PAGE = 50_000  # of the latest events, of which it shows the last seconds

Json = dict[str, Any]


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
        _stored: tuple[Path, int, int] | None = None,
    ) -> None:
        """``_stored``: the file that it was loaded from, the run and the pipeline in it."""
        self._report, self.timelines, self.rank = report, tuple(timelines), rank
        self._stored = _stored

    def __str__(self) -> str:
        """Return the report as a text."""
        return str(self._report)

    __repr__ = __str__

    def report(self) -> Report:
        """Return the verdict with its evidence."""
        return self._report

    def write_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a page, one HTML file that needs no network: the verdict, the stages, what every
        worker did in the last five seconds, and the queues; return its path. Needs matplotlib, the
        extra ``plot``.

        A profile that was loaded from a statistics file has the statistics of every interval in
        place of single tasks.

        path: folders are created, a file is replaced once the new one is complete.
        Raises: ModuleNotFoundError: matplotlib is not installed; ValueError: a folder.
        """
        if self._stored is not None:
            file, run_id, number = self._stored
            with StoredRun.opened(file, run_id) as run:
                return write_page(path, page_of(run, {number: self._report}))
        charts = [_chart_of(self._as_trace(None, _MOST_ON_A_PAGE))] if self.timelines else []
        page = html_of("Loading: this run", [part_of(self._report)], charts=charts)
        return write_page(path, page)

    def statistics(self) -> dict[str, dict[str, float]]:
        """Return the statistics of each stage by its name, in order, and those of the ``"total"``.

        A stage has ``concurrency``; seconds that its threads spent, added up: ``busy_seconds``
        (inside the op), ``cpu_seconds`` (of it, on a core), ``wait_in_seconds``,
        ``wait_out_seconds``; ``num_tasks``, ``num_failures``, ``num_dropped``;
        ``task_seconds_mean``, ``_p50``, ``_p90``, ``_p99``; ``items_per_second``;
        ``capacity_per_second`` (if it never waited); ``queue_occupancy_ratio`` of the queue after
        it.
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
            statistics[name] = values_on("statistics", stage, stats.elapsed)
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
        Raises: ValueError: a folder; or the profile has only sums, like one that was loaded from a
            statistics file.
        """
        path = path_to_write(path)
        write(path, self._as_trace(last_seconds, max_events))
        return path

    def _as_trace(self, last_seconds: float | None, max_events: int) -> dict[str, Any]:
        if last_seconds is not None and last_seconds <= 0:
            raise ValueError(f"write_trace: last_seconds must be > 0, got {last_seconds}.")
        check_whole("write_trace", max_events=max_events)
        if not self.timelines:
            raise ValueError(
                "write_trace: this profile holds sums and no single tasks, so there is nothing to "
                "draw. A statistics file never has them; profile a run while it goes on."
            )
        return chrome_trace(
            self.timelines, rank=self.rank, last_seconds=last_seconds, max_events=max_events
        )

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, run_id: int | None = None, pipeline: int | None = None
    ) -> Self:
        """Load the profile of a run from a statistics file: it has ``statistics()``, ``report()``
        and ``write_html()``, and no trace.

        run_id: of several in the file; None = the last one that has statistics.
        pipeline: of several in that run; None = the one with the lowest number.
        Raises: FileNotFoundError; ValueError: not a statistics file, no such run.
        """
        with StoredRun.opened(path, run_id) as run:
            number = run.chosen(pipeline)
            stored = run.path, run.facts["run_id"], number
            return cls(run.report(number), rank=run.facts["rank"], _stored=stored)


def page_of(run: StoredRun, reports: Mapping[int, Report]) -> str:
    """Return the page of one or several pipelines of a run in a file.

    Raises: ModuleNotFoundError: matplotlib is not installed.
    """
    from ..plot import drawn_part  # brings it only where there is a file

    texts = {"tasks": "Every stage, interval by interval.", "queues": "Every queue."}
    pictures = drawn_part(run, pipelines=reports)
    charts = [(svg_of(picture), texts[kind]) for kind, picture in pictures.items()]
    described = run.described(run.facts["started"])
    versions = ", ".join(map(" ".join, run.facts["versions"].items()))
    names = {number: name or f"pipeline {number}" for number, name in run.pipelines().items()}
    parts = []
    for number, report in reports.items():
        pipeline = f"pipeline {number} {run.pipelines()[number]}".rstrip()
        heading = names[number] if len(reports) > 1 else ""
        parts.append(part_of(report, heading, f"{described} | {pipeline} | {versions}"))
    title = f"Loading: {', '.join(names[number] for number in reports)}"
    return html_of(title, parts, charts=charts)


def _chart_of(trace: Json) -> tuple[str, str]:
    panels, collections, span = panels_of(trace)
    (profile,) = trace[OURS]["profiles"]
    missing = profile["num_lost"] + profile["num_left_out"]
    text = "What every worker did, at the end of the run; write_trace() writes a trace with more."
    if missing:
        text += f" {missing:,} older slices had no room in memory or in the trace."
    figure = draw(panels, collections, span, heading="What every worker did", since="the trace's")
    return svg_of(figure), text


def panels_of(
    trace: Json,
) -> tuple[list[Axis], list[tuple[float, float]], tuple[float, float]]:
    """Return the last seconds of a trace: a lane for every worker, and the queues' lengths; the
    full garbage collections; and the time, in seconds since its begin."""
    events = trace["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    stop = max(((event["ts"] + event["dur"]) / 1e6 for event in slices), default=0.0)
    start = max(0.0, stop - _SHOWN_SECONDS, min((e["ts"] / 1e6 for e in slices), default=0.0))
    shown = [event for event in slices if (event["ts"] + event["dur"]) / 1e6 >= start]
    panels: list[Axis] = [_lanes(events, shown, start), *_queues(events, start, stop)]
    collections = [
        (event["ts"] / 1e6, event["ts"] / 1e6 + event["args"]["seconds"])
        for event in events
        if event["ph"] == "i" and event["name"] == "gc" and event["args"]["generation"] == 2
    ]
    return panels, collections, (start, stop)


def _lanes(events: Sequence[Json], slices: Sequence[Json], start: float) -> Lanes:
    used = {event["tid"] for event in slices}
    named = [event for event in events if event["name"] == "thread_name" and event["tid"] in used]
    numbers = {event["tid"]: number for number, event in enumerate(named)}  # as the file has them
    main, names = (WAIT_IN, WAIT_OUT, PROCESS, STEP), {event["name"] for event in slices}
    inside = sorted(names.difference(main))  # drawn after those around them
    spans: dict[str, list[tuple[int, float, float]]] = {
        kind: [] for kind in (*filter(names.__contains__, main), *inside)
    }
    for event in slices:
        begin, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        spans[event["name"]].append((numbers[event["tid"]], max(begin, start), end))
    return Lanes(names=[event["args"]["name"] for event in named], spans=spans, inside=inside)


def _queues(events: Sequence[Json], start: float, stop: float) -> list[Panel]:
    """Return a panel of the queues' lengths, if there are any."""
    readings: dict[str, dict[float, float]] = {}
    for event in events:
        if event["ph"] == "C":
            curve = readings.setdefault(event["name"], {})
            curve[max(start, event["ts"] / 1e6)] = event["args"]["items"]
    curves = []
    for number, (name, curve) in enumerate(readings.items()):
        times, values = [*curve], [*curve.values()]
        times.append(max(times[-1], stop))
        values.append(values[-1])  # which holds
        held = Curve(
            name=name, colour=number, begin=start, times=times, values=values, is_step=True
        )
        curves.append(held)
    return [Panel(label="queues\n(items)", curves=curves)] if curves else []
