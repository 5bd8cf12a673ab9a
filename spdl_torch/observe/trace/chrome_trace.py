"""A whole trace in Chrome's format: its turns, and the processes that show them."""

from __future__ import annotations

import itertools
import math
import socket
from bisect import bisect_right
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from ...engine.moments import TwoClocks
from ...engine.timeline import Part
from .json_file import OURS
from .rows import Placed, ProcessRows, add_flows, num_slices
from .user_events import Program

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...engine.timeline import Row, Timeline
    from ..verdict.report import Report
    from .user_events import Span

FIRST_PID: Final = 2**30
"""Above every process id: Linux has at most 2**22."""

FIRST_TID: Final = 2**31

_PIDS_PER_RANK = 256  # the last one is the program's
_TIDS_PER_RANK = 2**16

Event = dict[str, Any]


def chrome_trace(
    timelines: Sequence[Timeline],
    report: Report,
    *,
    rank: int,
    last_seconds: float | None,
    max_events: int,
    program: Program | None = None,
) -> dict[str, Any]:
    """Return a trace as :meth:`Profile.write_trace` writes it; ``timelines``: of one process."""
    program = program or Program()
    timelines, spans = _put_into_rows(sorted(timelines, key=_start_of), program.spans)
    program = replace(program, spans=tuple(spans))
    numbers = sorted({t.pipeline_number for t in timelines})[1 - _PIDS_PER_RANK :]
    too_many = [t for t in timelines if t.pipeline_number not in numbers]
    timelines = [t for t in timelines if t.pipeline_number in numbers]
    # One clock for all: two readings differ at least by the time that they take.
    clocks = [t.clock for t in timelines] or [TwoClocks.now()]
    clock = max(clocks, key=lambda clock: clock.perf_ns)
    cutoff = _cutoff(timelines, program, last_seconds, max_events)
    num_left_out = sum(map(_num_in, too_many)) + len(program)
    program = program.since(cutoff)
    num_left_out -= len(program)
    base = _base(timelines, program, clock, cutoff)
    tids = itertools.count(FIRST_TID + rank * _TIDS_PER_RANK)
    placed: list[Placed] = []
    processes: list[ProcessRows] = []
    header: list[Event] = []

    def new_process(index: int) -> ProcessRows:
        pid = FIRST_PID + rank * _PIDS_PER_RANK + index
        processes.append(ProcessRows(pid, clock, base, cutoff, tids))
        return processes[-1]

    for index, number in enumerate(numbers):
        own = [t for t in timelines if t.pipeline_number == number]
        process = new_process(index)
        placed += map(process.add, own)
        title = f"{program.name or 'Data pipeline'} · rank {rank}"
        if len(numbers) > 1:
            title += f" · {own[-1].pipeline} {number}"
        header += process.header(title, process.pid - 2 * FIRST_PID)  # above those of others
    if program:
        process = new_process(_PIDS_PER_RANK - 1)
        _add_program(process, program)
        header += process.header(f"{program.name or 'Program'} · rank {rank}")
    events = [event for each in processes for event in each.events]
    add_flows(placed)
    events.sort(key=itemgetter("ts"))  # stable: an enclosing slice stays before those inside it
    profile = {
        "rank": rank,
        "host": socket.gethostname(),
        "pids": [each.pid for each in processes],
        "num_lost": sum(row.num_lost for t in timelines for row in t.rows),
        "num_left_out": num_left_out + sum(each.num_left_out for each in processes),
        "report": report.as_dict(),
    }
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base,
        OURS: {"formatVersion": 1, "profiles": [profile]},
        "traceEvents": header + events,
    }


def _start_of(timeline: Timeline) -> int:
    return min((row.turns[0].since_ns for row in timeline.rows if row.turns), default=0)


def _base(timelines: Sequence[Timeline], program: Program, clock: TwoClocks, cutoff: float) -> int:
    """Return the full second before the first event."""
    starts = (
        min(
            (turn.since_ns for turn in row.turns if turn.done_ns > cutoff),
            default=clock.perf_ns,
        )
        for timeline in timelines
        for row in timeline.rows
    )
    instants = (i.time_ns for t in timelines for i in t.instants if i.time_ns > cutoff)
    added = (*(s.started_ns for s in program.spans), *(c.time_ns for c in program.counts))
    first = min([clock.perf_ns, *starts, *instants, *added])
    return clock.system(first) // 1_000_000_000 * 1_000_000_000


def _cutoff(
    timelines: Sequence[Timeline], program: Program, last_seconds: float | None, max_events: int
) -> float:
    """Return the time before which events are left out, by ``last_seconds`` and ``max_events``."""
    ends = [(i.time_ns, 1) for t in timelines for i in t.instants]
    ends += [(span.ended_ns, 1) for span in program.spans]
    ends += [(count.time_ns, 1) for count in program.counts]
    for timeline in timelines:
        for row in timeline.rows:
            # Its slices, and a reading of the queues on both sides.
            ends += [(turn.done_ns, num_slices(turn) + 2) for turn in row.turns]
            ends += [(part.ended_ns, 1) for part in row.parts]
    if not ends:
        return -math.inf
    ends.sort(reverse=True)
    cutoff = -math.inf if last_seconds is None else ends[0][0] - last_seconds * 1e9
    for end, weight in ends:
        max_events -= weight
        if max_events < 0:
            return max(cutoff, end)
    return cutoff


def _num_in(timeline: Timeline) -> int:
    slices = (sum(map(num_slices, row.turns)) + len(row.parts) for row in timeline.rows)
    return sum(slices) + len(timeline.instants)


def _put_into_rows(
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


def _add_program(rows: ProcessRows, program: Program) -> None:
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
