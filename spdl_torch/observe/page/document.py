"""The document around a page's content: one HTML file that needs no network.

Its policy forbids the browser to load anything. The script that draws and the charts' data are
compressed, which makes the file a third as long; a browser unpacks them in 0.1 s. The numbers are
there a second time as plain JSON, for programs and for whoever checks them.
"""

from __future__ import annotations

import base64
import functools
import gzip
import html
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...shown_text import percent, printable, shown_rate
from ...whole_files import write_text
from .charts import bokeh_script, charts_of, check_bokeh
from .content import Chart, Lanes, Table, Text, heading_of
from .look import DRAW, POLICY, STYLE

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from .content import Column, Format, Page

_FORMAT_VERSION = 1
_SHORT = 40  # letters of a cell that stay on one line
_NONE = "\N{EN DASH}"  # in a cell without a value


def write_page(page: Page, path: str | os.PathLike[str]) -> Path:
    """Write a page to a file, which takes its name once it is complete; return its path. Missing
    folders are created.

    Raises: ValueError: a folder.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path}: a page must be a file, and this is a folder. Add a name to it.")
    write_text(path, html_of(page))
    return path


def html_of(page: Page) -> str:
    """Return a page as a whole document.

    Raises: ModuleNotFoundError: it has charts, and Bokeh is not installed.
    """
    if page.has_charts:
        check_bokeh()
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        f'<head><meta charset="utf-8"><title>{_escaped(page.title)}</title>',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width">',
        f"<style>{STYLE}</style></head>",
        f'<body class="spdl"><h1>{_escaped(page.title)}</h1>',
        *map(_section, _before_charts(page)),
        _charts(page),
        *map(_section, _after_charts(page)),
        f'<script type="application/json" id="spdl-figures">{_as_json(figures_of(page))}</script>',
        f"<script>{DRAW}</script>",
        "</body></html>",
        "",
    ]
    return "\n".join(part for part in parts[:-1] if part) + "\n"


def fragment_of(page: Page) -> str:
    """Return the texts and tables of a page for a notebook's cell, without its charts."""
    shown = [_section(each) for each in page.sections if isinstance(each, Text | Table)]
    return "\n".join(['<div class="spdl">', f"<style>{STYLE}</style>", *shown, "</div>"])


def notebook_html_of(page: Page) -> str:
    """Return a whole page for a notebook's cell, in a frame of its own, so that scripts and styles
    of the notebook and of the page do not interfere.
    """
    document = html.escape(html_of(page))
    return (
        '<iframe sandbox="allow-scripts allow-downloads" '
        'style="width: 100%; height: 800px; border: 1px solid #ddd" '
        f'srcdoc="{document}"></iframe>'
    )


def figures_of(page: Page) -> dict[str, Any]:
    """Return the numbers of a page in JSON's types, which the document holds as ``spdl-figures``:
    for timelines the sums of each kind of span, for everything else all values.
    """
    tables = [asdict(each) for each in page.sections if isinstance(each, Table)]
    charts = [asdict(each) for each in page.sections if isinstance(each, Chart)]
    lanes = [_sums_of(each) for each in page.sections if isinstance(each, Lanes)]
    texts = [asdict(each) for each in page.sections if isinstance(each, Text)]
    content = {"formatVersion": _FORMAT_VERSION, "title": page.title, **page.figures}
    content |= {"texts": texts, "tables": tables, "charts": charts, "timelines": lanes}
    return {**content, "bands": [asdict(band) for band in page.bands]}


def _sums_of(lanes: Lanes) -> dict[str, Any]:
    spans = [
        {
            "kind": each.kind,
            "num_spans": len(each.starts),
            "seconds": math.fsum(each.stops) - math.fsum(each.starts),
        }
        for each in lanes.spans
    ]
    return {"title": lanes.title, "names": list(lanes.names), "spans": spans}


def _before_charts(page: Page) -> Sequence[Any]:
    return page.sections[: _place_of_charts(page)]


def _after_charts(page: Page) -> Sequence[Any]:
    return page.sections[_place_of_charts(page) :]


def _place_of_charts(page: Page) -> int:
    """Return the number of the first chart; all of them are drawn there, one below the other."""
    charts = (n for n, each in enumerate(page.sections) if isinstance(each, Chart | Lanes))
    return next(charts, len(page.sections))


def _section(section: Any) -> str:
    if isinstance(section, Text):
        word, text = _escaped(section.word), _escaped(section.text)
        return f'<p class="said {section.tone}"><b>{word}</b> <span>{text}</span></p>'
    return _table(section) if isinstance(section, Table) else ""


def _table(table: Table) -> str:
    head = "".join(
        f'<th class="{column.format}" title="{_escaped(column.meaning)}">'
        f"{_escaped(column.name)}</th>"
        for column in table.columns
    )
    lines = [f"<h2>{_escaped(heading_of(table))}</h2>", '<div class="scroll"><table>']
    lines.append(f"<thead><tr>{head}</tr></thead><tbody>")
    for number, row in enumerate(table.rows):
        cells = map(_cell, table.columns, row)
        marked = ' class="marked"' if number == table.marked else ""
        lines.append(f"<tr{marked}>{''.join(cells)}</tr>")
    lines.append("</tbody></table></div>")
    if table.note:
        lines.append(f'<p class="note">{_escaped(table.note)}</p>')
    return "\n".join(lines)


def _cell(column: Column, value: Any) -> str:
    shown = _shown(value, column.format)
    if column.format == "percent" and isinstance(value, float | int):
        share = 100 * min(1.0, max(0.0, value))
        return f'<td class="percent"><i style="width: {share:.1f}%"></i><span>{shown}</span></td>'
    short = " short" if len(shown) <= _SHORT else ""
    return f'<td class="{column.format}{short}">{_escaped(shown)}</td>'


def _shown(value: Any, form: Format) -> str:
    if value is None:
        return _NONE
    if form == "text" or not isinstance(value, float | int):
        return str(value)
    if not math.isfinite(value):
        return "unlimited" if value > 0 else _NONE
    match form:
        case "count":
            return f"{value:,.0f}"
        case "percent":
            return percent(value)
        case "ms":
            return f"{1e3 * value:,.2f}" if value < 0.1 else f"{1e3 * value:,.0f}"
        case "rate":
            return shown_rate(value)
        case "seconds":
            return f"{value:,.3f}"
    raise AssertionError(f"no such format: {form}")


def _charts(page: Page) -> str:
    if not page.has_charts:
        return ""
    notes = [
        f'<p class="note">{_escaped(section.note)}</p>'
        for section in page.sections
        if isinstance(section, Chart | Lanes) and section.note
    ]
    return "\n".join(
        [
            "<h2>Over time</h2>",
            '<p class="note">Point at anything to see its figures. Click a name in a legend to '
            "hide it. A trace in Perfetto can be zoomed.</p>",
            *notes,
            '<div id="charts"></div>',
            f'<script type="text/plain" id="spdl-script">{_packed_script()}</script>',
            f'<script type="text/plain" id="spdl-charts">{_packed(charts_of(page))}</script>',
        ]
    )


@functools.cache
def _packed_script() -> str:
    return _packed(bokeh_script(), level=9)


def _packed(text: str, level: int = 6) -> str:
    packed = gzip.compress(text.encode("utf-8", "replace"), level, mtime=0)
    return base64.b64encode(packed).decode("ascii")


def _escaped(text: str) -> str:
    """Return a text for HTML. Letters that control a terminal are shown as in a text: a page may be
    looked at in one, and a browser does not show them at all."""
    return html.escape(printable(str(text)))


def _as_json(value: Any) -> str:
    """Return strict JSON that no HTML parser reads as anything else: null for NaN and infinity."""
    text = json.dumps(_strict(value), allow_nan=False, default=str, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _strict(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(each) for each in value]
    return value
