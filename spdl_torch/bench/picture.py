"""The table as a picture: a panel for each metric, a bar for each row, the spread as a line.

Rows named ``sweep=number`` are points of a curve instead; each sweep has its own panels.
matplotlib is an extra: this module is imported without it, its functions need it.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from ..whole_files import whole_file
from .statistics import summarize

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from matplotlib.axes import Axes

    from .report import Metric, Report

__all__ = ["curves", "draw", "missing_contenders"]

_OURS = "#1b6ca8"
_THEIRS = "#9aa5b1"
_HIDDEN = "other_cores"
_PANEL_WIDTH = 3.4
_BAR_HEIGHT = 0.28
_LINE_HEIGHT = 0.2
_LETTERS = 30  # of small text, across the width of a panel


def draw(report: Report, path: Path) -> None:
    """Write the picture; the suffix of ``path`` is its format.

    Raises: ValueError: a format that matplotlib does not know.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sweeps = curves(report)
    if sweeps:
        figure = Figure(layout="constrained")
        FigureCanvasAgg(figure)
        _draw_curves(figure, report, sweeps)
    else:
        metrics = [metric for metric in report.shown_metrics() if metric.key != _HIDDEN]
        missing = missing_contenders(report)
        height = 1.3 + _BAR_HEIGHT * len(report.rows_of()) + _LINE_HEIGHT * len(missing)
        figure = Figure(figsize=(2.6 + _PANEL_WIDTH * len(metrics), height), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
        for axes, metric in zip(panels, metrics, strict=True):
            _draw_bars(axes, metric, report)
        if missing:
            figure.supxlabel("\n".join(missing), fontsize="small", x=0.02, ha="left")
    figure.suptitle(report.title, fontsize="medium")
    with whole_file(path) as file:
        figure.savefig(file, format=path.suffix.removeprefix(".") or None, dpi=110)


def missing_contenders(report: Report) -> list[str]:
    """Return lines that say why a picture shows one contender alone; none where it shows
    several."""
    if len(report.rows_of()) > 1:
        return []
    reasons = [f"{row}: {reason}" for row, reason in report.failures.items()]
    reasons += [remark for remark in report.remarks if "left out" in remark]
    width = max(_LETTERS * len(report.shown_metrics()), 60)
    lines = [line for reason in reasons for line in textwrap.wrap(reason, width)]
    return ["One contender was measured, so there is nothing to compare.", *lines]


def curves(report: Report) -> dict[str, dict[str, list[tuple[float, str]]]]:
    """Sweep, label, then its points: ``(number, row)``. Empty if a row is not a point.

    A row's name is ``sweep=number`` or ``label: sweep=number``.
    """
    found: dict[str, dict[str, list[tuple[float, str]]]] = {}
    for row in report.rows:
        name, separator, number = row.partition("=")
        if not separator:
            return {}
        label, _, sweep = name.rpartition(": ")
        found.setdefault(sweep, {}).setdefault(label or "ours", []).append((float(number), row))
    return found


def _draw_bars(axes: Axes, metric: Metric, report: Report) -> None:
    names = list(report.rows_of())
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    largest = 0.0
    for place, series in enumerate(report.rows_of().values()):
        values = series.get(metric.key, {}).values()
        if not values:
            continue
        summary = summarize(values)
        largest = max(largest, summary.largest)
        is_ours = names[place].rpartition(": ")[2].startswith("ours")
        axes.barh(place, summary.median, 0.7, color=_OURS if is_ours else _THEIRS)
        axes.plot([summary.smallest, summary.largest], [place] * 2, color="#222222", linewidth=1.2)
        text = f" {summary.median:,.{metric.digits}f}"
        axes.text(summary.largest, place, text, va="center", fontsize="small")
    axes.set_xlim(0, largest * 1.3 or 1)
    better = "more is better" if metric.higher_is_better else "less is better"
    axes.set_xlabel(f"{metric.heading}\n({better})", fontsize="small")
    axes.tick_params(labelsize="small")
    axes.ticklabel_format(axis="x", style="plain")
    axes.locator_params(axis="x", nbins=4)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_curves(
    figure: object,
    report: Report,
    sweeps: Mapping[str, Mapping[str, list[tuple[float, str]]]],
) -> None:
    from matplotlib.figure import Figure

    assert isinstance(figure, Figure)
    shown = {
        sweep: [m for m in report.shown_metrics() if m.key != _HIDDEN and _has(report, lines, m)]
        for sweep, lines in sweeps.items()
    }
    width = max(map(len, shown.values()))
    figure.set_size_inches(1.0 + _PANEL_WIDTH * width, 0.6 + 2.6 * len(sweeps))
    grid = figure.subplots(len(sweeps), width, squeeze=False)
    for row, (sweep, lines) in zip(grid, sweeps.items(), strict=True):
        for axes in row[len(shown[sweep]) :]:
            axes.set_axis_off()
        for axes, metric in zip(row, shown[sweep], strict=False):
            _draw_lines(axes, metric, report, sweep, lines)


def _has(report: Report, lines: Mapping[str, list[tuple[float, str]]], metric: Metric) -> bool:
    return any(report.rows[row].get(metric.key) for points in lines.values() for _, row in points)


def _draw_lines(
    axes: Axes,
    metric: Metric,
    report: Report,
    sweep: str,
    lines: Mapping[str, list[tuple[float, str]]],
) -> None:
    for label, points in lines.items():
        found = [
            (number, summarize(values.values()))
            for number, row in sorted(points)
            if (values := report.rows[row].get(metric.key))
        ]
        if not found:
            continue
        xs = [number for number, _ in found]
        line = axes.plot(xs, [s.median for _, s in found], marker="o", markersize=4, label=label)
        low, high = [s.smallest for _, s in found], [s.largest for _, s in found]
        axes.fill_between(xs, low, high, color=line[0].get_color(), alpha=0.2, linewidth=0)
    _set_scales(axes, metric, sweep)
    axes.set_xlabel(sweep, fontsize="small")
    axes.set_ylabel(metric.heading, fontsize="small")
    axes.tick_params(labelsize="small")
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    if len(lines) > 1:
        axes.legend(fontsize="x-small")


def _set_scales(axes: Axes, metric: Metric, sweep: str) -> None:
    """Set the scales: dataset sizes, and what grows with them, span five powers of ten."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    wide = sweep == "samples"
    axes.set_xscale("log", base=10 if wide else 2)
    plain = FuncFormatter(lambda value, _: f"{value:,.0f}")
    if not wide:
        axes.xaxis.set_major_formatter(plain)
    axes.xaxis.set_minor_formatter(NullFormatter())
    if wide and not metric.higher_is_better:
        axes.set_yscale("symlog", linthresh=1)
    elif metric.higher_is_better:
        axes.yaxis.set_major_formatter(plain)
    axes.set_ylim(bottom=0)
