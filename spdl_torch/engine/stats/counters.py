"""Readings of a stage's tasks and of a queue, and the time that a stage's threads had.

Counters only grow: a reporting *interval* is the difference of two readings, so nothing is reset
and no reading can lose what another one saw. Times are integer nanoseconds.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple

from ...machine.histogram import NO_COUNTS

if TYPE_CHECKING:
    from collections.abc import Sequence


def _difference(now: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(now, before, strict=True))


class TaskCounters(NamedTuple):
    """A reading of a stage's tasks since it started."""

    elapsed_ns: int = 0
    num_tasks: int = 0
    num_failures: int = 0
    busy_ns: int = 0
    """Wall time inside the op, failures included."""
    failed_ns: int = 0
    """Wall time inside the op of the calls that failed."""
    cpu_ns: int = 0
    """CPU time of the tasks for which it was read."""
    clocked_ns: int = 0
    """Wall time of those tasks."""
    long_cpu_ns: int = 0
    """CPU time of those of them that took long: for these it was always read, unless they failed in
    a pipeline."""
    long_ns: int = 0
    """Wall time of those."""
    histogram: tuple[int, ...] = NO_COUNTS
    """Durations of the tasks that succeeded."""

    def since(self, before: TaskCounters) -> TaskCounters:
        """Return the interval between ``before`` and this reading."""
        return TaskCounters(
            self.elapsed_ns - before.elapsed_ns,
            self.num_tasks - before.num_tasks,
            self.num_failures - before.num_failures,
            self.busy_ns - before.busy_ns,
            self.failed_ns - before.failed_ns,
            self.cpu_ns - before.cpu_ns,
            self.clocked_ns - before.clocked_ns,
            self.long_cpu_ns - before.long_cpu_ns,
            self.long_ns - before.long_ns,
            _difference(self.histogram, before.histogram),
        )


_NO_WAIT = (0, 0, NO_COUNTS)


class QueueCounters(NamedTuple):
    """A reading of a queue since it was created."""

    elapsed_ns: int = 0
    num_put: int = 0
    num_got: int = 0
    put_wait: tuple[int, int, tuple[int, ...]] = _NO_WAIT
    """Total ns (open waits included), waits open now, histogram of the closed waits."""
    get_wait: tuple[int, int, tuple[int, ...]] = _NO_WAIT
    empty_ns: int = 0
    peak_items: int = 0

    def since(self, before: QueueCounters) -> QueueCounters:
        """Return the interval between ``before`` and this reading."""
        return QueueCounters(
            self.elapsed_ns - before.elapsed_ns,
            self.num_put - before.num_put,
            self.num_got - before.num_got,
            _wait_since(self.put_wait, before.put_wait),
            _wait_since(self.get_wait, before.get_wait),
            self.empty_ns - before.empty_ns,
            self.peak_items,
        )


def _wait_since(
    now: tuple[int, int, tuple[int, ...]], before: tuple[int, int, tuple[int, ...]]
) -> tuple[int, int, tuple[int, ...]]:
    return now[0] - before[0], now[1], _difference(now[2], before[2])


class ThreadCount:
    """The number of a stage's threads, which may change while it runs.

    Ratios of a stage are shares of the time that all its threads had: concurrency times elapsed
    time, as long as the number never changes.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        """The number of threads that the stage is to have now."""
        self._changes: list[tuple[int, int]] = []  # when, and by how many
        self._ended_ns: int | None = None

    def change(self, count: int) -> None:
        """Set the number. One thread at a time may call this; any thread may read."""
        self._changes.append((perf_counter_ns(), count - self.count))
        self.count = count

    def end(self) -> None:
        """Stop the clock at the end of the stage."""
        self._ended_ns = self._ended_ns or perf_counter_ns()

    def thread_ns(self, elapsed_ns: int) -> int:
        """Return the time that all threads had in the last ``elapsed_ns``, up to now or the end."""
        # A copy in one step: another thread may append a change meanwhile.
        changes, count = tuple(self._changes), self.count
        end_ns = self._ended_ns or perf_counter_ns()
        total = elapsed_ns * (count - sum(delta for _, delta in changes))
        return total + sum(
            delta * min(elapsed_ns, max(0, end_ns - when_ns)) for when_ns, delta in changes
        )
