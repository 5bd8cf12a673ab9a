"""A verdict with its evidence, as text for people and as JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...machine.readings import Probes, probes_over
from ...shown_text import percent, printable, shown_seconds, wrapped
from ..page.page import html_of, write_page
from .advice import fitted, on_short_samples
from .causes import Cause, Reading
from .figures import figures_on, legal_name, values_on
from .model import THE_LOOP, Question, limiting, predict, worth_asking
from .placement import Placement
from .verdict import judge

if TYPE_CHECKING:
    from ...engine.statistics import PipelineStats, StageStats
    from .advice import Trait
    from .model import Prediction
    from .verdict import Verdict

_WORTH_SAYING = 0.1


@dataclass(frozen=True, kw_only=True, repr=False)
class Report:
    """The findings of one window. ``print(report)`` shows them all, and so do the prompts of Python
    and of a notebook."""

    stats: PipelineStats
    probes: Probes
    pooled: tuple[str, ...] = ()
    """Stages that share the threads of a loader's workers; see :func:`judge`."""
    placement: Placement | None = None
    """The place where a loader's workers live now, or lived last; None = it has none."""
    notes: tuple[str, ...] = ()
    """The remarks of the verdict that no figure gives."""
    traits: tuple[Trait, ...] = ()
    """What the verdict's advice depends on besides the figures."""

    @cached_property
    def verdict(self) -> Verdict:
        """What holds training back, with advice that works for a loader with these traits."""
        found = judge(self.stats, self.probes, pooled=self.pooled)
        short = on_short_samples(self.stats, found.stage, self.traits)
        action = fitted(found.action, found.stage, self.traits)
        return replace(found, action=action, remarks=(*short, *found.remarks, *self.notes))

    def __str__(self) -> str:
        """Return the verdict, why, and what to do next; then a line for each stage, the checks, and
        what some other settings would give."""
        said = list(map(_line, self.said()))
        first = 1 + next(n for n, (word, _) in enumerate(self.said()) if word == "NEXT")
        lines = [*said[:first], f"window {shown_seconds(self.stats.elapsed)}", ""]
        lines += [*stage_lines(self), "", *said[first:]]
        lines += [_line(("WHAT IF", str(each))) for each in self.predictions]
        return printable("\n".join(lines))

    def said(self) -> list[tuple[str, str]]:
        """Return the sentences of the report, each with a word before it."""
        verdict = self.verdict
        return [
            *heads_of(verdict.finding, action_of(verdict)),
            ("checks", self._checks()),
            *([("workers", str(self.placement))] if self.placement is not None else []),
            *(("data", line) for line in _data_lines(self.stats)),
            *(("note", remark) for remark in verdict.remarks),
        ]

    __repr__ = __str__

    @property
    def predictions(self) -> tuple[Prediction, ...]:
        """Predictions for the settings that the verdict suggests to ask about; () if
        training hardly waits, or nothing can be known."""
        verdict = self.verdict
        asked = worth_asking(self._reading, verdict.stage, verdict.cause, self.placement)
        found = (self._predict(question) for question in asked)
        return tuple(each for each in found if each.high is not None)

    def what_if(
        self,
        *,
        num_workers: int | None = None,
        processes: int | None = None,
        cache: bool = False,
        read_speedup: float = 1.0,
    ) -> Prediction:
        """Predict the highest rate of loading and training with other settings, from what was
        measured.

        Args:
            num_workers: of a loader; of a pipeline the threads of its busiest stage. None = as
                many as now, or as ``processes``.
            processes: as many workers, each a process; 0 = threads of the training process; None =
                where they are now.
            cache: whether all samples are found in a cache, as from the second epoch on with
                ``spdl_torch.data.cached()``.
            read_speedup: how many times as fast storage or network answer.

        Raises: ValueError: a value out of range, or no setting is given.
        """
        question = Question(
            num_workers=num_workers, processes=processes, cache=cache, read_speedup=read_speedup
        )
        return self._predict(question)

    def _predict(self, question: Question) -> Prediction:
        return predict(question, self._reading, self.verdict.cause, self.placement)

    @property
    def _reading(self) -> Reading:
        return Reading(self.stats, self.probes, self.pooled)

    def across_ranks(self) -> str:
        """Return the ranks of ``torch.distributed`` beside each other, and the report of the one
        that waits longest: the same text on every rank. Each has to call this; it waits for all.
        """
        from torch import distributed

        from .ranks import told_of_ranks

        reports = [self]
        if distributed.is_available() and distributed.is_initialized():
            reports *= distributed.get_world_size()
            distributed.all_gather_object(reports, self)
        return told_of_ranks(dict(enumerate(reports)))

    def write_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the verdict and the table of the stages as a page, one HTML file that needs no
        network; return its path. ``loader.profile().write_html(path)`` adds what every worker did.

        path: folders are created, a file is replaced once the new one is complete.
        Raises: ValueError: a folder.
        """
        return write_page(path, html_of("Report on loading", [part_of(self)]))

    def as_json(self) -> str:
        """Return ``verdict``, ``stats``, ``probes``, ``placement`` and ``predictions`` for
        programs; null = not measured, or not known."""
        verdict = {**asdict(self.verdict), "cause": self.verdict.cause.value}
        if not math.isfinite(self.verdict.gain):
            verdict["gain"] = None
        content = {
            "verdict": verdict,
            "stats": _derived(self.stats),
            "probes": asdict(self.probes),
            "placement": None if self.placement is None else asdict(self.placement),
            "predictions": [{**asdict(each), "gain": each.gain} for each in self.predictions],
        }
        return json.dumps(content, allow_nan=False)

    def _note_on(self, stage: StageStats) -> str:
        if stage.name == self.verdict.stage:
            return f"BOTTLENECK ({self.verdict.cause.value})"
        if stage.wait_out_ratio >= 0.5:
            return "waits for room"
        if stage.wait_in_ratio < 0.5:
            return ""
        return "waits for the training loop" if stage.name in self.pooled else "waits for items"

    def _elsewhere(self) -> float:
        """Return the share of a loader's workers' time that no column of the stages has: they take
        jobs and hand batches over, or wait there for a core or the GIL."""
        own = [stage for stage in self.stats.stages if stage.name in self.pooled]
        if not own or own[0].queue.elapsed == 0:
            return 0.0
        busy = sum(stage.busy_ratio for stage in own)
        return 1 - busy - own[0].wait_in_ratio - own[0].wait_out_ratio

    def _checks(self) -> str:
        """Return the checks other than the stages, those that were not measured last."""
        p, dropped = self.probes, sum(s.num_dropped for s in self.stats.stages)
        failed = sum(stage.tasks.num_failures for stage in self.stats.stages)
        checks, unknown = [], []
        if p.gil_seconds is not None:
            checks.append(f"GIL wait {p.gil_seconds * 1e3:.1f} ms")
        elif not p.own_gil:
            unknown.append("GIL wait")
        if p.run_delay_ratio is not None:
            crew = "workers" if self.pooled else "threads"
            checks.append(f"no core for {percent(p.run_delay_ratio)} of the {crew}' time")
        else:
            unknown.append("time without a core")
        if self._elsewhere() >= _WORTH_SAYING:
            checks.append(
                f"{percent(self._elsewhere())} of the workers' time outside of the stages"
            )
        # Of a short window, what a thread did beside it, or before, may be most.
        if (p.helper_cores or 0.0) >= 0.05 and not self._reading.is_too_short:
            checks.append(f"{p.helper_cores:.1f} cores in use by threads that ops start")
        if p.sampling_ratio is not None and p.sampling_ratio >= 0.01:
            checks.append(f"drawing from the sampler {percent(p.sampling_ratio)}")
        if p.gc_ratio is not None:
            checks.append(f"garbage collection {percent(p.gc_ratio)}")
        else:
            unknown.append("garbage collection")
        checks.append(f"{failed} failed, {dropped} dropped")
        if p.step_slowdown is not None:
            checks.append(f"step over cached batches {p.step_slowdown:+.0%}")
        if unknown:
            checks.append(f"not measured: {', '.join(unknown)}")
        return ", ".join(checks)


def heads_of(finding: str, action: str) -> list[tuple[str, str]]:
    """Return the first lines of a report: a finding, if it says whether training is input-bound
    without the reason, which has a line of its own; and what to do."""
    found, _, why = finding.partition(": ")
    if not why or "input-bound" not in found:
        return [("VERDICT", finding), ("NEXT", action)]
    return [("VERDICT", f"{found}."), ("WHY", f"{why[:1].upper()}{why[1:]}"), ("NEXT", action)]


def stage_lines(report: Report) -> list[str]:
    """Return the table of the stages: a line of headings, and one for each, with a note at its end
    on what it waits for."""
    headings, rows = _table(report, "report")
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    last = len(widths) - 1
    return [
        "  ".join(
            cell.ljust(width) if n in (0, last) else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (headings, *rows)
    ]


def part_of(report: Report, heading: str = "", facts: str = "") -> dict[str, Any]:
    """Return the report's part of a page, for :func:`html_of`. ``facts``: where the statistics are
    from."""
    headings, rows = _table(report, "page")
    said = [*report.said(), ("window", shown_seconds(report.stats.elapsed))]
    said += [("what if", str(each)) for each in report.predictions]
    return {
        "heading": heading,
        "said": [("run", facts), *said] if facts else said,
        "headings": headings,
        "rows": rows,
        "meanings": {each.heading: each.meaning for each in figures_on("page")},
        "marked": report.verdict.stage,
    }


def _table(report: Report, place: str) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the rows of the table of the stages, each with a note at its end."""
    chosen, stats = figures_on(place), report.stats
    crew = "workers" if report.pooled else "threads"
    headings = [crew if each.key == "concurrency" else each.heading for each in chosen]
    rows = [
        [stage.name, *(each.shown(stage, stats.elapsed) for each in chosen), report._note_on(stage)]
        for stage in stats.stages
    ]
    return ["stage", *headings, ""], rows


def _line(said: tuple[str, str]) -> str:
    return wrapped(said[1], f"{said[0]:<9}")


def _data_lines(stats: PipelineStats) -> list[str]:
    """Return a line for each kind of dataset statistics: those whose names begin alike."""
    kinds: dict[str, list[str]] = {}
    for name, value in stats.data.items():
        kind, _, what = name.partition("/")
        number = f"{value:,}" if isinstance(value, int) else f"{value:.2%}"
        kinds.setdefault(kind, []).append(f"{what} {number}")
    return [f"{kind}: {', '.join(figures)}" for kind, figures in kinds.items()]


def make_report(
    stats: PipelineStats, probes: Probes | None = None, *, pooled: Sequence[str] = ()
) -> Report:
    """Return the report on a reading; arguments as for :func:`judge`."""
    return Report(stats=stats, probes=probes or Probes(), pooled=tuple(pooled))


def joined(earlier: Report, later: Report) -> Report:
    """Return the findings of two windows of a loader together; what is no figure is the later
    one's, and so is all of it where the stages are others."""
    windows = earlier, later
    if len({tuple(stage.name for stage in each.stats.stages) for each in windows}) > 1:
        return later
    probes = probes_over(
        [{"seconds": each.stats.elapsed, "probes": asdict(each.probes)} for each in windows]
    )
    return replace(later, stats=earlier.stats + later.stats, probes=probes)


def besides_of(report: Report) -> dict[str, Any]:
    """Return what a report has besides its figures, in JSON's types."""
    return {
        "pooled": [*report.pooled],
        "placement": None if report.placement is None else asdict(report.placement),
        "notes": [*report.notes],
        "traits": [*report.traits],
    }


def report_on(stats: PipelineStats, probes: Probes, besides: Mapping[str, Any]) -> Report:
    """Return the report on figures, with what :func:`besides_of` gave."""
    placement = besides["placement"]
    return Report(
        stats=stats,
        probes=probes,
        pooled=tuple(besides["pooled"]),
        placement=Placement(**placement) if placement else None,
        notes=tuple(besides["notes"]),
        traits=tuple(besides["traits"]),
    )


def _derived(stats: PipelineStats) -> dict[str, Any]:
    """Return what users read of the statistics."""
    stages = [
        {
            "name": stage.name,
            **values_on("JSON", stage, stats.elapsed),
            "tasks": asdict(stage.tasks),
            "queue": asdict(stage.queue),
        }
        for stage in stats.stages
    ]
    return {
        "elapsed": stats.elapsed,
        "consumer_wait_ratio": stats.consumer_wait_ratio,
        "stages": stages,
        "data": dict(stats.data),
    }


def action_of(verdict: Verdict) -> str:
    """Return what to do, the gain that it gives at most, if it is known, and what limits it."""
    gain, limit = verdict.gain, verdict.limit
    if gain == 0 or not math.isfinite(gain):
        return verdict.action
    said = f"{percent(gain)} faster" if gain < 1 else f"{1 + gain:.1f}x as fast"
    if verdict.cause is not Cause.INTERFERENCE:
        has_more = limit and limit != THE_LOOP
        said += f"; then {limiting(limit) if has_more else 'training waits no more'}"
    return f"{verdict.action} At most {said}."


def metrics_of(report: Report, start: str, *, stages: bool = True) -> dict[str, float]:
    """Return ``<start>/wait_ratio`` and the metrics of every stage, ``<start>/<stage>/...``.

    stages: False = ``wait_ratio`` alone.
    """
    stats = report.stats
    metrics = {f"{start}/wait_ratio": stats.consumer_wait_ratio}
    if stages:
        for stage in stats.stages:
            place = f"{start}/{legal_name(stage.name)}"
            for key, value in values_on("loggers", stage, stage.tasks.elapsed).items():
                metrics[f"{place}/{key}"] = float(value)
        if report.placement is not None:
            metrics[f"{start}/num_processes"] = float(report.placement.num_processes)
    return metrics
