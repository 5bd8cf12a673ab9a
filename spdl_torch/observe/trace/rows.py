"""The rows of one process in a trace: slices, counters and instants, from turns; and the arrows
between slices: the path of an item from its first stage to the training step.

The details follow from how the viewers read them:

- Perfetto drops slices of one row that overlap, and cuts what it reads down to whole nanoseconds.
  All times are multiples of 1/8 us, which floating point numbers hold exactly.
- It names threads by their id alone: ids of rows are unique in the file, and are neither ids of
  the operating system nor ids of processes.
- Each key of a counter's ``args`` becomes a track. Colours (``cname``) are ignored, except by
  chrome://tracing, where waits are gray.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...engine.moments import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ...engine.moments import QueueTrack, TwoClocks
    from ...engine.timeline import Part, Row, Timeline, Turn

_SHORTEST_WAIT_NS = 1000
_QUANTUM_NS = 125

WAIT_IN, PROCESS, STEP = "Wait on Input Queue", "Process", "Training Step"
WAIT_OUT = "Wait on Output Queue"

Event = dict[str, Any]

_MOST_FLOWS = 200  # arrows in a trace
FLOWS_PER_PROCESS = 2**20
"""An id is the process id times this plus a number: unique in a merged file too."""

Stop = tuple["Turn", Event]
"""A turn and its ``Process`` slice."""


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


def num_slices(turn: Turn) -> int:
    """Return how many slices show a turn, without its parts."""
    return (
        1
        + (turn.started_ns - turn.since_ns >= _SHORTEST_WAIT_NS)
        + (turn.done_ns - turn.ended_ns >= _SHORTEST_WAIT_NS)
    )


@dataclass
class Placed:
    """The slices of one timeline, by the number of their stage."""

    pid: int
    stage_numbers: Sequence[int]
    """The numbers of all stages, in order, with or without slices."""
    stops: dict[int, list[Stop]] = field(default_factory=dict)

    def add(self, stage_number: int, turn: Turn, event: Event) -> None:
        """Add a turn and the slice that shows its work."""
        self.stops.setdefault(stage_number, []).append((turn, event))

    def ways(self) -> Iterator[list[Stop]]:
        """Yield the paths of items, each over at least two stops; no stop lies on two of them.

        Where several items became one, as samples become a batch, the path is that of the last one,
        for which the others waited.
        """
        came_from: dict[int, Stop] = {}  # by the id() of the slice after it
        goes_on: set[int] = set()
        by_number = {
            stage_number: {stop[0].number: stop for stop in here if stop[0].number >= 0}
            for stage_number, here in self.stops.items()
        }
        for stage_number, next_number in itertools.pairwise(self.stage_numbers):
            for stop in self.stops.get(stage_number, []):
                after = by_number.get(next_number, {}).get(stop[0].output)
                if after is None or stop[0].ended_ns > after[0].started_ns:
                    continue
                goes_on.add(id(stop[1]))
                known = came_from.get(id(after[1]))
                if known is None or known[0].ended_ns < stop[0].ended_ns:
                    came_from[id(after[1])] = stop
        for here in self.stops.values():
            for stop in here:
                if id(stop[1]) not in goes_on and id(stop[1]) in came_from:
                    yield list(_back(stop, came_from))[::-1]


@dataclass
class ProcessRows:
    """The rows of one pipeline, built from timelines that are added in order of time; or those of
    the program's own spans."""

    pid: int
    clock: TwoClocks
    base: int
    cutoff: float
    free_tids: Iterator[int]
    events: list[Event] = field(default_factory=list)
    num_left_out: int = 0
    _rows: dict[tuple[Any, ...], tuple[str, int]] = field(default_factory=dict)
    """Name and tid of each row, by its place in the order."""
    _lanes: dict[object, list[list[int]]] = field(default_factory=dict)
    """The rows of each name: the ends of those slices that the next one may lie in."""

    def add(self, timeline: Timeline) -> Placed:
        """Add the events of a timeline; return the slices that arrows can link."""
        stage_numbers = {row.stage_number for row in timeline.rows}
        stage_numbers |= {queue.stage_number for queue in timeline.queues}
        placed = Placed(self.pid, sorted(stage_numbers))
        for row in timeline.rows:
            turns = [turn for turn in row.turns if turn.done_ns > self.cutoff]
            self.num_left_out += sum(map(num_slices, row.turns)) - sum(map(num_slices, turns))
            self.num_left_out += len(row.parts)
            if turns:
                place = row.stage_number, row.stage, row.replica, row.name
                tid = self.row_of(place, row.name, turns[0].since_ns, turns[-1].done_ns)
                for turn, slices in self._slices_of_row(row, turns):
                    events = [self.slice(tid, row.role, *content) for content in slices]
                    self.events += events
                    for process in events[:2]:
                        if process["name"] in (PROCESS, STEP):
                            placed.add(row.stage_number, turn, process)
        for track, name in _named(timeline):
            self._add_lengths(track, name, timeline)
        kept = [instant for instant in timeline.instants if instant.time_ns > self.cutoff]
        self.num_left_out += len(timeline.instants) - len(kept)
        for instant in kept:
            details = {str(key): _plain(value) for key, value in instant.details.items()}
            self.add_instant(instant.name, instant.time_ns, details)
        return placed

    def header(self, title: str, sort_index: int | None = None) -> list[Event]:
        """Return the events that name the process and its rows, and order them: None = as they
        are."""
        facts: list[tuple[str, int, Event]] = [("process_name", 0, {"name": title})]
        if sort_index is not None:
            facts.append(("process_sort_index", 0, {"sort_index": sort_index}))
        rows = [*self._rows.items()] if sort_index is None else sorted(self._rows.items())
        for index, (_, (name, tid)) in enumerate(rows):
            facts.append(("thread_name", tid, {"name": name}))
            if sort_index is not None:
                facts.append(("thread_sort_index", tid, {"sort_index": index}))
        _, first_tid = next(iter(self._rows.values()), ("", self.pid))
        return [
            {"ph": "M", "name": name, "pid": self.pid, "tid": tid or first_tid, "args": args}
            for name, tid, args in facts
        ]

    def row_of(
        self, place: tuple[Any, ...], name: str, start: int, end: int, *, nests: bool = False
    ) -> int:
        """Take the first row of this name that is free at ``start``, until ``end``; return its tid.
        ``nests``: within a slice that lasts longer it is free, too."""
        lane = self._lane(place, start, end, nests)
        key = (*place, lane)
        if key not in self._rows:
            shown = name if lane == 0 else f"{name} ({lane + 1})"
            self._rows[key] = shown, next(self.free_tids)
        return self._rows[key][1]

    def _lane(self, key: object, start: int, end: int, nests: bool = False) -> int:
        lanes = self._lanes.setdefault(key, [])
        for number in itertools.count():
            if number == len(lanes):
                lanes.append([])
            open_ends = lanes[number]
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            if not open_ends or (nests and end <= open_ends[-1]):
                open_ends.append(end)
                return number
        raise AssertionError("guaranteed: an empty one takes any slice")

    def _time(self, perf_ns: int) -> float:
        return microseconds(self.clock.system(perf_ns) - self.base)

    def _slices_of_row(
        self, row: Row, turns: Sequence[Turn]
    ) -> Iterator[tuple[Turn, list[tuple[str, int, int, int, Event]]]]:
        """Return the slices of each turn: name, start, end, CPU time (-1 = unknown), args."""
        parts, at = [part for part in row.parts if part.ended_ns > self.cutoff], 0
        parts.sort(key=lambda part: (part.started_ns, -part.ended_ns))
        word = "batch" if row.role == "consumer" else "item"
        for turn in turns:
            number = turn.number if turn.number >= 0 else turn.output
            args: Event = {word: number} if number >= 0 else {}
            about = {**args, "thread id": row.thread_id} if row.thread_id else dict(args)
            if turn.outcome is not Outcome.PASSED:
                about["outcome"] = turn.outcome.name.lower()
            name = STEP if row.role == "consumer" else PROCESS
            slices = [(name, turn.started_ns, turn.ended_ns, turn.cpu_ns, about)]
            if _only_waits(row, turn):
                slices = []
            if turn.started_ns - turn.since_ns >= _SHORTEST_WAIT_NS:
                slices.insert(0, (WAIT_IN, turn.since_ns, turn.started_ns, -1, args))
            # A consumer that loads on its own thread is working while it waits.
            begin = turn.since_ns if row.role == "consumer" else turn.started_ns
            at = bisect_right(parts, begin - 1, lo=at, key=lambda p: p.started_ns)
            for part in _inside(parts, at, turn):
                self.num_left_out -= 1
                slices.append((part.name, part.started_ns, part.ended_ns, part.cpu_ns, args))
            if turn.done_ns - turn.ended_ns >= _SHORTEST_WAIT_NS:
                slices.append((WAIT_OUT, turn.ended_ns, turn.done_ns, -1, args))
            yield turn, slices

    def slice(
        self, tid: int, role: str, name: str, start: int, end: int, cpu_ns: int, args: Event
    ) -> Event:
        """Return a slice; ``cpu_ns``: -1 = unknown."""
        ts = self._time(start)
        event = {"ph": "X", "name": name, "cat": role, "pid": self.pid, "tid": tid, "ts": ts}
        event["dur"] = self._time(end) - ts
        if name in (WAIT_IN, WAIT_OUT):
            event["cname"] = "grey"
        if cpu_ns >= 0:
            event["tdur"] = microseconds(cpu_ns)
        if args:
            event["args"] = args
        return event

    def _add_lengths(self, track: QueueTrack, name: str, timeline: Timeline) -> None:
        """Add the length of a queue at each reading at which it had changed."""
        readings = sorted(_readings(track, timeline, self.cutoff))
        if not readings:
            return
        lane = self._lane(name, readings[0][0], readings[-1][0])
        name = name if lane == 0 else f"{name} ({lane + 1})"
        last = None
        for time_ns, length in readings:
            if length != last:
                self.add_count(name, time_ns, {"items": length})
                last = length

    def add_count(self, name: str, time_ns: int, values: Event) -> None:
        """Add the values of a counter from then on."""
        event: Event = {"ph": "C", "name": name, "pid": self.pid, "tid": self.pid}
        self.events.append({**event, "ts": self._time(time_ns), "args": values})

    def add_instant(
        self, name: str, time_ns: int, details: Event, category: str = "instant"
    ) -> None:
        """Add what happened at a moment."""
        event: Event = {"ph": "i", "name": name, "cat": category, "s": "p"}
        event |= {"pid": self.pid, "tid": self.pid, "ts": self._time(time_ns), "args": details}
        self.events.append(event)


def _only_waits(row: Row, turn: Turn) -> bool:
    """Return whether the consumer was waiting when it was read: there is no item yet."""
    return row.role == "consumer" and turn.number < 0 and turn.started_ns == turn.ended_ns


def _named(timeline: Timeline) -> Iterator[tuple[QueueTrack, str]]:
    """Return the queues with distinct names: ``queue decode→collate (cap 4)``."""
    stages = {row.stage_number: row.stage for row in timeline.rows}
    seen: set[str] = set()
    for track in timeline.queues:
        following = min((p for p in stages if p > track.stage_number), default=None)
        name = track.name
        if following is not None and track.stage_number in stages:
            name = f"{stages[track.stage_number]}→{stages[following]}"
        if name in seen:
            name = f"{name} {track.stage_number}"
        seen.add(name)
        yield track, f"queue {name} (cap {track.capacity})"


def _inside(parts: Sequence[Part], at: int, turn: Turn) -> Iterator[Part]:
    """Yield the parts of a turn, except those that overlap the slice of the turn or of another part
    without nesting: such a file could not be shown.
    """
    enclosing: list[int] = [turn.ended_ns, turn.started_ns]
    while at < len(parts) and parts[at].started_ns < turn.ended_ns:
        part = parts[at]
        while enclosing[-1] <= part.started_ns:
            enclosing.pop()
        if part.started_ns <= part.ended_ns <= enclosing[-1]:
            enclosing.append(part.ended_ns)
            yield part
        at += 1


def _readings(track: QueueTrack, timeline: Timeline, cutoff: float) -> Iterator[tuple[int, int]]:
    """Return the moments at which a queue was read, and its length."""
    queues = {q.stage_number for q in timeline.queues}
    for row in timeline.rows:
        before = max((p for p in queues if p < row.stage_number), default=None)
        for turn in row.turns:
            if turn.done_ns <= cutoff:
                continue
            if row.stage_number == track.stage_number and turn.num_after >= 0:
                yield turn.done_ns, turn.num_after
            if before == track.stage_number and turn.num_before >= 0:
                yield turn.done_ns, turn.num_before


def _plain(value: Any) -> Any:
    """Return the value if strict JSON has it, otherwise its text."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    # Not every text can be written to a file: names of files may be any bytes.
    return str(value).encode("utf-8", "replace").decode("utf-8")


def _back(stop: Stop | None, came_from: Mapping[int, Stop]) -> Iterator[Stop]:
    while stop is not None:
        yield stop
        stop = came_from.get(id(stop[1]))


def add_flows(timelines: Iterable[Placed]) -> None:
    """Mark the slices of every k-th item, so that there are no more than ``_MOST_FLOWS``.

    Where any item reached the consumer, only such items count, and those that a stage dropped or
    failed on: the others only seem to end there, since their next turn was too short to record.
    """
    ways = [(placed.pid, way) for placed in timelines for way in placed.ways()]
    if any(_is_step(way[-1]) for _, way in ways):
        ways = [pair for pair in ways if _is_step(pair[1][-1]) or pair[1][-1][0].outcome]
    ways.sort(key=lambda pair: pair[1][-1][1]["ts"])
    every = -(-len(ways) // _MOST_FLOWS) or 1
    for number, (pid, way) in enumerate(ways[::every]):
        bind_id = f"{pid * FLOWS_PER_PROCESS + number:#x}"
        for place, (_, event) in enumerate(way):
            event["bind_id"] = bind_id
            if place > 0:
                event["flow_in"] = True
            if place < len(way) - 1:
                event["flow_out"] = True


def _is_step(stop: Stop) -> bool:
    return bool(stop[1]["cat"] == "consumer")
