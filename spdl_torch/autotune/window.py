"""How windows are measured, the tuner's input: a run is read several times in each."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, NamedTuple

from ..machine.probes import probe_counters
from ..machine.readings import Probes, probes_between
from .tuner import StageLoad, Window

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..engine.statistics import PipelineStats, StageStats

PARTS = 4
"""The number of readings of the consumer in a window; their spread gives the noise."""

_LEAST_ITEMS = 20
_LONGEST = 5
"""The factor by which a window may be extended if too few items come."""

_PAUSE = 3.0
"""A part in which the consumer's own time per item is this many times the usual is left out: it was
doing something else (validation, a checkpoint)."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a window, as far as the consumer is concerned."""

    elapsed: float
    num_items: int
    wait_seconds: float


def loads_of(stats: PipelineStats, free: Mapping[str, bool]) -> tuple[StageLoad, ...]:
    """Return the loads of a window's stages. ``free``: which may change."""
    return tuple(
        StageLoad(
            name=stage.name,
            concurrency=stage.concurrency,
            busy_seconds=stage.tasks.busy_time,
            busy_ratio=_at_work(stage),
            cpu_seconds=stage.tasks.ave_cpu_time * stage.tasks.num_tasks,
            num_tasks=stage.tasks.num_tasks,
            is_free=free.get(stage.name, False),
        )
        for stage in stats.stages
    )


def _at_work(stage: StageStats) -> float:
    """Return the share of the threads' time not spent waiting for items or room: inside the op, or
    on the way there, where they may lose their core or the GIL as well.
    """
    busy = stage.tasks.busy_time / max(1e-9, stage.thread_time)
    return min(1.0, max(busy, 1.0 - stage.wait_in_ratio - stage.wait_out_ratio))


def window_of(
    parts: Sequence[Part],
    stages: tuple[StageLoad, ...],
    *,
    probes: Probes | None = None,
    memory_bytes: int | None = None,
) -> Window:
    """Merge parts into a window, without those in which the consumer paused."""
    kept = _without_pauses(parts)
    elapsed, num_items = sum(part.elapsed for part in kept), sum(part.num_items for part in kept)
    rates = [part.num_items / part.elapsed for part in kept if part.elapsed > 0]
    noise = 0.5 / max(1, num_items)  # one item more or less
    if len(rates) > 1 and num_items:
        error = statistics.stdev(rates) / math.sqrt(len(rates))
        noise = math.hypot(noise, error / statistics.fmean(rates))
    return Window(
        elapsed=elapsed,
        num_items=num_items,
        wait_seconds=sum(part.wait_seconds for part in kept),
        stages=stages,
        noise=noise,
        probes=probes or Probes(),
        memory_bytes=memory_bytes,
    )


def _without_pauses(parts: Sequence[Part]) -> Sequence[Part]:
    own = [(p.elapsed - p.wait_seconds) / p.num_items for p in parts if p.num_items]
    if len(own) < 3:
        return parts
    usual = statistics.median(own)
    kept = [
        part
        for part in parts
        if part.elapsed - part.wait_seconds <= _PAUSE * usual * max(1, part.num_items) + 0.1
    ]
    return kept if any(part.num_items for part in kept) else parts


class WindowReadings(NamedTuple):
    """The measurements of a window."""

    parts: list[Part]
    stats: PipelineStats
    probes: Probes


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
        self._first: PipelineStats | None = None
        self._last = (0.0, 0, 0.0)
        self._num_to_skip = skip
        self._parts: list[Part] = []
        self._intervals: list[PipelineStats] = []
        self._probes_before = probe_counters()

    def look(self, stats: PipelineStats, num_items: int) -> WindowReadings | None:
        """Return the window that is complete now, if any; ``restart`` begins the next one.

        num_items: the number of items that the consumer has taken since the run began.
        """
        self._measure(stats, num_items)
        elapsed = sum(part.elapsed for part in self._parts)
        taken = sum(part.num_items for part in self._parts)
        if self._first is None or not self._parts or elapsed < 0.95 * self._seconds:
            return None
        if taken < _LEAST_ITEMS and elapsed < _LONGEST * self._seconds:
            return None
        probes = probes_between(self._probes_before, probe_counters())
        stats = reduce(add, [*self._intervals, stats.since(self._first)])
        return WindowReadings(self._parts, stats, probes)

    def end_run(self, stats: PipelineStats, num_items: int) -> None:
        """Take a run's last statistics; the window continues with the next run."""
        if self._first is None:
            return
        self._measure(stats, num_items)
        if self._first is not None and self._parts:
            self._intervals.append(stats.since(self._first))
        self._first = None

    @property
    def is_within_run(self) -> bool:
        """Whether a run has been read and has not ended, so its statistics are incomplete."""
        return self._first is not None

    def _measure(self, stats: PipelineStats, num_items: int) -> None:
        now = stats.elapsed, num_items, stats.consumer_wait_ratio * stats.elapsed
        then, self._last = self._last, now
        if self._first is None:
            self._first = stats
        elif self._num_to_skip:
            self._num_to_skip -= 1
            self._first = stats
        elif now[0] > then[0]:
            self._parts.append(Part(now[0] - then[0], now[1] - then[1], now[2] - then[2]))
