"""A whole trace in Chrome's format: which turns are in it, and the processes that show them."""

from __future__ import annotations

import itertools
import math
import socket
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from ._trace_flows import Placed, add_flows
from ._trace_json import OURS
from ._trace_rows import ProcessRows, num_slices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..pipeline.timeline import Clock, Timeline
    from .report import Report

__all__ = ["FIRST_PID", "FIRST_TID", "chrome_trace"]

FIRST_PID: Final = 2**30
"""Above every process id: Linux has at most 2**22."""

FIRST_TID: Final = 2**31

_PIDS_PER_RANK = 256
_TIDS_PER_RANK = 2**16

Event = dict[str, Any]


def chrome_trace(
    timelines: Sequence[Timeline],
    report: Report,
    *,
    rank: int,
    last_seconds: float | None,
    max_events: int,
) -> dict[str, Any]:
    """A trace as :meth:`Profile.write_trace` writes it; ``timelines`` are of one process."""
    timelines = sorted(timelines, key=_start_of)
    numbers = sorted({t.pipeline_number for t in timelines})[-_PIDS_PER_RANK:]
    too_many = [t for t in timelines if t.pipeline_number not in numbers]
    timelines = [t for t in timelines if t.pipeline_number in numbers]
    # One clock for all: two readings may differ, if only by the time that they took.
    clock = max((t.clock for t in timelines), key=lambda clock: clock.perf_ns)
    cutoff = _cutoff(timelines, last_seconds, max_events)
    base = _base(timelines, clock, cutoff)
    tids = itertools.count(FIRST_TID + rank * _TIDS_PER_RANK)
    header: list[Event] = []
    events: list[Event] = []
    placed: list[Placed] = []
    processes: list[ProcessRows] = []
    num_left_out = sum(map(_num_in, too_many))
    for index, number in enumerate(numbers):
        own = [t for t in timelines if t.pipeline_number == number]
        process = ProcessRows(FIRST_PID + rank * _PIDS_PER_RANK + index, clock, base, cutoff, tids)
        placed += map(process.add, own)
        title = f"Data pipeline · rank {rank}"
        if len(numbers) > 1:
            title += f" · {own[-1].pipeline} {number}"
        header += process.header(title, index - FIRST_PID + rank * _PIDS_PER_RANK)
        events += process.events
        processes.append(process)
        num_left_out += process.num_left_out
    add_flows(placed)
    events.sort(key=itemgetter("ts"))  # stable: what encloses another comes first
    profile = {
        "rank": rank,
        "host": socket.gethostname(),
        "pids": [process.pid for process in processes],
        "num_lost": sum(row.num_lost for t in timelines for row in t.rows),
        "num_left_out": num_left_out,
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


def _base(timelines: Sequence[Timeline], clock: Clock, cutoff: float) -> int:
    """The full second before the first event."""
    starts = (
        min(
            (turn.since_ns for turn in row.turns if turn.done_ns > cutoff),
            default=clock.perf_ns,
        )
        for timeline in timelines
        for row in timeline.rows
    )
    instants = (i.time_ns for t in timelines for i in t.instants if i.time_ns > cutoff)
    first = min([clock.perf_ns, *starts, *instants])
    return clock.system(first) // 1_000_000_000 * 1_000_000_000


def _cutoff(timelines: Sequence[Timeline], last_seconds: float | None, max_events: int) -> float:
    """What had ended by then is left out, so that at most ``max_events`` events remain."""
    ends = [(i.time_ns, 1) for t in timelines for i in t.instants]
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
