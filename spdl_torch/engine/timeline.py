"""The timeline of a run: when each thread did what, and what happened at one moment. It is made of
the flight recorder's notes when somebody reads it.

All times are ``time.perf_counter_ns()``; :class:`TwoClocks` ties them to the time of day.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from time import perf_counter_ns, time_ns
from typing import Any, Literal, NamedTuple, Self

Role = Literal["source", "stage", "consumer"]


class Outcome(enum.IntEnum):
    """The outcome of a task."""

    PASSED = 0  # something was passed on
    DROPPED = 1  # the op returned None
    FAILED = 2  # the op raised


class QueueTrack(NamedTuple):
    """The queue after the stage at ``stage_number``; its length is known from the turns."""

    stage_number: int
    name: str
    capacity: int


class Instant(NamedTuple):
    """Something that happened at one moment: a failure, a garbage collection."""

    time_ns: int
    name: str
    details: Mapping[str, Any] = {}


class TwoClocks(NamedTuple):
    """One moment, read on two clocks."""

    perf_ns: int
    system_ns: int
    """Nanoseconds since 1970, ``time.time_ns()``."""

    @classmethod
    def now(cls) -> Self:
        """Read both clocks now."""
        before, system_ns, after = perf_counter_ns(), time_ns(), perf_counter_ns()
        return cls((before + after) // 2, system_ns)

    def system(self, perf_ns: int) -> int:
        """Return the time of day of a moment."""
        return self.system_ns + perf_ns - self.perf_ns


class Turn(NamedTuple):
    """One round of a thread: it waited for an item, worked on it, and waited for room.

    A turn of the consumer: it waited for an item, and worked with it until it asked for the next.
    """

    since_ns: int
    """The end of the turn before, when the wait for an item began."""
    started_ns: int
    """The time at which the item was there."""
    ended_ns: int
    """The time at which the op returned, or raised."""
    done_ns: int
    """The time at which the result was passed on, after the wait for room."""
    cpu_ns: int
    """CPU time of the thread between start and end; -1 = not measured."""
    number: int
    """The item's number: 0 is the first that the stage took; -1 = a source, which takes none."""
    output: int
    """The result's number in the next queue; -1 = unknown."""
    num_before: int
    """Items that waited before the stage when the turn was done; -1 = unknown."""
    num_after: int
    """Items that waited after it then, this result included; -1 = unknown."""
    outcome: Outcome = Outcome.PASSED


class Part(NamedTuple):
    """A named part of a turn's work: ``collate``, or one sample."""

    name: str
    started_ns: int
    ended_ns: int
    cpu_ns: int


class Row(NamedTuple):
    """One thread (of an asynchronous stage: one coroutine), in order of time."""

    stage: str
    stage_number: int
    """The stage's number: 0 is the source; the consumer has the largest."""
    replica: int
    """The thread's number in its stage: ``decode[3]`` has 3."""
    role: Role
    thread_id: int
    """The operating system's id of the thread; 0 = it never ran."""
    turns: tuple[Turn, ...]
    parts: tuple[Part, ...] = ()
    num_lost: int = 0
    """The number of turns and parts that later ones overwrote."""

    @property
    def name(self) -> str:
        """``decode[3]``; the source and the consumer have one thread and no number."""
        return f"{self.stage}[{self.replica}]" if self.role == "stage" else self.stage


class Timeline(NamedTuple):
    """One run of a pipeline or one epoch of a loader."""

    pipeline: str
    """``DataLoader``, ``PipelineDataset`` or ``Pipeline``; several may have one name."""
    pipeline_number: int
    """A number for each pipeline of a process; the same for all epochs of a loader or dataset."""
    clock: TwoClocks
    rows: tuple[Row, ...]
    queues: tuple[QueueTrack, ...] = ()
    instants: tuple[Instant, ...] = ()


def row_since(row: Row, since_ns: int) -> Row:
    """Return the row without everything that ended before ``since_ns``."""

    def is_later(turn: Turn) -> bool:
        # If a loop was left while somebody still holds its iterator, its last step never ends.
        return (turn.started_ns if row.role == "consumer" else turn.done_ns) >= since_ns

    return row._replace(
        turns=tuple(filter(is_later, row.turns)),
        parts=tuple(part for part in row.parts if part.ended_ns >= since_ns),
    )
