"""How windows are measured, the tuner's input: a run is read several times in each."""

from __future__ import annotations

import math
import statistics
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..machine.probes import probe_counters
from ..machine.readings import Probes, probes_between
from .tuner import Window

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..engine.recorder import FlightRecorder
    from ..engine.statistics import PipelineStats
    from .tuner import StageLoad

PARTS = 4
"""The number of readings in a window; the spread of the consumer's rate gives the noise."""

_LEAST_ITEMS = 20
_LONGEST = 5
"""The factor by which a window may be extended if too few items come."""

_PAUSE = 3.0
"""A part in which the consumer's own time per item is this many times the usual is left out: it was
doing something else (validation, a checkpoint)."""


class Tuned(Protocol):
    """What is tuned: a run of a pipeline, or the workers of a loader's iterator."""

    @property
    def recorder(self) -> FlightRecorder | None: ...

    def read(self) -> tuple[PipelineStats, int]:
        """Return the statistics, and the items that the consumer took, since the run began."""

    def loads(self, stats: PipelineStats) -> tuple[StageLoad, ...]:
        """Return the work of the stages in a window."""

    def memory_in_flight(self) -> int | None:
        """Return the most bytes in flight with the present settings; None = unknown."""

    def set_count(self, name: str, count: int) -> None:
        """Change a stage's concurrency."""

    def settings(self) -> str:
        """Return the present settings as code."""


class Part(NamedTuple):
    """A part of a window."""

    stats: PipelineStats
    num_items: int
    """The number of items that the consumer took."""

    @property
    def own_seconds(self) -> float:
        """The time in which the consumer did not wait."""
        return (self.stats.elapsed_ns - self.stats.waited_ns) / 1e9


def window_of(parts: Sequence[Part], tuned: Tuned, probes: Probes) -> Window:
    """Merge parts into a window, without those in which the consumer paused."""
    kept = _without_pauses(parts)
    stats = reduce(add, (part.stats for part in kept))
    num_items = sum(part.num_items for part in kept)
    rates = [part.num_items / part.stats.elapsed for part in kept]
    noise = 0.5 / max(1, num_items)  # one item more or less
    if len(rates) > 1 and num_items:
        error = statistics.stdev(rates) / math.sqrt(len(rates))
        noise = math.hypot(noise, error / statistics.fmean(rates))
    return Window(
        elapsed=stats.elapsed,
        num_items=num_items,
        wait_seconds=stats.waited_ns / 1e9,
        stages=tuned.loads(stats),
        noise=noise,
        probes=probes,
        memory_bytes=tuned.memory_in_flight(),
    )


def _without_pauses(parts: Sequence[Part]) -> Sequence[Part]:
    own = [part.own_seconds / part.num_items for part in parts if part.num_items]
    if len(own) < 3:
        return parts
    usual = statistics.median(own)
    kept = [
        part for part in parts if part.own_seconds <= _PAUSE * usual * max(1, part.num_items) + 0.1
    ]
    return kept if any(part.num_items for part in kept) else parts


class Meter:
    """Cuts readings, taken several times a window, into complete windows.

    The part of a window right after a start or a change is not measured. If
    runs (epochs) are shorter than a window, it continues in the next one.
    """

    def __init__(self, window_seconds: float) -> None:
        self._seconds = window_seconds
        self.restart(skip=1)

    def restart(self, *, skip: int = 0) -> None:
        """Discard the measurements and begin a window whose first ``skip`` parts are left
        out.
        """
        self._last: tuple[PipelineStats, int] | None = None  # with which the next part begins
        self._num_to_skip = skip
        self._parts: list[Part] = []
        self._probes_before = probe_counters()

    def look(self, tuned: Tuned) -> Window | None:
        """Return the window that is complete now, if any; ``restart`` begins the next one."""
        self._read(tuned)
        elapsed = sum(part.stats.elapsed for part in self._parts)
        num_items = sum(part.num_items for part in self._parts)
        if elapsed < 0.95 * self._seconds:
            return None
        if num_items < _LEAST_ITEMS and elapsed < _LONGEST * self._seconds:
            return None
        probes = probes_between(self._probes_before, probe_counters())
        return window_of(self._parts, tuned, probes)

    def end_run(self, tuned: Tuned) -> None:
        """Take a run's last statistics; the window continues with the next run."""
        if self._last is not None:
            self._read(tuned)
            self._last = None

    def begin_run(self) -> None:
        """Begin anew if the last run was left before its end, so that its figures lack a part."""
        if self._last is not None:
            self.restart(skip=1)

    def _read(self, tuned: Tuned) -> None:
        stats, num_items = tuned.read()
        then, self._last = self._last, (stats, num_items)
        if then is None:
            return
        if self._num_to_skip:
            self._num_to_skip -= 1
        elif stats.elapsed_ns > then[0].elapsed_ns:
            self._parts.append(Part(stats.since(then[0]), num_items - then[1]))
