"""Draw panels over time with matplotlib, without a display and without any global state.

matplotlib is an extra: this module is imported without it, its functions need it.
"""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

from .data import merge_spans

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

    from ..store.interval_rows import Collection
    from .bottleneck import Finding
    from .data import Recording, Series
    from .panels import Panel

# Okabe and Ito's colours, which colour-blind people can distinguish too; without yellow, which is
# hard to see on white.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")

# Percentiles are thinner, never paler: a paler shade of one queue's blue is another queue's blue.
_CURVE_STYLES: dict[str, dict[str, Any]] = {
    "mean": {"linestyle": "-", "linewidth": 1.8},
    "p90": {"linestyle": "--", "linewidth": 0.9},
    "p99": {"linestyle": ":", "linewidth": 0.9},
}

_WIDTH, _PANEL_HEIGHT, _HEAD_HEIGHT = 12.0, 2.1, 1.1  # inches
_COLUMNS = 1000  # about the pixels across a panel; closer events look like one
_LETTERS_OF_LEGEND, _LETTERS_OF_TITLE = 30, 100
_UNITS = (("s", 1.0, 300.0), ("min", 60.0, 5 * 3600.0), ("h", 3600.0, math.inf))

_FULL, _YOUNG = "#b2182b", "#8073ac"
_GREY = "#404040"


@dataclass(frozen=True, slots=True)
class _TimeAxis:
    """Convert timestamps to values of the x axis."""

    origin: float
    unit: str
    unit_seconds: float

    @classmethod
    def of(cls, recording: Recording) -> _TimeAxis:
        span = recording.stop - recording.start
        unit, seconds, _ = next(entry for entry in _UNITS if span <= entry[2])
        return cls(recording.origin, unit, seconds)

    def __call__(self, timestamp: float) -> float:
        return (timestamp - self.origin) / self.unit_seconds


def draw(
    recording: Recording,
    series: Sequence[Series],
    panels: Sequence[Panel],
    *,
    heading: str,
    findings: dict[int, Finding],
) -> Figure:
    """Return a figure with the panels one below the other, sharing the time axis."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = _HEAD_HEIGHT + _PANEL_HEIGHT * len(panels)
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    time_axis = _TimeAxis.of(recording)
    rows_of_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)
    all_axes = cast("list[Axes]", [row[0] for row in rows_of_axes])
    for axes, panel in zip(all_axes, panels, strict=True):
        _draw_panel(axes, panel, series, time_axis)
        _draw_collections(axes, recording, time_axis)
    figure.align_ylabels()
    _set_time_axis(all_axes[-1], recording, time_axis)
    figure.suptitle(f"{heading}\n{_subtitle(recording)}", fontsize="medium", color=_GREY)
    _draw_findings(all_axes[0], findings)
    has_percentiles = any(len(panel.curves) > 1 for panel in panels)
    _draw_legend(figure, recording, series, findings, has_percentiles=has_percentiles)
    return figure


def _draw_panel(axes: Axes, panel: Panel, series: Sequence[Series], time_axis: _TimeAxis) -> None:
    drawn: list[float] = []
    for one in series:
        times = [time_axis(row["timestamp"]) for row in one.rows]
        for curve in panel.curves:
            values = [curve.value(row) for row in one.rows]
            drawn += values
            style = {"marker": ".", "markevery": _alone(values), **_CURVE_STYLES[curve.kind]}
            style["color"] = _colour_of(one)
            axes.plot(times, values, label=f"{one.name} {curve.kind}", **style)
            if len(values) == 1:  # no neighbour to draw a line to: a line as long as the interval
                begin = time_axis(one.rows[0]["timestamp"] - one.rows[0]["elapsed"])
                axes.lines[-1].set_data([begin, *times], values * 2)
    axes.set_ylabel(panel.label)
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    _set_scale(axes, panel, [value for value in drawn if math.isfinite(value)])


def _colour_of(series: Series) -> str:
    return _COLOURS[series.index % len(_COLOURS)]


def _alone(values: Sequence[float]) -> list[int]:
    """Return the points that no line reaches."""
    there = [math.isfinite(value) for value in (math.nan, *values, math.nan)]
    return [i for i in range(len(values)) if there[i + 1] and not (there[i] or there[i + 2])]


def _set_scale(axes: Axes, panel: Panel, values: Sequence[float]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    positive = [value for value in values if value > 0]
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    if panel.is_percentage:
        axes.set_ylim(-4, 104)
        axes.set_yticks([0, 25, 50, 75, 100])
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        top = max(positive, default=1.0)
        axes.set_ylim(-0.04 * top, 1.08 * top)


def _set_time_axis(axes: Axes, recording: Recording, time_axis: _TimeAxis) -> None:
    left, right = time_axis(recording.start), time_axis(recording.stop)
    margin = 0.015 * (right - left) or 0.5
    axes.set_xlim(left - margin, right + margin)
    axes.ticklabel_format(axis="x", style="plain", useOffset=False)
    axes.set_xlabel(f"time since the run's start ({time_axis.unit}); a point is an interval's end")


def _draw_collections(axes: Axes, recording: Recording, time_axis: _TimeAxis) -> None:
    """Draw full collections over the whole height; young ones, which are many, at the foot."""
    full, young = _collections_within(recording)
    _draw_spans(
        axes, full, recording, time_axis, top=1.0, colour=_FULL, hatch="////", gid="gc-full"
    )
    _draw_spans(
        axes, young, recording, time_axis, top=0.04, colour=_YOUNG, hatch="", gid="gc-young"
    )


def _collections_within(recording: Recording) -> tuple[list[Collection], list[Collection]]:
    inside = [
        collection
        for collection in recording.collections
        if collection.stop >= recording.start and collection.start <= recording.stop
    ]
    return [c for c in inside if c.is_full], [c for c in inside if not c.is_full]


def _draw_spans(
    axes: Axes,
    collections: Iterable[Collection],
    recording: Recording,
    time_axis: _TimeAxis,
    *,
    top: float,
    colour: str,
    hatch: str,
    gid: str,
) -> None:
    from matplotlib.collections import PolyCollection

    start, stop = recording.start, recording.stop
    spans = [(max(c.start, start), min(c.stop, stop)) for c in collections]
    merged = merge_spans(spans, gap=(stop - start) / _COLUMNS)
    if not merged:
        return
    corners = [
        [(time_axis(a), 0.0), (time_axis(a), top), (time_axis(b), top), (time_axis(b), 0.0)]
        for a, b in merged
    ]
    shapes = PolyCollection(
        corners,
        transform=axes.get_xaxis_transform(),
        facecolor=(colour, 0.15),
        edgecolor=(colour, 0.6),  # keeps a span that is narrower than a pixel visible
        linewidth=0.6,
        hatch=hatch,
        zorder=0.5,
        gid=gid,
    )
    axes.add_collection(shapes, autolim=False)


def _subtitle(recording: Recording) -> str:
    run = recording.run
    origin = datetime.fromtimestamp(recording.origin).astimezone()
    parts = [recording.db_path.name, f"run {run['run_id']} of {run['num_runs']}"]
    parts += [f"rank {run['rank']} of {run['world_size']} on {run['host']}"]
    return "  |  ".join([*parts, f"started {origin.isoformat(sep=' ', timespec='seconds')}"])


def _draw_findings(axes: Axes, findings: dict[int, Finding]) -> None:
    lines = []
    for pipeline, finding in findings.items():
        prefix = f"Pipeline {pipeline}: " if len(findings) > 1 else ""
        lines += textwrap.wrap(prefix + finding.text, _LETTERS_OF_TITLE)
    if lines:
        colour = _FULL if any(finding.label for finding in findings.values()) else _GREY
        title = axes.set_title("\n".join(lines), loc="left", color=colour, fontweight="bold")
        title.set(fontsize="medium", parse_math=False, gid="bottleneck")


def _draw_legend(
    figure: Figure,
    recording: Recording,
    series: Sequence[Series],
    findings: dict[int, Finding],
    *,
    has_percentiles: bool,
) -> None:
    """Draw the meaning of colours and lines, to the right of the panels."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for one in series:
        label = _legend_label(one, findings.get(one.key[0]))
        handles.append(Line2D([], [], linewidth=1.8, label=label, color=_colour_of(one)))
    if has_percentiles:
        for kind, style in _CURVE_STYLES.items():
            handles.append(Line2D([], [], color=_GREY, label=kind, **style))
    for collections, name, colour, hatch in zip(
        _collections_within(recording),
        ("full", "young"),
        (_FULL, _YOUNG),
        ("////", ""),
        strict=True,
    ):
        if collections:
            seconds = sum(c.stop - c.start for c in collections)
            label = f"{name} garbage\ncollections: {len(collections):,},\n{seconds:.3g} s in all"
            patch = Patch(
                facecolor=(colour, 0.15), edgecolor=(colour, 0.6), hatch=hatch, label=label
            )
            handles.append(patch)
    labels = [str(handle.get_label()) for handle in handles]
    legend = figure.legend(handles, labels, loc="outside right upper", fontsize="small")
    _take_literally(legend)


def _legend_label(series: Series, finding: Finding | None) -> str:
    lines = textwrap.wrap(series.name, _LETTERS_OF_LEGEND, break_on_hyphens=False)
    if finding is not None and finding.label == series.key[2]:
        lines.append("(bottleneck)")
    label = "\n".join(lines)
    # matplotlib leaves out labels that begin with an underscore.
    return f" {label}" if label.startswith("_") else label


def _take_literally(legend: Legend) -> None:
    """Escape dollar signs, which may occur in names of stages and would begin a formula."""
    for text in legend.get_texts():
        text.set_parse_math(False)
