"""The program's own spans and counters in a trace: on the rows of the pipelines' threads where
they are inside a turn, otherwise on rows of their own.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING

from ...engine.timeline import Part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...engine.timeline import Row, Timeline
    from .rows import ProcessRows
    from .user_events import Program, Span


def put_into_rows(
    timelines: Sequence[Timeline], spans: Sequence[Span]
) -> tuple[list[Timeline], list[Span]]:
    """Return the timelines, with spans inside a turn as its parts, and the other spans."""
    left: dict[int, list[Span]] = {}
    for span in spans:
        left.setdefault(span.thread_id, []).append(span)

    def filled(row: Row) -> Row:
        inside, outside = _inside_of_turns(row, left.get(row.thread_id, []))
        if not inside:
            return row
        left[row.thread_id] = outside
        parts = (Part(s.name, s.started_ns, s.ended_ns, s.cpu_ns) for s in inside)
        return replace(row, parts=(*row.parts, *parts))

    filled_ones = [replace(t, rows=tuple(map(filled, t.rows))) for t in timelines]
    return filled_ones, [span for those in left.values() for span in those]


def _inside_of_turns(row: Row, spans: list[Span]) -> tuple[list[Span], list[Span]]:
    # A consumer that loads on its own thread is working while it waits.
    starts = [t.since_ns if row.role == "consumer" else t.started_ns for t in row.turns]
    inside: list[Span] = []
    outside: list[Span] = []
    for span in spans:
        place = bisect_right(starts, span.started_ns) - 1
        fits = place >= 0 and span.ended_ns <= row.turns[place].ended_ns
        (inside if fits else outside).append(span)
    return inside, outside


def add_program(rows: ProcessRows, program: Program) -> None:
    """Add the program's spans, each on a row of its thread, and its counters. A thread whose spans
    overlap without nesting, as those of coroutines may, has several rows."""
    for span in sorted(program.spans, key=lambda s: (s.started_ns, -s.ended_ns)):
        start, end = span.started_ns, span.ended_ns
        tid = rows.row_of((span.thread_id, span.thread), span.thread, start, end, nests=True)
        rows.events.append(rows.slice(tid, "program", span.name, start, end, span.cpu_ns, {}))
    not_finite: set[str] = set()
    for count in program.counts:
        # JSON has neither NaN nor infinity: an event shows where they begin.
        if math.isfinite(count.value):
            not_finite.discard(count.name)
            rows.add_count(count.name, count.time_ns, {"value": count.value})
        elif count.name not in not_finite:
            not_finite.add(count.name)
            name, details = f"{count.name} is not finite", {"value": str(count.value)}
            rows.add_instant(name, count.time_ns, details, category="program")
