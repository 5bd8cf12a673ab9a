"""A trace in Chrome's format: what every thread of a process did, as rows of slices, with curves of
the queues, and arrows that show the path of an item from its first stage to the training step.

The details follow from how the viewers read them:

- Perfetto drops slices of one row that overlap, and cuts what it reads down to whole nanoseconds.
  All times are multiples of 1/8 us, which floating point numbers hold exactly.
- It names threads by their id alone: ids of rows are unique in the file, and are neither ids of
  the operating system nor ids of processes. All ids are drawn from one counter.
- Each key of a counter's ``args`` becomes a track. Colours (``cname``) are ignored, except by
  chrome://tracing, where waits are gray.
"""

from __future__ import annotations

import itertools
import math
import socket
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ...engine.timeline import Outcome, TwoClocks

if TYPE_CHECKING:
    from ...engine.timeline import Row, Timeline, Turn

OURS: Final = "spdlTorch"
"""The key of the part of a trace that only we read."""

FIRST_ID: Final = 2**30
"""Above every process id: Linux has at most 2**22."""

WAIT_IN, PROCESS, STEP = "Wait on Input Queue", "Process", "Training Step"
WAIT_OUT = "Wait on Output Queue"

_SHORTEST_WAIT_NS = 1000
_QUANTUM_NS = 125
_MOST_FLOWS = 200  # arrows in a trace
_PROCESSES_PER_RANK = 256  # those of a rank are shown together, if it has no more

Event = dict[str, Any]


class Span(NamedTuple):
    """A named span of a thread's time, by ``time.perf_counter_ns()``."""

    name: str
    thread: str
    """The name of the thread."""
    thread_id: int
    """The operating system's id of the thread."""
    started_ns: int
    ended_ns: int
    cpu_ns: int
    """The thread's CPU time in the span; -1 = not known."""


class Count(NamedTuple):
    """A counter's value from a moment on."""

    name: str
    time_ns: int
    value: float


@dataclass(frozen=True, slots=True)
class Program:
    """The events that a program added to a trace, and its name there."""

    name: str | None = None
    spans: tuple[Span, ...] = ()
    counts: tuple[Count, ...] = ()

    def __len__(self) -> int:
        return len(self.spans) + len(self.counts)


class Stop(NamedTuple):
    """A stop of an item on its way through the stages: a turn, and the slice of its work."""

    turn: Turn
    slice: Event


def microseconds(nanoseconds: int) -> float:
    """Return a time in a trace, rounded to 1/8 us. Beyond 35 years, as in traces of old releases of
    torch, which count from 1970, floating point numbers allow only 1/4 us.
    """
    quantum = _QUANTUM_NS if abs(nanoseconds) < 2**53 * _QUANTUM_NS else 2 * _QUANTUM_NS
    return (nanoseconds + quantum // 2) // quantum * quantum / 1000


def nanoseconds(microseconds: float) -> int:
    """Return the inverse, exact for the times that we write."""
    whole = math.floor(microseconds)
    return int(whole) * 1000 + round((microseconds - whole) * 1000)


def chrome_trace(
    timelines: Sequence[Timeline],
    program: Program | None = None,
    *,
    rank: int,
    last_seconds: float | None = None,
    max_events: int = 200_000,
) -> dict[str, Any]:
    """Return a trace as :meth:`Profile.write_trace` writes it; ``timelines``: of one process."""
    program, timelines = program or Program(), sorted(timelines, key=_start_of)
    cutoff, num_left_out = _cutoff(timelines, program, last_seconds, max_events)
    timelines = [_since(each, cutoff) for each in timelines]
    counts = [count for count in program.counts if count.time_ns > cutoff]
    spans = [span for span in program.spans if span.ended_ns > cutoff]

    ids = itertools.count(FIRST_ID)
    title = f"{program.name or 'Data pipeline'} · rank {rank}"
    pipelines = {each.pipeline_number: each.pipeline for each in timelines}
    processes = {
        number: _Process(ids, f"{title} · {name} {number}" if len(pipelines) > 1 else title)
        for number, name in sorted(pipelines.items())
    }
    ways: list[list[Stop]] = []
    for timeline in timelines:
        ways += processes[timeline.pipeline_number].add(timeline)
    _add_flows(ways, ids)
    shown = [*processes.values()]
    if spans or counts:
        shown.append(_Process(ids, f"{program.name or 'Program'} · rank {rank}"))
        shown[-1].add_program(spans, counts)

    events = [event for each in shown for event in each.events]
    # One clock for all: two readings differ at least by the time that they take.
    clocks = [each.clock for each in timelines] or [TwoClocks.now()]
    base = _count_from_base(events, max(clocks, key=attrgetter("perf_ns")))
    events.sort(key=itemgetter("ts"))  # stable: an enclosing slice stays before those inside it
    heads = []
    for index, process in enumerate(shown):  # above the processes of others
        heads += process.header(rank * _PROCESSES_PER_RANK + index - FIRST_ID)
    profile = {
        "rank": rank,
        "host": socket.gethostname(),
        "pids": [each.pid for each in shown],
        "num_lost": sum(row.num_lost for each in timelines for row in each.rows),
        "num_left_out": num_left_out,
    }
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base,
        OURS: {"formatVersion": 1, "profiles": [profile]},
        "traceEvents": heads + events,
    }


# --- which events: the latest --------------------------------------------------------------------


def _start_of(timeline: Timeline) -> int:
    return min((row.turns[0].since_ns for row in timeline.rows if row.turns), default=0)


def _cutoff(
    timelines: Sequence[Timeline], program: Program, last_seconds: float | None, max_events: int
) -> tuple[float, int]:
    """Return the time before which events are left out, by ``last_seconds`` and ``max_events``, and
    their number."""
    ends = [(span.ended_ns, 1, 0) for span in program.spans]
    ends += [(count.time_ns, 1, 0) for count in program.counts]
    for timeline in timelines:
        ends += [(instant.time_ns, 1, 0) for instant in timeline.instants]
        for row in timeline.rows:
            # Its slices, and a reading of the queues on both sides.
            ends += [(turn.done_ns, _num_slices(turn), 2) for turn in row.turns]
            ends += [(part.ended_ns, 1, 0) for part in row.parts]
    ends.sort(reverse=True)
    cutoff = -math.inf
    if ends and last_seconds is not None:
        cutoff = ends[0][0] - last_seconds * 1e9
    for end, num_slices, num_readings in ends:
        max_events -= num_slices + num_readings
        if max_events < 0:
            cutoff = max(cutoff, end)
            break
    return cutoff, sum(number for end, number, _ in ends if end <= cutoff)


def _since(timeline: Timeline, cutoff: float) -> Timeline:
    """Return the timeline without what had ended by then."""
    rows = []
    for row in timeline.rows:
        turns = tuple(turn for turn in row.turns if turn.done_ns > cutoff)
        parts = tuple(part for part in row.parts if part.ended_ns > cutoff)
        rows.append(row._replace(turns=turns, parts=parts))
    instants = tuple(instant for instant in timeline.instants if instant.time_ns > cutoff)
    return timeline._replace(rows=tuple(rows), instants=instants)


def _num_slices(turn: Turn) -> int:
    """Return how many slices show a turn, without its parts."""
    wait_in_ns, wait_out_ns = turn.started_ns - turn.since_ns, turn.done_ns - turn.ended_ns
    return 1 + (wait_in_ns >= _SHORTEST_WAIT_NS) + (wait_out_ns >= _SHORTEST_WAIT_NS)


def _count_from_base(events: Iterable[Event], clock: TwoClocks) -> int:
    """Turn starts and ends by ``time.perf_counter_ns()`` into starts and durations in a trace;
    return the moment from which it counts, the full second before the first event."""
    first = min((event["ts"] for event in events), default=clock.perf_ns)
    base = clock.system(min(first, clock.perf_ns)) // 1_000_000_000 * 1_000_000_000
    for event in events:
        event["ts"] = microseconds(clock.system(event["ts"]) - base)
        if "dur" in event:
            event["dur"] = microseconds(clock.system(event["dur"]) - base) - event["ts"]
    return base


# --- rows ----------------------------------------------------------------------------------------


@dataclass
class _Process:
    """What the viewer shows as a process: the rows of one pipeline, whose timelines are added in
    order of time, or those of the program's own spans. ``ts`` and ``dur`` of the events are start
    and end by ``time.perf_counter_ns()``.
    """

    ids: Iterator[int]
    title: str
    events: list[Event] = field(default_factory=list)
    _rows: dict[tuple[Any, ...], tuple[str, int]] = field(default_factory=dict)
    """Name and tid of each row, by its place in the order."""
    _lanes: dict[tuple[Any, ...], list[list[int]]] = field(default_factory=dict)
    """What goes by each name at the same time: the ends in which the next slice may lie."""

    def __post_init__(self) -> None:
        self.pid = next(self.ids)

    def add(self, timeline: Timeline) -> Iterable[list[Stop]]:
        """Add a timeline; return the ways of items."""
        numbers = {row.stage_number for row in timeline.rows}
        numbers |= {queue.stage_number for queue in timeline.queues}
        stops: dict[int, list[Stop]] = {number: [] for number in sorted(numbers)}
        for row in timeline.rows:
            stops[row.stage_number] += self._add_turns(row)
        self._add_lengths(timeline)
        for instant in timeline.instants:
            # JSON has neither NaN nor infinity.
            details = {
                key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in instant.details.items()
            }
            about = {"cat": "instant", "s": "p", "args": details}
            self._add("i", instant.name, self.pid, ts=instant.time_ns, **about)
        return _ways(stops)

    def add_program(self, spans: Iterable[Span], counts: Iterable[Count]) -> None:
        """Add spans, each on a row of its thread, and counters. A thread whose spans overlap
        without nesting, as those of coroutines may, has several rows."""
        for span in sorted(spans, key=lambda each: (each.started_ns, -each.ended_ns)):
            place = span.thread_id, span.thread
            tid = self._row_of(place, span.started_ns, span.ended_ns, nests=True)
            self._add_slice(tid, "program", span.name, *span[3:], {})
        for count in counts:
            self._add_count(count.name, count.time_ns, value=count.value)

    def header(self, sort_index: int) -> list[Event]:
        """Return the events that name the process and its rows, and order them."""
        rows = [row for _, row in sorted(self._rows.items())]
        first = rows[0][1] if rows else self.pid
        facts: list[tuple[str, int, Event]] = [("process_name", first, {"name": self.title})]
        facts += [("process_sort_index", first, {"sort_index": sort_index})]
        facts += [("thread_name", tid, {"name": name}) for name, tid in rows]
        facts += [("thread_sort_index", tid, {"sort_index": n}) for n, (_, tid) in enumerate(rows)]
        return [
            {"ph": "M", "name": name, "pid": self.pid, "tid": tid, "args": args}
            for name, tid, args in facts
        ]

    def _lane(self, place: tuple[Any, ...], start: int, end: int, nests: bool = False) -> int:
        """Take the first lane of what is shown there that is free at ``start``, until ``end``.
        ``nests``: within a slice that lasts longer it is free, too."""
        lanes = self._lanes.setdefault(place, [])
        for number, ends in enumerate(lanes):
            while ends and ends[-1] <= start:
                ends.pop()
            if not ends or (nests and end <= ends[-1]):
                ends.append(end)
                return number
        lanes.append([end])
        return len(lanes) - 1

    def _row_of(self, place: tuple[Any, ...], start: int, end: int, *, nests: bool = False) -> int:
        """Return the tid of a row with a free lane; the last of ``place`` is its name."""
        lane = self._lane(place, start, end, nests)
        if (*place, lane) not in self._rows:
            self._rows[*place, lane] = _numbered(place[-1], lane), next(self.ids)
        return self._rows[*place, lane][1]

    def _add_turns(self, row: Row) -> Iterator[Stop]:
        """Add the slices of each turn, and those of its parts; yield where an item stopped. The
        parts of a turn that was overwritten are left out."""
        if not row.turns:
            return
        is_consumer = row.role == "consumer"
        parts = deque(sorted(row.parts, key=lambda part: (part.started_ns, -part.ended_ns)))
        place = row.stage_number, row.stage, row.replica, row.name
        tid = self._row_of(place, row.turns[0].since_ns, row.turns[-1].done_ns)
        for turn in row.turns:
            number = turn.number if turn.number >= 0 else turn.output
            args: Event = {"batch" if is_consumer else "item": number} if number >= 0 else {}
            about = {**args, "thread id": row.thread_id} if row.thread_id else dict(args)
            if turn.outcome is not Outcome.PASSED:
                about["outcome"] = turn.outcome.name.lower()
            if turn.started_ns - turn.since_ns >= _SHORTEST_WAIT_NS:
                self._add_slice(tid, row.role, WAIT_IN, turn.since_ns, turn.started_ns, -1, args)
            # A consumer that was waiting when it was read has no item yet.
            if not (is_consumer and turn.number < 0 and turn.started_ns == turn.ended_ns):
                name, times = STEP if is_consumer else PROCESS, (turn.started_ns, turn.ended_ns)
                yield Stop(turn, self._add_slice(tid, row.role, name, *times, turn.cpu_ns, about))
            # A consumer that loads on its own thread is working while it waits.
            begin = turn.since_ns if is_consumer else turn.started_ns
            while parts and parts[0].started_ns < turn.ended_ns:
                part = parts.popleft()
                if part.started_ns >= begin:
                    self._add_slice(tid, row.role, *part, args)
            if turn.done_ns - turn.ended_ns >= _SHORTEST_WAIT_NS:
                self._add_slice(tid, row.role, WAIT_OUT, turn.ended_ns, turn.done_ns, -1, args)

    def _add_slice(
        self, tid: int, role: str, name: str, start: int, end: int, cpu_ns: int, args: Event
    ) -> Event:
        """Add a slice; ``cpu_ns``: -1 = unknown."""
        event = self._add("X", name, tid, cat=role, ts=start, dur=end)
        if name in (WAIT_IN, WAIT_OUT):
            event["cname"] = "grey"
        if cpu_ns >= 0:
            event["tdur"] = microseconds(cpu_ns)
        if args:
            event["args"] = args
        return event

    def _add_lengths(self, timeline: Timeline) -> None:
        """Add the length of each queue, ``queue decode (cap 4)``, at each reading at which it had
        changed."""
        for track in timeline.queues:
            here = track.stage_number
            queues_after = (each.stage_number for each in timeline.queues)
            last = min((number for number in queues_after if number > here), default=math.inf)
            readings = sorted(
                (turn.done_ns, length)
                for row in timeline.rows
                for turn in row.turns
                for length, is_read in (
                    (turn.num_after, row.stage_number == here),
                    (turn.num_before, here < row.stage_number <= last),
                )
                if is_read and length >= 0
            )
            if readings:
                name = f"queue {track.name} (cap {track.capacity})"
                name = _numbered(name, self._lane((name,), readings[0][0], readings[-1][0]))
            for (_, before), (time_ns, length) in itertools.pairwise([(0, -1), *readings]):
                if length != before:
                    self._add_count(name, time_ns, items=length)

    def _add_count(self, name: str, time_ns: int, **value: float) -> None:
        self._add("C", name, self.pid, ts=time_ns, args=value)

    def _add(self, phase: str, name: str, tid: int, **content: Any) -> Event:
        self.events.append({"ph": phase, "name": name, "pid": self.pid, "tid": tid, **content})
        return self.events[-1]


def _numbered(name: str, lane: int) -> str:
    return name if lane == 0 else f"{name} ({lane + 1})"


# --- arrows --------------------------------------------------------------------------------------


def _ways(stops: dict[int, list[Stop]]) -> Iterable[list[Stop]]:
    """Return the ways of items, each over at least two stops, none of which lies on two of them.
    ``stops``: by the numbers of all stages, in order.

    Where several items became one, as samples become a batch, the way is that of the last one, for
    which the others waited.
    """
    ways: dict[int, list[Stop]] = {}  # by the id() of the slice at which it ends so far
    for here, there in itertools.pairwise(stops):
        by_number = {stop.turn.number: stop for stop in stops[there] if stop.turn.number >= 0}
        for stop in stops[here]:
            after = by_number.get(stop.turn.output)
            if after is None or stop.turn.ended_ns > after.turn.started_ns:
                continue
            way = [*ways.pop(id(stop.slice), [stop]), after]
            known = ways.setdefault(id(after.slice), way)
            if known[-2].turn.ended_ns < stop.turn.ended_ns:
                ways[id(after.slice)] = way
    return ways.values()


def _add_flows(ways: list[list[Stop]], ids: Iterator[int]) -> None:
    """Mark the slices of every k-th item, so that there are no more than ``_MOST_FLOWS``.

    Where any item reached the consumer, only such items count, and those that a stage dropped or
    failed on: the others only seem to end there, since their next turn was too short to record.
    """
    ends = {way[-1].slice["cat"] for way in ways}
    if "consumer" in ends:
        ways = [way for way in ways if way[-1].slice["cat"] == "consumer" or way[-1].turn.outcome]
    ways.sort(key=lambda way: way[-1].slice["ts"])
    for way in ways[:: -(-len(ways) // _MOST_FLOWS) or 1]:
        bind_id = f"{next(ids):#x}"
        for stop in way:
            stop.slice.update(bind_id=bind_id, flow_in=True, flow_out=True)
        del way[0].slice["flow_in"], way[-1].slice["flow_out"]
