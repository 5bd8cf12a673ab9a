"""What a run's threads did when: the finished form of what the flight recorder keeps.

All times are ``time.perf_counter_ns()``; :class:`Clock` ties them to the time of day.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from time import perf_counter_ns, time_ns
from typing import Any, Literal, Self

__all__ = ["Clock", "Instant", "Outcome", "Part", "QueueTrack", "Row", "Timeline", "Turn"]

Role = Literal["source", "stage", "sink", "consumer"]


class Outcome(enum.IntEnum):
    """What became of an item."""

    PASSED = 0  # something was passed on
    DROPPED = 1  # the op returned None
    FAILED = 2  # the op raised


@dataclass(frozen=True, slots=True)
class Turn:
    """One round of a thread: it waited for an item, worked on it, and waited for room behind it.

    Of the consumer: it waited for an item, and worked with it until it asked for the next.
    """

    since_ns: int
    """The round before had ended: here the wait for an item began."""
    started_ns: int
    """The item was there."""
    ended_ns: int
    """The op returned, or raised."""
    done_ns: int
    """The result was passed on: until here lasted the wait for room."""
    cpu_ns: int
    """CPU time of the thread between start and end; -1 = not measured."""
    number: int
    """Which item: 0 is the first that the stage took; -1 = a source, which takes none."""
    output: int
    """The number that the result has where it goes, if that is known; -1 otherwise."""
    num_before: int
    """Items that waited in front of the stage when the turn was done; -1 = unknown."""
    num_behind: int
    """Items that waited behind it then, this result included; -1 = unknown."""
    outcome: Outcome = Outcome.PASSED


@dataclass(frozen=True, slots=True)
class Part:
    """Something inside of a turn's work that has a name: ``collate``, or one sample."""

    name: str
    started_ns: int
    ended_ns: int
    cpu_ns: int


@dataclass(frozen=True, slots=True)
class Row:
    """One thread (of an asynchronous stage: one coroutine), in order of time."""

    stage: str
    position: int
    """Of the stage: 0 is the source; the consumer has the largest."""
    replica: int
    """Which of the stage's threads: ``decode[3]`` has 3."""
    role: Role
    thread_id: int
    """The operating system's; 0 = it never ran."""
    turns: tuple[Turn, ...]
    parts: tuple[Part, ...] = ()
    num_lost: int = 0
    """Turns and parts that were overwritten by later ones."""

    @property
    def name(self) -> str:
        """``decode[3]``; the source, the sink and the consumer have one thread and no number."""
        return f"{self.stage}[{self.replica}]" if self.role == "stage" else self.stage


@dataclass(frozen=True, slots=True)
class QueueTrack:
    """A queue whose length the turns tell: it lies behind the stage at ``position``."""

    position: int
    name: str
    capacity: int


@dataclass(frozen=True, slots=True)
class Instant:
    """Something that happened at one moment: a failure, a garbage collection."""

    time_ns: int
    name: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Clock:
    """One moment on two clocks."""

    perf_ns: int
    system_ns: int
    """Since 1970, ``time.time_ns()``."""

    @classmethod
    def now(cls) -> Self:
        """Read both."""
        before, system_ns, after = perf_counter_ns(), time_ns(), perf_counter_ns()
        return cls((before + after) // 2, system_ns)

    def system(self, perf_ns: int) -> int:
        """The time of day of a moment."""
        return self.system_ns + perf_ns - self.perf_ns


@dataclass(frozen=True, slots=True)
class Timeline:
    """One run of a pipeline or one epoch of a loader."""

    pipeline: str
    """What ran: ``DataLoader``, ``PipelineDataset``, ``Pipeline``; several may have one name."""
    pipeline_number: int
    """Tells pipelines of a process apart; the same for every epoch of one loader or dataset."""
    clock: Clock
    rows: tuple[Row, ...]
    queues: tuple[QueueTrack, ...] = ()
    instants: tuple[Instant, ...] = ()
