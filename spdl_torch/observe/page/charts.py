"""Charts over time, drawn by matplotlib without a display and without any global state: ``plot``
saves them, and the page shows them as SVG.

matplotlib is an extra: this module is imported without it, its functions need it. All times are
seconds from an origin, such as the run's start.
"""

from __future__ import annotations

import base64
import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind people can distinguish too; without yellow, which is
# hard to see on white.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_WAITS = {"Wait on Input Queue": "#dcdcdc", "Wait on Output Queue": "#b4b4b4"}

# Percentiles are thinner, never paler: a paler shade of one queue's blue is another queue's blue.
_STYLES: dict[str, dict[str, Any]] = {
    "mean": {"linestyle": "-", "linewidth": 1.8},
    "p90": {"linestyle": "--", "linewidth": 0.9},
    "p99": {"linestyle": ":", "linewidth": 0.9},
}

_WIDTH, _PANEL_HEIGHT, _HEAD_HEIGHT, _LANE_HEIGHT = 12.0, 2.1, 1.1, 0.22  # inches
_LETTERS_OF_LEGEND, _LETTERS_OF_TITLE = 30, 100
_UNITS = (("s", 1.0, 300.0), ("min", 60.0, 5 * 3600.0), ("h", 3600.0, math.inf))
_RED, _GREY = "#b2182b", "#404040"

# The edge keeps a span that is narrower than a pixel visible.
_COLLECTION: dict[str, Any] = {
    "facecolor": (_RED, 0.15),
    "edgecolor": (_RED, 0.6),
    "linewidth": 0.6,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """One line of a panel."""

    name: str
    """Curves of one name have one colour, and one entry in the legend."""
    kind: Literal["mean", "p90", "p99"] = "mean"
    colour: int = 0
    begin: float
    """The beginning of the first interval."""
    times: Sequence[float]
    """The end of each."""
    values: Sequence[float]
    """NaN where an interval has none."""
    is_step: bool = False
    """Whether a value holds until the next one, as the length of a queue does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One pair of axes with curves."""

    label: str
    curves: Sequence[Curve]
    is_percentage: bool = False
    """Whether the axis always runs from 0 to 100."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lanes:
    """One pair of axes with a lane for every worker."""

    names: Sequence[str]
    spans: Mapping[str, Sequence[tuple[int, float, float]]]
    """Of each kind, such as ``Process``: the number of the lane, begin and end."""
    inside: Sequence[str] = ()
    """The kinds that lie inside of others, and are drawn lower."""


Axis: TypeAlias = Panel | Lanes


def draw(
    panels: Sequence[Axis],
    collections: Iterable[tuple[float, float]],
    span: tuple[float, float],
    *,
    heading: str,
    sentences: Sequence[str] = (),
    marked: frozenset[str] = frozenset(),
    since: str = "the run's start",
) -> Figure:
    """Return a figure with the panels one below the other, which share the time axis.

    collections: begin and end of each full garbage collection.
    sentences: above the panels, in red where there is a bottleneck.
    marked: the names of curves that the sentences blame.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [
        _LANE_HEIGHT * len(each.names) + 0.6 if isinstance(each, Lanes) else _PANEL_HEIGHT
        for each in panels
    ]
    figure = Figure(figsize=(_WIDTH, _HEAD_HEIGHT + sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    unit, seconds, _ = next(entry for entry in _UNITS if span[1] - span[0] <= entry[2])
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)
    all_axes = [row[0] for row in rows]
    inside = [each for each in collections if each[1] >= span[0] and each[0] <= span[1]]
    for axes, panel in zip(all_axes, panels, strict=True):
        if isinstance(panel, Lanes):
            _draw_lanes(axes, panel, seconds)
        else:
            _draw_curves(axes, panel, seconds)
        if inside:
            spans = [(start / seconds, (stop - start) / seconds) for start, stop in inside]
            _mark(axes, spans)
    figure.align_ylabels()
    margin = 0.015 * (span[1] - span[0]) / seconds or 0.5
    all_axes[-1].set_xlim(span[0] / seconds - margin, span[1] / seconds + margin)
    all_axes[-1].ticklabel_format(axis="x", style="plain", useOffset=False)
    all_axes[-1].set_xlabel(f"time since {since} ({unit}); a point is an interval's end")
    figure.suptitle(heading, fontsize="medium", color=_GREY)
    lines = [line for each in sentences for line in textwrap.wrap(each, _LETTERS_OF_TITLE)]
    if lines:
        colour = _RED if marked else _GREY
        title = all_axes[0].set_title("\n".join(lines), loc="left", color=colour, weight="bold")
        title.set(fontsize="medium", parse_math=False, gid="bottleneck")
    _draw_legend(figure, panels, bool(inside), marked)
    return figure


def svg_of(figure: Figure) -> str:
    """Return a figure as the address of an SVG image, which holds all of it."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", dpi=150, metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"


def _draw_curves(axes: Axes, panel: Panel, unit_seconds: float) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    for curve in panel.curves:
        times, values = [time / unit_seconds for time in curve.times], list(curve.values)
        if len(values) == 1:  # no neighbour to draw a line to: a line as long as the interval
            times, values = [curve.begin / unit_seconds, *times], values * 2
        axes.plot(
            times,
            values,
            label=f"{curve.name} {curve.kind}",
            color=_COLOURS[curve.colour % len(_COLOURS)],
            drawstyle="steps-post" if curve.is_step else "default",
            marker=".",
            markevery=_alone(values),
            **_STYLES[curve.kind],
        )
    axes.set_ylabel(panel.label)
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    if panel.is_percentage:
        axes.set_ylim(-4, 104)
        axes.set_yticks([0, 25, 50, 75, 100])
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        drawn = [value for curve in panel.curves for value in curve.values if value > 0]
        top = max(filter(math.isfinite, drawn), default=1.0)
        axes.set_ylim(-0.04 * top, 1.08 * top)


def _alone(values: Sequence[float]) -> list[int]:
    """Return the points that no line reaches."""
    there = [math.isfinite(value) for value in (math.nan, *values, math.nan)]
    return [i for i in range(len(values)) if there[i + 1] and not (there[i] or there[i + 2])]


def _mark(axes: Axes, spans: Sequence[tuple[float, float]]) -> None:
    """Mark spans over the whole height, as one object and one image: a long run has thousands."""
    whole = axes.get_xaxis_transform()
    axes.broken_barh(spans, (0, 1), transform=whole, zorder=0.5, rasterized=True, **_COLLECTION)


def _draw_lanes(axes: Axes, lanes: Lanes, unit_seconds: float) -> None:
    from matplotlib.collections import PolyCollection

    for kind, colour in _colours_of(lanes).items():
        upper, lower = (0.05, -0.3) if kind in lanes.inside else (0.35, -0.35)
        corners = [
            _corners(start / unit_seconds, stop / unit_seconds, lane + lower, lane + upper)
            for lane, start, stop in lanes.spans[kind]
        ]
        # As pixels: a vector graphic of 50,000 spans would be large, and look the same.
        shapes = PolyCollection(corners, facecolor=colour, gid=kind, rasterized=True)
        axes.add_collection(shapes)
    axes.set_ylim(len(lanes.names) - 0.5, -0.5)  # the first lane is on top
    axes.set_yticks(range(len(lanes.names)), list(lanes.names), parse_math=False)


def _colours_of(lanes: Lanes) -> dict[str, str]:
    colours = cycle(_COLOURS)
    return {kind: _WAITS.get(kind) or next(colours) for kind in lanes.spans}


def _corners(start: float, stop: float, bottom: float, top: float) -> list[tuple[float, float]]:
    return [(start, bottom), (start, top), (stop, top), (stop, bottom)]


def _draw_legend(
    figure: Figure,
    panels: Sequence[Axis],
    has_collections: bool,
    marked: frozenset[str],
) -> None:
    """Draw the meaning of colours and lines, to the right of the panels."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    curves = [curve for each in panels if isinstance(each, Panel) for curve in each.curves]
    for name, number in {curve.name: curve.colour for curve in curves}.items():
        colour, label = _COLOURS[number % len(_COLOURS)], _legend_label(name, marked)
        handles.append(Line2D([], [], linewidth=1.8, label=label, color=colour))
    if any(curve.kind != "mean" for curve in curves):
        for kind, style in _STYLES.items():
            handles.append(Line2D([], [], color=_GREY, label=kind, **style))
    kinds = [pair for p in panels if isinstance(p, Lanes) for pair in _colours_of(p).items()]
    handles += [Patch(facecolor=c, label=_legend_label(kind, marked)) for kind, c in kinds]
    if has_collections:
        handles.append(Patch(label="full garbage\ncollection", **_COLLECTION))
    labels = [str(handle.get_label()) for handle in handles]
    legend = figure.legend(handles, labels, loc="outside right upper", fontsize="small")
    for text in legend.get_texts():  # dollar signs in names would begin a formula
        text.set_parse_math(False)


def _legend_label(name: str, marked: frozenset[str]) -> str:
    lines = textwrap.wrap(str(name), _LETTERS_OF_LEGEND, break_on_hyphens=False)
    if name in marked:
        lines.append("(bottleneck)")
    label = "\n".join(lines)
    # matplotlib leaves out labels that begin with an underscore.
    return f" {label}" if label.startswith("_") else label
