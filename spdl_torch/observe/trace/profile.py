"""The profile of a run: statistics of every stage, verdict, and what each thread did when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from ..page.page import write_page
from ..verdict.figures import figures_of
from .chrome_trace import Program, chrome_trace
from .run_page import MeasuredRun, load_runs, page_of
from .trace_file import path_to_write, write

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from ...engine.statistics import StageStats
    from ...engine.timeline import Timeline
    from ..verdict.report import Report

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
            statistics[name] = _figures(stage, stats.elapsed)
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
        if max_events < 1:
            raise ValueError(f"write_trace: max_events must be >= 1, got {max_events}.")
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
        cls,
        path: str | os.PathLike[str],
        *,
        run_id: int | None = None,
        pipeline: int | None = None,
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


def _figures(stage: StageStats, elapsed: float) -> dict[str, float]:
    return {
        "threads": stage.concurrency,
        "busy_seconds": stage.busy_ns / 1e9,
        "cpu_seconds": stage.cpu_ns / 1e9,
        "wait_in_seconds": stage.wait_in_ns / 1e9,
        "wait_out_seconds": stage.wait_out_ns / 1e9,
        "tasks_per_second": figures_of(stage, elapsed, "metrics")["items_per_second"],
        **figures_of(stage, elapsed, "statistics"),
    }
