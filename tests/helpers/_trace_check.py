"""Whether a trace can be shown in full: whatever viewers would drop silently is an error here."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from spdl_torch.observe.trace.json_file import OURS, owned_pids, profiles_of, read, report_in
from spdl_torch.observe.trace.rows import nanoseconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from spdl_torch.observe import Report

_MOST_PROBLEMS = 5
_LATEST = 2.0**62  # microseconds: every time that a viewer can show
_NEEDED = {
    "M": ("name", "pid", "args"),
    "X": ("name", "pid", "tid", "ts", "dur"),
    "C": ("name", "pid", "ts", "args"),
    "i": ("name", "pid", "tid", "ts", "s"),
}
_TYPES: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "args": (dict,),
    "pid": (int, float, str),
    "tid": (int, float, str),
    "bind_id": (int, str),
}

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceSummary:
    """The contents of a trace. In one of ours, only our rows are counted."""

    ranks: tuple[int, ...]
    """The ranks, in order; () = not a trace of ours."""
    num_rows: int
    """The number of threads with slices."""
    num_slices: int
    num_flows: int
    """The number of arrows: items that can be followed."""
    num_counters: int
    """The number of curves."""
    num_instants: int
    num_others: int
    """The number of other programs' events: torch's, after a merge."""
    seconds: float
    """The time from the first event to the end of the last."""
    num_lost: int
    """The number of turns and parts overwritten in memory before the trace was written."""
    num_left_out: int
    """The number of slices and instants beyond ``max_events`` or before ``last_seconds``."""
    reports: tuple[Report, ...]
    """The verdict of each merged file."""


def check_trace(trace: str | os.PathLike[str] | Mapping[str, Any]) -> TraceSummary:
    """Check that a trace can be shown in full, and return its summary.

    trace: a file, or its contents. In one that we wrote, our rows are checked; in any other, all.
    Raises: FileNotFoundError; ValueError: it is not strict JSON; an event has no time or row, a
        length below 0, or (of ours) a time before that of the preceding slice in its row;
        slices of a row overlap without one enclosing the other; or an arrow lacks an end.
        The message has the first few.
    """
    if isinstance(trace, str | os.PathLike):
        content, where = read(trace), str(trace)
    else:
        content, where = dict(trace), "the trace"
        if not isinstance(content.get("traceEvents"), list):
            raise ValueError("the trace has no list of 'traceEvents'.")
        json.dumps(content, allow_nan=False)
    profiles = profiles_of(content, where) if OURS in content else []
    own, num_others = _own_events(content)
    problems = list(_problems(own, in_order=OURS in content))
    if problems:
        more = len(problems) - _MOST_PROBLEMS
        shown = [*problems[:_MOST_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]
        raise ValueError(f"{where}: not shown in full: {'; '.join(shown)}.")
    slices = [event for event in own if event["ph"] == "X"]
    times = [(nanoseconds(e["ts"]), nanoseconds(e.get("dur", 0))) for e in own if "ts" in e]
    span = max(ts + dur for ts, dur in times) - min(ts for ts, _ in times) if times else 0
    return TraceSummary(
        ranks=tuple(sorted({profile["rank"] for profile in profiles})),
        num_rows=len({_row(event) for event in slices}),
        num_slices=len(slices),
        num_flows=len({event["bind_id"] for event in slices if "bind_id" in event}),
        num_counters=len({(e["pid"], e["name"]) for e in own if e["ph"] == "C"}),
        num_instants=sum(event["ph"] == "i" for event in own),
        num_others=num_others,
        seconds=span / 1e9,
        num_lost=sum(profile["num_lost"] for profile in profiles),
        num_left_out=sum(profile["num_left_out"] for profile in profiles),
        reports=tuple(report_in(profile, where) for profile in profiles),
    )


def _own_events(content: dict[str, Any]) -> tuple[list[Event], int]:
    events = content["traceEvents"]
    pids = owned_pids(content)
    if pids is None:
        return events, 0
    own = [event for event in events if may_be_own(event, pids)]
    return own, len(events) - len(own)


def _row(event: Event) -> tuple[Any, Any]:
    return event["pid"], event["tid"]


def _problems(events: list[Event], *, in_order: bool) -> Iterator[str]:
    rows: dict[tuple[Any, Any], list[Event]] = {}
    flows: dict[str, list[Event]] = {}
    sound = True
    for number, event in enumerate(events):
        for problem in faults_of(event):
            sound = False
            yield f"event {number}: {problem}"
        if sound and event["ph"] == "X":
            rows.setdefault(_row(event), []).append(event)
            if "bind_id" in event:
                flows.setdefault(event["bind_id"], []).append(event)
    if sound:
        for row, slices in rows.items():
            if in_order:
                yield from _faults_of_order(row, slices)
            yield from _faults_of_row(row, slices)
        for bind_id, ends in flows.items():
            yield from _faults_of_flow(bind_id, ends)


def _faults_of_order(row: tuple[Any, Any], slices: list[Event]) -> Iterator[str]:
    for before, after in pairwise(slices):
        if before["ts"] > after["ts"]:
            yield (
                f"row {row}: {after['name']!r} at {after['ts']} us comes after "
                f"{before['name']!r} at {before['ts']} us"
            )


def _faults_of_row(row: tuple[Any, Any], slices: list[Event]) -> Iterator[str]:
    open_slices: list[tuple[int, Event]] = []
    for event in sorted(slices, key=lambda e: (nanoseconds(e["ts"]), -e["dur"])):
        start = nanoseconds(event["ts"])
        end = start + nanoseconds(event["dur"])
        while open_slices and open_slices[-1][0] <= start:
            open_slices.pop()
        if open_slices and end > open_slices[-1][0]:
            outer = open_slices[-1][1]
            yield (
                f"row {row}: {event['name']!r} at {event['ts']} us sticks out of "
                f"{outer['name']!r} at {outer['ts']} us"
            )
        open_slices.append((end, event))


def _faults_of_flow(bind_id: str, ends: list[Event]) -> Iterator[str]:
    ends = sorted(ends, key=lambda event: event["ts"])
    into = [event.get("flow_in") is True for event in ends]
    out_of = [event.get("flow_out") is True for event in ends]
    if len(ends) < 2 or not out_of[0] or not into[-1]:
        yield f"flow {bind_id} lacks an end"
    elif into[0] or out_of[-1] or not all(into[1:]) or not all(out_of[:-1]):
        yield f"flow {bind_id} begins or ends in the middle"


def faults_of(event: Any) -> Iterator[str]:
    """Yield what is wrong with any program's event."""
    if not isinstance(event, dict):
        yield f"not an object: {event!r:.50}"
        return
    phase = event.get("ph")
    if not isinstance(phase, str) or not phase:
        yield "has no 'ph'"
        return
    for key in _NEEDED.get(phase, ("pid", "ts")):
        if key not in event:
            yield f"{phase!r} has no {key!r}"
    for key, types in _TYPES.items():
        if key in event and not isinstance(event[key], types):
            yield f"{key!r} must be {types[-1].__name__}, got {event[key]!r:.50}"
    for key in ("ts", "dur", "tdur"):
        if key in event and type(event[key]) not in (int, float):
            yield f"{key!r} is not a number: {event[key]!r}"
        elif key in event and not abs(event[key]) < _LATEST:
            yield f"{key!r} is no time: {event[key]!r:.50}"
        elif key in event and key != "ts" and event[key] < 0:
            yield f"{event.get('name')!r} has {key} {event[key]}, less than 0"


def may_be_own(event: Any, pids: set[int] | None) -> bool:
    """Return whether an event is of one of our processes, or damaged; None = all are."""
    if pids is None or not isinstance(event, dict):
        return True
    pid = event.get("pid")
    return isinstance(pid, dict | list) or pid in pids
