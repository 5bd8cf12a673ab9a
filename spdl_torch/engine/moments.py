"""What a recorder notes while a run goes on; the timeline is made of it when somebody reads it."""

from __future__ import annotations

import enum
from time import perf_counter_ns, time_ns
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

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
