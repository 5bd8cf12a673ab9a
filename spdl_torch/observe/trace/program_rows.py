"""The program's own spans and counters in a trace: on the rows of the pipelines' threads where
they are inside a turn, otherwise on rows of their own.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ...engine.timeline import Part
from .rows import microseconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ...engine.timeline import Row, Timeline
    from .user_events import Count, Program, Span

Event = dict[str, Any]


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


class ProgramRows:
    """The rows of the program's own spans, one for each thread. A thread whose spans overlap
    without nesting, as those of coroutines may, has several.
    """

    def __init__(self, pid: int, free_tids: Iterator[int], time_of: Callable[[int], float]) -> None:
        self.pid = pid
        self.header: list[Event] = []
        self.events: list[Event] = []
        self._free_tids = free_tids
        self._time_of = time_of
        self._lanes: dict[tuple[str, int, int], _Lane] = {}

    def add(self, program: Program) -> None:
        """Return the events; the spans of a thread may be passed only once."""
        for span in sorted(program.spans, key=lambda s: (s.started_ns, -s.ended_ns)):
            ts = self._time_of(span.started_ns)
            event: Event = {"ph": "X", "name": span.name, "cat": "program", "pid": self.pid}
            event |= {"tid": self._tid_for(span), "ts": ts}
            event["dur"] = self._time_of(span.ended_ns) - ts
            if span.cpu_ns >= 0:
                event["tdur"] = microseconds(span.cpu_ns)
            self.events.append(event)
        self._add_counts(program.counts)

    def _add_counts(self, counts: Sequence[Count]) -> None:
        """Add the curves. JSON has neither NaN nor infinity: an event shows where they begin."""
        not_finite: set[str] = set()
        for count in counts:
            where: Event = {"pid": self.pid, "tid": self.pid, "ts": self._time_of(count.time_ns)}
            if math.isfinite(count.value):
                not_finite.discard(count.name)
                where |= {"ph": "C", "name": count.name, "args": {"value": count.value}}
            elif count.name not in not_finite:
                not_finite.add(count.name)
                where |= {"ph": "i", "name": f"{count.name} is not finite", "cat": "program"}
                where |= {"s": "p", "args": {"value": str(count.value)}}
            else:
                continue
            self.events.append(where)

    def _tid_for(self, span: Span) -> int:
        for number in itertools.count():
            key = span.thread, span.thread_id, number
            lane = self._lanes.get(key) or self._new_lane(*key)
            if lane.takes(span):
                return lane.tid
        raise AssertionError("guaranteed: an empty lane takes any span")

    def _new_lane(self, thread: str, thread_id: int, number: int) -> _Lane:
        lane = self._lanes[thread, thread_id, number] = _Lane(next(self._free_tids), [])
        name = thread if number == 0 else f"{thread} ({number + 1})"
        where: Event = {"ph": "M", "name": "thread_name", "pid": self.pid, "tid": lane.tid}
        self.header.append({**where, "args": {"name": name}})
        return lane


class _Lane(NamedTuple):
    """A row, and the ends of its open spans; the innermost is the last."""

    tid: int
    open_ends: list[int]

    def takes(self, span: Span) -> bool:
        """Put the span on the row, unless it would overlap another one without nesting."""
        while self.open_ends and self.open_ends[-1] <= span.started_ns:
            self.open_ends.pop()
        if self.open_ends and span.ended_ns > self.open_ends[-1]:
            return False
        self.open_ends.append(span.ended_ns)
        return True
