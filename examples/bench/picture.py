"""The table as a picture: a panel for each metric, a bar for each row, the spread as a line.

matplotlib is an extra: this module is imported without it, its functions need it.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from spdl_torch.whole_files import whole_file

from .rounds import summarize

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from .report import Metric, Report

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

    metrics = [metric for metric in report.shown_metrics() if metric.key != _HIDDEN]
    missing = missing_contenders(report)
    height = 1.3 + _BAR_HEIGHT * len(report.rows) + _LINE_HEIGHT * len(missing)
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
    if len(report.rows) > 1:
        return []
    reasons = [f"{row}: {reason}" for row, reason in report.failures.items()]
    reasons += [remark for remark in report.remarks if "left out" in remark]
    width = max(_LETTERS * len(report.shown_metrics()), 60)
    lines = [line for reason in reasons for line in textwrap.wrap(reason, width)]
    return ["One contender was measured, so there is nothing to compare.", *lines]


def _draw_bars(axes: Axes, metric: Metric, report: Report) -> None:
    names = list(report.rows)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    largest = 0.0
    for place, series in enumerate(report.rows.values()):
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
