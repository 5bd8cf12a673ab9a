"""The demo's tables as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..observe.page.content import Column, Page, Table, Text
from .jobs import VARIANTS, WORKLOADS
from .outcome import as_json
from .table import comparison_rows, model_speeds, over_what
from .text import WHEN_IT_WAITS, amounts, noise_text, title_of
from .verdict import rate_of, wait_at

if TYPE_CHECKING:
    from ..observe.page.content import Section
    from .outcome import Outcome


def page_of(outcome: Outcome) -> Page:
    """Return the tables as a page; its data are those of ``--json``."""
    sections: list[Section] = []
    for workload in outcome.measured():
        if verdict := outcome.verdict(workload):
            title = WORKLOADS[workload].title
            sections.append(Text(word=title, text=verdict.finding, tone="verdict"))
            sections.append(Text(word="", text=verdict.advice, tone="action"))
            sections.append(Text(word="", text=WORKLOADS[workload].why_level, tone="action"))
    if outcome.is_smoke:
        sections.append(Text(word="NOTE", text="A smoke run is too short to compare."))
    for workload in outcome.measured():
        sections.append(_comparison(outcome, workload))
        if not outcome.is_smoke:
            sections.append(_waiting(outcome, workload))
    return Page(
        title="Loading with torch's DataLoader and with spdl_torch's",
        sections=sections,
        figures={"demo": as_json(outcome)},
    )


def _comparison(outcome: Outcome, workload: str) -> Table:
    quiet = outcome.quiet(workload)
    with_ratio = len(quiet) > 1 and not outcome.is_smoke
    columns = [Column("figure"), Column("unit"), *(Column(VARIANTS[key].name) for key in quiet)]
    if with_ratio:
        names = [VARIANTS[key].name for key in quiet]
        columns += [
            Column(f"ratio {over}", meaning=f"{name} over {names[0]}.")
            for over, name in zip(over_what(len(quiet)), names[1:], strict=True)
        ]
        columns.append(Column("better is"))
    rows = [
        (row.name, row.unit, *row.cells, *((*row.ratios, row.better) if with_ratio else ()))
        for row in comparison_rows(quiet)
    ]
    return Table(
        title=title_of(workload),
        columns=columns,
        rows=rows,
        note=f"{amounts(outcome, workload)}. {noise_text(outcome, workload)}",
    )


def _waiting(outcome: Outcome, workload: str) -> Table:
    rates = {key: rate_of(rounds) for key, rounds in outcome.quiet(workload).items()}
    speeds = model_speeds(list(rates.values()))
    return Table(
        title=f"{WORKLOADS[workload].title}: how much of its time a model waits, by its own speed",
        columns=[
            Column("loader"),
            Column("a model waits if faster than, images/s", "rate"),
            *(Column(f"at {speed:,}/s", "percent") for speed in speeds),
        ],
        rows=[
            (VARIANTS[key].name, rate, *(wait_at(speed, rate) for speed in speeds))
            for key, rate in rates.items()
        ],
        note=WHEN_IT_WAITS,
    )
