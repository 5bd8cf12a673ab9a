"""A trace's part of a page: the timeline of every worker, the queues, the events."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..page.content import Band, Chart, Lanes, Line, Spans, Table
from ..page.events import SKIPPED, Event, event_tables, title_of
from .json_file import owned_pids
from .rows import PROCESS, STEP, WAIT_IN, WAIT_OUT

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_KINDS = 12
"""Kinds of parts with a colour of their own; rarer ones share one."""

_OTHERS = "other parts"

_GC, _FAILURE = "gc", "failure"

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class OverTime:
    """The sections of a page that concern single moments."""

    charts: Sequence[Chart | Lanes] = ()
    tables: Sequence[Table] = ()
    bands: Sequence[Band] = ()

    def __add__(self, other: OverTime) -> OverTime:
        """Return these sections, then the other ones; of two tables of the same events, the one
        that says more.
        """
        own = [t for t in self.tables if not any(_is_within(t, each) for each in other.tables)]
        return OverTime(
            [*self.charts, *other.charts],
            [*own, *other.tables],
            [*self.bands, *other.bands],
        )

    def named(self, run: str) -> OverTime:
        """Return them under the name of their run."""
        return OverTime(
            [replace(each, run=run) for each in self.charts],
            [replace(each, run=run) for each in self.tables],
            [replace(each, run=run) for each in self.bands],
        )


def _is_within(table: Table, other: Table) -> bool:
    """Return whether the other one, of the same run, has the same rows, each at its moment or not:
    a trace and a statistics file note some moments on clocks that differ by a little. A table of
    skipped samples, which a file has in full, may describe their keys in other words.
    """
    if (table.title, table.run) == (title_of(SKIPPED), other.run) and other.title == table.title:
        return True
    names, others = ([column.name for column in each.columns[1:]] for each in (table, other))
    if (table.title, table.run) != (other.title, other.run) or not set(names) <= set(others):
        return False
    places = [1 + others.index(name) for name in names]
    there = {tuple(map(str, (row[place] for place in places))) for row in other.rows}
    return all(tuple(map(str, row[1:])) in there for row in table.rows)


def first_moment(trace: Json) -> float:
    """Return the time of the first event of ours, seconds since 1970."""
    times = [event["ts"] for event in _ours(trace) if "ts" in event]
    return float(trace.get("baseTimeNanoseconds", 0) / 1e9 + min(times, default=0.0) / 1e6)


def sections_of_trace(trace: Json, origin: float) -> OverTime:
    """Return the sections; ``origin``: 0 of the page's clock, seconds since 1970."""
    base = trace.get("baseTimeNanoseconds", 0) / 1e9 - origin
    events = _ours(trace)
    slices = [event for event in events if event["ph"] == "X"]
    instants = [event for event in events if event["ph"] == "i"]
    charts: list[Chart | Lanes] = []
    if slices:
        charts.append(_lanes(events, slices, base, trace))
    charts += _curves(events, base)
    noted = [_event(event, base) for event in instants if event["name"] != _GC]
    bands = [Band(name=event.name, start=event.time, stop=event.time) for event in noted]
    bands += [_collection(event, base) for event in instants if event["name"] == _GC]
    return OverTime(charts, event_tables(noted), bands)


def _event(event: Json, base: float) -> Event:
    name, details = event["name"], event.get("args", {})
    if name == _FAILURE and "key" in details:  # of a sample that was left out of its batch
        name = SKIPPED
        details = {key: details[key] for key in ("key", "stage", "error") if key in details}
    return Event(base + event["ts"] / 1e6, name, details)


def _ours(trace: Json) -> list[Json]:
    pids = owned_pids(trace)
    events: list[Json] = trace["traceEvents"]
    return events if pids is None else [event for event in events if event.get("pid") in pids]


def _collection(event: Json, base: float) -> Band:
    start, details = base + event["ts"] / 1e6, event.get("args", {})
    name = f"garbage collection, generation {details.get('generation')}"
    return Band(name=name, start=start, stop=start + float(details.get("seconds", 0.0)))


def _lanes(events: Sequence[Json], slices: Sequence[Json], base: float, trace: Json) -> Lanes:
    places = _places(events, slices)
    kinds = _kinds(slices)
    by_kind: dict[str, list[Json]] = {kind: [] for kind in dict.fromkeys(kinds.values())}
    for event in slices:
        by_kind[kinds[event["name"]]].append(event)
    numbers = {key: number for number, key in enumerate(places)}
    missing = sum(
        profile["num_lost"] + profile["num_left_out"]
        for profile in trace.get("spdlTorch", {}).get("profiles", [])
    )
    note = f"{missing:,} older slices are not shown: memory or the page had no room for them. "
    return Lanes(
        title="What every worker did",
        names=list(places.values()),
        spans=[
            Spans(
                kind=kind,
                is_wait=kind in (WAIT_IN, WAIT_OUT),
                is_inside=kind not in (WAIT_IN, WAIT_OUT, PROCESS, STEP),
                lanes=[numbers[event["pid"], event["tid"]] for event in those],
                starts=[base + event["ts"] / 1e6 for event in those],
                stops=[base + (event["ts"] + event["dur"]) / 1e6 for event in those],
                about=[_about(event, kind) for event in those],
            )
            for kind, those in by_kind.items()
        ],
        note=f"{note}write_trace() writes a trace without that limit." if missing else "",
    )


def _places(events: Sequence[Json], slices: Sequence[Json]) -> dict[tuple[Any, Any], str]:
    """Return the lanes' names by process and thread, in the order of the trace."""
    used = {(event["pid"], event["tid"]) for event in slices}
    titles: dict[Any, str] = {}
    names: dict[tuple[Any, Any], str] = {}
    order: dict[tuple[Any, Any], int] = {}
    for event in events:
        if event["ph"] == "M":
            key, what = (event["pid"], event.get("tid")), event["args"]
            if event["name"] == "process_name":
                titles[event["pid"]] = what["name"]
            elif event["name"] == "thread_name":
                names[key] = what["name"]
            elif event["name"] == "thread_sort_index":
                order[key] = what["sort_index"]
    several = len({pid for pid, _ in used}) > 1
    return {
        key: (f"{titles.get(key[0], key[0])} · " if several else "") + str(names.get(key, key[1]))
        for key in sorted(used, key=lambda key: (key[0], order.get(key, 0), key[1]))
    }


def _kinds(slices: Sequence[Json]) -> dict[str, str]:
    """Return the kind of each slice by its name, enclosing ones first: they are drawn first."""
    main = [WAIT_IN, WAIT_OUT, PROCESS, STEP]
    counts = Counter(event["name"] for event in slices)
    parts = [name for name, _ in counts.most_common() if name not in main]
    kinds = {name: name for name in main if name in counts}
    kinds |= {name: name for name in parts[:_MOST_KINDS]}
    return kinds | dict.fromkeys(parts[_MOST_KINDS:], _OTHERS)


def _about(event: Json, kind: str) -> str:
    words = [event["name"]] if kind == _OTHERS else []
    args = event.get("args", {})
    words += [f"{key} {args[key]}" for key in ("batch", "item", "outcome") if key in args]
    if "tdur" in event and event["dur"]:
        words.append(f"CPU {event['tdur'] / event['dur']:.0%}")
    return ", ".join(words)


def _ends_of_rows(events: Sequence[Json]) -> dict[tuple[Any, str], float]:
    """Return the end of the last slice in the rows of a name, ``worker`` of ``worker[1]``, by
    process and name; seconds on the trace's clock.
    """
    rows = {
        (event["pid"], event["tid"]): event["args"]["name"].partition("[")[0]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    ends: dict[tuple[Any, str], float] = defaultdict(float)
    for event in events:
        if event["ph"] == "X":
            row = event["pid"], rows.get((event["pid"], event["tid"]), "")
            ends[row] = max(ends[row], (event["ts"] + event["dur"]) / 1e6)
    return dict(ends)


def _curves(events: Sequence[Json], base: float) -> list[Chart]:
    """Return a chart of the queues' lengths, and one of the program's own counters."""
    readings: dict[str, dict[tuple[Any, str], list[tuple[float, float]]]] = {}
    ends = _ends_of_rows(events)
    for event in events:
        if event["ph"] == "C":
            for key, value in event["args"].items():
                curves = readings.setdefault(key, {})
                curve = curves.setdefault((event["pid"], event["name"]), [])
                curve.append((base + event["ts"] / 1e6, float(value)))
    # The last value holds to the end of the row that fills the queue: a change would show there.
    for curves in readings.values():
        for (pid, name), curve in curves.items():
            row = name.removeprefix("queue ").partition("→")[0]
            end = ends.get((pid, row), max(ends.values(), default=0.0))
            curve.append((max(curve[-1][0], base + end), curve[-1][1]))
    return [
        Chart(
            title="Queues" if key == "items" else "Counters",
            unit=key,
            lines=[
                Line(
                    name=name,
                    times=[time for time, _ in curve],
                    values=[value for _, value in curve],
                    colour=number,
                )
                for number, ((_, name), curve) in enumerate(curves.items())
            ],
        )
        for key, curves in readings.items()
    ]
