"""The charts of a page, drawn by Bokeh: an extra, imported here alone and only in functions."""

from __future__ import annotations

import functools
import json
import math
import re
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from .content import Chart, Lanes, heading_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .content import Band, Line, Page, Spans

# Okabe and Ito's colours, which colour-blind people can distinguish too; as in the pictures.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_WAITS = {"Wait on Input Queue": "#dcdcdc", "Wait on Output Queue": "#b4b4b4"}
_BAND = "#b2182b"

_CHART_HEIGHT, _LANE_HEIGHT, _LEAST_LANES_HEIGHT = 190, 22, 160  # pixels
_AXIS_HEIGHT, _ENTRY_HEIGHT = 70, 21
_LETTER_WIDTH, _MOST_LETTERS = 6.2, 40  # beside the charts; longer names push theirs aside
_MOST_IN_LEGEND = 24

# Bokeh sets texts between these as formulas, for which it would load a script from the network.
_FORMULA = re.compile(r"\$\$|\\[(\[]")


def check_bokeh() -> None:
    """Raise ModuleNotFoundError, which names the extra, where Bokeh is not installed."""
    try:
        import bokeh  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Charts on a page need Bokeh, which is not installed: pip install bokeh (the extra "
            "report). The page of a report alone, loader.report().write_html(path), needs none."
        ) from error


@functools.cache
def bokeh_script() -> str:
    """Return the script that draws the charts, from the installed package: 1.3 MB."""
    from bokeh.resources import Resources

    return "\n".join(Resources(mode="inline", minified=True, components=["bokeh"]).js_raw)


def charts_of(page: Page) -> str:
    """Return the charts of a page as the JSON that Bokeh's script draws into the element
    ``charts``. All of them share the time axis.
    """
    from bokeh.embed import json_item
    from bokeh.layouts import column
    from bokeh.models import Range1d

    sections = [each for each in page.sections if isinstance(each, Chart | Lanes)]
    first, last = _extent(sections)
    margin = 0.01 * (last - first) or 0.5
    x_range = Range1d(first - margin, last + margin)
    borders = _borders(sections)
    figures = []
    for section in sections:
        figure = _figure(section, x_range, borders)
        if isinstance(section, Lanes):
            _draw_lanes(figure, section)
        else:
            _draw_chart(figure, section, _top_of(section, sections))
        _draw_bands(figure, [band for band in page.bands if band.run == section.run])
        figures.append(figure)
    # One document: charts of several cannot share an axis.
    drawn = column(figures, sizing_mode="stretch_width")
    return json.dumps(json_item(drawn, "charts"), separators=(",", ":"))


def _top_of(chart: Chart, sections: Sequence[Chart | Lanes]) -> float:
    """Return the largest value that the axis has to show: over all runs, so that they compare."""
    alike = [each for each in sections if isinstance(each, Chart) and each.title == chart.title]
    values = (value for each in alike for line in each.lines for value in line.values)
    return max(filter(math.isfinite, values), default=0.0) or 1.0


def _extent(sections: Sequence[Chart | Lanes]) -> tuple[float, float]:
    times: list[float] = []
    for section in sections:
        if isinstance(section, Lanes):
            for spans in section.spans:
                times += [min(spans.starts, default=0.0), max(spans.stops, default=0.0)]
        else:
            for line in section.lines:
                times += [*line.times[:1], *line.times[-1:]]
    return min(times, default=0.0), max(times, default=1.0)


def _borders(sections: Sequence[Chart | Lanes]) -> dict[str, int]:
    """Return the room that the longest label and legend need: every chart gets as much, so that a
    moment is at the same place in all of them.
    """
    lanes = [each.names for each in sections if isinstance(each, Lanes)]
    legends = [names for names in map(_legend_of, sections) if len(names) <= _MOST_IN_LEGEND]

    def room(texts: Sequence[Sequence[str]]) -> int:
        longest = max((len(text) for several in texts for text in several), default=0)
        return math.ceil(_LETTER_WIDTH * min(longest, _MOST_LETTERS))

    return {"min_border_left": max(55, 15 + room(lanes)), "min_border_right": 40 + room(legends)}


def _legend_of(section: Chart | Lanes) -> Sequence[str]:
    if isinstance(section, Lanes):
        return [spans.kind for spans in section.spans]
    return [line.name for line in section.lines]


def _figure(section: Chart | Lanes, x_range: Any, borders: dict[str, int]) -> Any:
    from bokeh.models import Title
    from bokeh.plotting import figure

    options: dict[str, Any] = {**borders}
    if isinstance(section, Lanes):
        # The first lane is on top.
        options["y_range"] = (len(section.names) - 0.5, -0.5)
        height = _LANE_HEIGHT * len(section.names) + _AXIS_HEIGHT
        options["height"] = max(_LEAST_LANES_HEIGHT, height)
    else:
        num_entries = len(section.lines) if len(section.lines) <= _MOST_IN_LEGEND else 0
        options["height"] = max(_CHART_HEIGHT, _ENTRY_HEIGHT * num_entries + _AXIS_HEIGHT)
    drawn = figure(
        **options,
        x_range=x_range,
        sizing_mode="stretch_width",
        tools="",
        toolbar_location=None,
    )
    drawn.add_layout(Title(text=_literal(heading_of(section)), text_font_size="13px"), "above")
    drawn.xaxis.axis_label = "seconds"
    drawn.yaxis.minor_tick_line_color = None
    drawn.grid.grid_line_color = "#eeeeee"
    drawn.outline_line_color = None
    return drawn


def _draw_lanes(figure: Any, lanes: Lanes) -> None:
    from bokeh.models import FixedTicker, HoverTool

    busy = [spans.kind for spans in lanes.spans if not spans.is_wait]
    colours = dict(zip(busy, islice(cycle(_COLOURS), len(busy)), strict=True))
    drawn = []
    for spans in lanes.spans:
        colour = colours.get(spans.kind) or _WAITS.get(spans.kind, "#c8c8c8")
        drawn.append(_draw_spans(figure, spans, colour))
    about = [("", "$name"), ("ms", "@ms{0,0.000}"), ("at s", "@left{0,0.000000}"), ("", "@about")]
    figure.add_tools(HoverTool(renderers=drawn, visible=False, tooltips=about))
    figure.yaxis.ticker = FixedTicker(ticks=list(range(len(lanes.names))))
    figure.yaxis.major_label_overrides = {n: _plain(name) for n, name in enumerate(lanes.names)}
    figure.ygrid.visible = False
    _set_legend(figure, len(lanes.spans))


def _draw_spans(figure: Any, spans: Spans, colour: str) -> Any:
    import numpy as np
    from bokeh.models import ColumnDataSource

    lanes = np.asarray(spans.lanes, dtype=np.float32)
    starts, stops = np.asarray(spans.starts), np.asarray(spans.stops)
    upper, lower = (-0.05, 0.3) if spans.is_inside else (-0.35, 0.35)
    source = ColumnDataSource(
        {
            "left": starts,
            "right": stops,
            "top": lanes + np.float32(upper),
            "bottom": lanes + np.float32(lower),
            "ms": ((stops - starts) * 1e3).astype(np.float32),
            "about": [_literal(text) for text in spans.about],
        },
        name=_literal(spans.kind),
    )
    return figure.quad(
        source=source,
        fill_color=colour,
        line_color=colour,  # keeps a span that is narrower than a pixel visible
        line_width=0.5,
        hover_fill_color=colour,
        hover_line_color="black",
        legend_label=_literal(spans.kind),
        name=_literal(spans.kind),
    )


def _draw_chart(figure: Any, chart: Chart, top: float) -> None:
    from bokeh.models import HoverTool, NumeralTickFormatter, Range1d

    drawn = [_draw_line(figure, line, chart) for line in chart.lines]
    shown = "@y{0.0 %}" if chart.is_share else "@y{0,0.[000]}"
    about = [("", "$name"), (chart.unit, shown), ("at s", "@x{0,0.000}")]
    figure.add_tools(
        HoverTool(renderers=drawn, visible=False, line_policy="nearest", tooltips=about)
    )
    if chart.is_share:
        figure.y_range = Range1d(-0.04, 1.04)
        figure.yaxis.formatter = NumeralTickFormatter(format="0 %")
    else:
        figure.y_range = Range1d(-0.04 * top, 1.08 * top)
    _set_legend(figure, len(chart.lines))


def _draw_line(figure: Any, line: Line, chart: Chart) -> Any:
    from bokeh.models import ColumnDataSource

    columns = {"x": list(line.times), "y": list(line.values)}
    source = ColumnDataSource(columns, name=_literal(f"{chart.title}: {line.name}"))
    style = {
        "line_color": _COLOURS[line.colour % len(_COLOURS)],
        "line_dash": line.style,
        "line_width": 1.6 if line.style == "solid" else 1.2,
        "legend_label": _literal(line.name),
        "name": _literal(line.name),
    }
    mode = "before" if line.holds == "since" else "after"
    return figure.step("x", "y", source=source, mode=mode, **style)


def _set_legend(figure: Any, num_entries: int) -> None:
    if not figure.legend:
        return
    if num_entries > _MOST_IN_LEGEND:
        figure.legend.visible = False
        return
    legend = figure.legend[0]
    figure.add_layout(legend, "right")
    legend.location = "top_left"
    legend.click_policy = "hide"
    legend.label_text_font_size = "11px"
    legend.spacing = legend.padding = 1
    legend.border_line_color = None


def _draw_bands(figure: Any, bands: Sequence[Band]) -> None:
    """Draw bands over the whole height, all those of one name with one glyph."""
    from bokeh.models import ColumnDataSource, HoverTool, VStrip

    if not bands:
        return
    source = ColumnDataSource(
        {
            "x0": [band.start for band in bands],
            "x1": [band.stop for band in bands],
            "name": [_literal(band.name) for band in bands],
            "ms": [1e3 * (band.stop - band.start) for band in bands],
        },
        name="bands",
    )
    strip = VStrip(x0="x0", x1="x1", fill_color=_BAND, fill_alpha=0.15, line_color=_BAND)
    drawn = figure.add_glyph(source, strip)
    drawn.level = "underlay"
    figure.add_tools(
        HoverTool(renderers=[drawn], visible=False, tooltips=[("", "@name"), ("ms", "@ms")])
    )


def _literal(text: str) -> str:
    """Return a text that Bokeh shows as it is: an invisible space splits what would begin a
    formula.
    """
    return _FORMULA.sub(lambda match: f"{match[0][0]}\u200b{match[0][1:]}", text)


def _plain(text: str) -> Any:
    from bokeh.models import PlainText

    return PlainText(text=text)
