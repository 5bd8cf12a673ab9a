"""The flight recorder: what every thread of a run did in the last seconds, kept all the time.

Each thread writes into a ring of its own; reading makes a :class:`Timeline` of them, at any time,
by anyone.

At level ``"batch"`` a turn shorter than 0.1 ms is not recorded: writing one takes 0.3 µs, so this
costs at most 0.3 % of a thread's time, however small the items are.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ..locks import LiveObjects, RLock, SharedCounter, in_forked_child
from ..machine.probes import long_collections
from .failures import text_of
from .rings import ConsumerRing, Ring, read_row
from .timeline import Instant, QueueTrack, Role, Timeline, TwoClocks, row_since

if TYPE_CHECKING:
    from .rings import SharedRing

Level = Literal["batch", "item"]

FAILURE_EVENT = "failure"

_NEVER_NS = 2**63 - 1

_SHORTEST_NS: dict[Level, int] = {"batch": 100_000, "item": 0}

CAPACITY = 8_192  # 0.6 MB a thread once it is full; at 5 ms a turn, the last 40 s
_SESSION_CAPACITY = 65_536

_MOST_INSTANTS = 1_000
_LONGEST_TEXT = 200

_AnyRing = TypeVar("_AnyRing", bound="Ring")


class FlightRecorder:
    """The rings of one run, and its moments of note: failures, garbage collections.

    pipeline: the name that people see: ``DataLoader``.
    number: from :func:`new_pipeline_number`; the same for all epochs of one loader.
    enabled: False = keep nothing, at no cost.
    """

    def __init__(self, pipeline: str, number: int | None = None, *, enabled: bool = True) -> None:
        self.pipeline = pipeline
        self.number = new_pipeline_number() if number is None else number
        self.enabled = enabled
        self._clock = TwoClocks.now()
        self._rows: list[tuple[str, int, int, Role, Ring]] = []
        self.consumer: ConsumerRing | None = None
        """The ring of the consumer, once it has one."""
        self._queues: dict[int, QueueTrack] = {}
        self._instants: list[Instant] = []  # any thread adds, or copies it in one step
        self._complete: Callable[[Timeline], Timeline] | None = None
        with _lock:
            _live.add(self)
            for session in _sessions:
                session.recorders.append(self)

    # Called by the run, on its threads:

    def new_ring(
        self, stage: str, stage_number: int, replica: int = 0, role: Role = "stage"
    ) -> Ring:
        """Return a ring for one thread of a stage."""
        return self._add_row(Ring, stage, stage_number, replica, role)

    def new_consumer_ring(self, stage_number: int) -> ConsumerRing:
        """Return a ring for the consumer."""
        self.consumer = self._add_row(ConsumerRing, "training", stage_number, 0, "consumer")
        return self.consumer

    def add_queue(self, stage_number: int, name: str, capacity: int) -> None:
        """Note the queue after the stage at ``stage_number``; again where it holds more items."""
        self._queues[stage_number] = QueueTrack(stage_number, name, capacity)

    def completed_by(self, complete: Callable[[Timeline], Timeline]) -> None:
        """Note what adds to a timeline the rows of other processes."""
        self._complete = complete

    def failed(
        self, where: str, number: int, error: BaseException, *, key: str | None = None
    ) -> None:
        """Record that an item failed, with the error's text; ``key``: of a sample in the item."""
        text = text_of(error)[:_LONGEST_TEXT]
        about = {} if key is None else {"key": key[:_LONGEST_TEXT]}
        self.note(FAILURE_EVENT, {"stage": where, "item": number, **about, "error": text})

    def note(self, name: str, details: dict[str, Any]) -> None:
        """Record a moment of note, now."""
        if self.enabled:
            self._instants.append(Instant(perf_counter_ns(), name, details))
            del self._instants[:-_MOST_INSTANTS]

    def follow_sessions(self) -> None:
        """Record turns as short as the sessions ask for now."""
        for *_, ring in tuple(self._rows):
            ring.shortest_ns = self._shortest_ns

    # Called by readers, on any thread:

    def timeline(self, since_ns: int = 0) -> Timeline:
        """Return everything recorded that did not end before ``since_ns``."""
        rows = [read_row(*row) for row in tuple(self._rows)]
        instants = (*self._instants.copy(), *_collections_since(self._clock.perf_ns))
        if since_ns:
            rows = [row_since(row, since_ns) for row in rows]
            instants = tuple(instant for instant in instants if instant.time_ns >= since_ns)
        timeline = Timeline(
            self.pipeline,
            self.number,
            self._clock,
            tuple(sorted(rows, key=lambda row: (row.stage_number, row.replica))),
            tuple(sorted(self._queues.values())),
            instants,
        )
        return timeline if self._complete is None else self._complete(timeline)

    def _add_row(
        self, kind: type[_AnyRing], stage: str, stage_number: int, replica: int, role: Role
    ) -> _AnyRing:
        # Even with recording off there is a ring, so that no writer has to check.
        capacity = _SESSION_CAPACITY if _sessions else CAPACITY
        ring = kind(capacity if self.enabled else 1, self._shortest_ns)
        # No lock: readers on other threads copy the list in one step.
        self._rows.append((stage, stage_number, replica, role, ring))
        return ring

    @property
    def _shortest_ns(self) -> int:
        if not self.enabled:
            return _NEVER_NS
        return min([_SHORTEST_NS["batch"], *(each.shortest_ns for each in _sessions.copy())])


class SharedRecorder(FlightRecorder):
    """The recorder of an epoch in a worker process, whose one ring another process reads."""

    def __init__(self, ring: SharedRing, epoch: int, *, enabled: bool) -> None:
        super().__init__("DataLoader", 0, enabled=enabled)
        self._ring = ring
        ring.clear(epoch, self._shortest_ns)

    def new_ring(self, *_: object) -> Ring:
        """Return the ring, for the only thread of the only stage."""
        return self._ring


_live: LiveObjects[FlightRecorder] = LiveObjects()
_sessions: list[RecordingSession] = []
# Guards these two. Re-entrant: a garbage collection on a thread that holds it may run a finalizer
# that takes it too.
_lock = RLock()
_numbers = SharedCounter(1)


def new_pipeline_number() -> int:
    """Return 1, 2, 3, ...: a number for each pipeline of this process."""
    return next(_numbers)


def live_recorders() -> list[FlightRecorder]:
    """Return the recorders of all runs that somebody still holds."""
    with _lock:
        return sorted(_live.now(), key=lambda recorder: recorder.number)


def _collections_since(begin_ns: int) -> list[Instant]:
    # The latest first, and only those asked for: in a long process there are many.
    latest = takewhile(lambda each: each.ended_ns >= begin_ns, reversed(long_collections()))
    instants = [
        Instant(began, "gc", {"generation": info["generation"], "seconds": (ended - began) / 1e9})
        for began, ended, info in latest
    ]
    return instants[::-1]


class RecordingSession:
    """Record everything at ``level`` until ``end()``, in longer rings, and keep it when its run is
    gone. Rings that exist already keep their length.
    """

    def __init__(self, level: Level) -> None:
        self.shortest_ns = _SHORTEST_NS[level]
        self.began_ns = perf_counter_ns()
        with _lock:
            self.recorders = live_recorders()
            _sessions.append(self)
            _follow_sessions()

    def end(self) -> list[FlightRecorder]:
        """Restore the other sessions' level; return the recorders of all runs since the start."""
        with _lock:
            _sessions.remove(self)
            _follow_sessions()
        return self.recorders


def _follow_sessions() -> None:
    for recorder in live_recorders():
        recorder.follow_sessions()


@in_forked_child
def _forget_parent() -> None:
    """Start anew in a forked child, which has the parent's recorders and none of its threads."""
    global _lock
    _lock = RLock()
    _live.clear()
    _sessions.clear()
