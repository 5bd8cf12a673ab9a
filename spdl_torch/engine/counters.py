"""What a stage's threads count, and its readings: of tasks, of a queue, of the threads' time.

Counters only grow: a reporting *interval* is the difference of two readings, so nothing is reset
and no reading can lose what another one saw. Times are integer nanoseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import sub
from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, NamedTuple, Self

from ..machine.histogram import NO_COUNTS, Histogram

if TYPE_CHECKING:
    from .rings import Ring


def _difference(now: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(sub, now, before))


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
        numbers = _difference(self[:-1], before[:-1])
        return TaskCounters._make((*numbers, _difference(self.histogram, before.histogram)))


class Stopwatch:
    """The time from a start to an end or, before that, to now. Any thread may read it."""

    __slots__ = ("_ended_ns", "started_ns")

    def __init__(self) -> None:
        self.started_ns = self._ended_ns = 0  # 0 = not yet

    def start(self) -> Self:
        """Count from now on."""
        self.started_ns = perf_counter_ns()
        return self

    def stop(self) -> None:
        """Stand still; a second time has no effect."""
        self._ended_ns = self._ended_ns or perf_counter_ns()

    def now_ns(self) -> int:
        """Return the time now, or that of the end."""
        return self._ended_ns or perf_counter_ns()

    def elapsed_ns(self) -> int:
        """Return the time since the start; 0 before it."""
        return max(0, self.now_ns() - self.started_ns) if self.started_ns else 0


_NO_WAIT = (0, 0, NO_COUNTS)


class QueueCounters(NamedTuple):
    """A reading of a queue since it was created."""

    elapsed_ns: int = 0
    num_put: int = 0
    num_got: int = 0
    empty_ns: int = 0
    put_wait: tuple[int, int, tuple[int, ...]] = _NO_WAIT
    """Total ns (open waits included), waits open now, histogram of the closed waits."""
    get_wait: tuple[int, int, tuple[int, ...]] = _NO_WAIT

    def since(self, before: QueueCounters) -> QueueCounters:
        """Return the interval between ``before`` and this reading."""
        waits = map(_wait_since, (self.put_wait, self.get_wait), (before.put_wait, before.get_wait))
        return QueueCounters._make((*_difference(self[:-2], before[:-2]), *waits))


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
        self.count = self._first = count
        """The number of threads that the stage is to have now."""
        self._changes: list[tuple[int, int]] = []  # when, and by how many
        self.watch = Stopwatch()
        """Stops with the stage."""

    def change(self, count: int) -> None:
        """Set the number. One thread at a time may call this; any thread may read."""
        self._changes.append((perf_counter_ns(), count - self.count))
        self.count = count

    def thread_ns(self, elapsed_ns: int) -> int:
        """Return the time that all threads had in the last ``elapsed_ns``, up to now or the end."""
        # A copy in one step: another thread may append a change meanwhile, and then set the count,
        # which is not read here.
        changes, end_ns = tuple(self._changes), self.watch.now_ns()
        return elapsed_ns * self._first + sum(
            delta * min(elapsed_ns, max(0, end_ns - when_ns)) for when_ns, delta in changes
        )


LONG_NS = 200_000
"""The wall time from which the CPU time of every call is known."""
_FRESH_NS = 100_000
"""The age up to which a reading serves as that of a long call's beginning. What the thread computed
in between is not known: half of it is taken off, so a long call after short ones is off by 0.05 ms
at most."""
_FRESH_PARTS = 32
"""After a long call a reading serves for this part of its length: others of its kind, which mostly
follow, are off by 1.6 % at most."""

_MOST_UNCLOCKED = 60


class CallClock:
    """The CPU time of one thread's calls, for less than reading its clock twice in each. Only that
    thread uses it.

    That clock takes 0.2 to 2 µs to read, ten times as long as the wall clock. Of short calls some
    are timed, one in eight or, the shorter they are, one in more, so that reading it takes 1 % of
    their time; they stand for the others. A call of 0.2 ms or more stands for itself alone, as
    there may be few of these and most of the time in them. Nobody knows at its beginning how long
    it will take; but the clock only goes on, so it is enough to have read it a little earlier.

    The caller calls ``read`` before a call if ``due_ns`` has come or ``num_unclocked`` is 0, and
    ``cpu_of`` after it if it was long or ``num_unclocked`` is 0; otherwise it counts that down. (It
    does so itself, as a call of Python for each would take longer than all the rest.)
    """

    __slots__ = ("_read_cpu_ns", "_read_ns", "due_ns", "num_unclocked")

    def __init__(self) -> None:
        self.num_unclocked = 0
        """Short calls to come before the next one that is timed."""
        self.due_ns = 0
        """The wall time from which the last reading is too old."""
        self._read_ns = self._read_cpu_ns = 0

    def read(self) -> int:
        """Read the clock before a call; return the wall time."""
        self._read_cpu_ns = thread_time_ns()
        self._read_ns = now = perf_counter_ns()
        self.due_ns = now + _FRESH_NS
        return now

    def cpu_of(self, began_ns: int, ended_ns: int) -> int:
        """Return the CPU time of a call that has just ended."""
        took_ns, now_cpu_ns = ended_ns - began_ns, thread_time_ns()
        cpu_ns = now_cpu_ns - self._read_cpu_ns - (began_ns - self._read_ns) // 2
        self._read_ns, self._read_cpu_ns = ended_ns, now_cpu_ns
        if took_ns < LONG_NS:
            least = 4 + min(LONG_NS // max(1, took_ns), _MOST_UNCLOCKED)
            self.num_unclocked = least + (ended_ns >> 3) % least  # they may follow a pattern
            self.due_ns = ended_ns + _FRESH_NS
            return cpu_ns
        self.due_ns = ended_ns + min(_FRESH_NS, took_ns // _FRESH_PARTS)
        return min(took_ns, max(0, cpu_ns))


class TaskCell:
    """One thread's counts of one stage. Only that thread writes them; any thread may read them."""

    def __init__(self) -> None:
        self.ring: Ring | None = None
        self.part = ""
        """The ring that also records each task as a named part of the thread's turn, and that name;
        None where tasks are not such parts."""
        self.num_tasks = 0
        self.num_failures = 0
        self.num_dropped = 0
        self.busy_ns = 0
        self.failed_ns = 0
        self.cpu_ns = 0
        self.clocked_ns = 0
        self.long_cpu_ns = self.long_ns = 0
        self.clock = CallClock()
        """For whoever times the calls."""
        self.histogram = Histogram()
        self._counts = self.histogram.buckets

    def numbers(self) -> tuple[int, ...]:
        """Return the counts in the order of ``TaskCounters``, up to the histogram. The thread may
        count on: it counts a task before its failure, and here failures are read before tasks, so
        there are never more failures than tasks."""
        failures, failed_ns = self.num_failures, self.failed_ns
        tasks = self.num_tasks, failures, self.busy_ns, failed_ns
        return *tasks, self.cpu_ns, self.clocked_ns, self.long_cpu_ns, self.long_ns

    def add(self, wall_ns: int, cpu_ns: int, tasks: int = 1) -> None:
        """Count a task that succeeded, or so many that were timed together; ``cpu_ns`` < 0: it was
        not read."""
        self.num_tasks += tasks
        self.busy_ns += wall_ns
        if cpu_ns >= 0:
            self._add_cpu(wall_ns, cpu_ns)
        # As ``bucket_of``, a call of which takes as long as all the rest.
        mean_ns = wall_ns if tasks == 1 else wall_ns // tasks
        if mean_ns < 0:
            mean_ns = 0
        shift = (mean_ns | 8).bit_length() - 4
        self._counts[(shift << 3) + (mean_ns >> shift)] += tasks

    def add_failure(self, wall_ns: int, cpu_ns: int) -> None:
        """Count a task that raised."""
        self.num_tasks += 1  # before the failure: see ``numbers``
        self.num_failures += 1
        self.busy_ns += wall_ns
        self.failed_ns += wall_ns
        if cpu_ns >= 0:
            self._add_cpu(wall_ns, cpu_ns)

    def _add_cpu(self, wall_ns: int, cpu_ns: int) -> None:
        self.cpu_ns += cpu_ns
        self.clocked_ns += wall_ns
        if wall_ns >= LONG_NS:
            self.long_cpu_ns += cpu_ns
            self.long_ns += wall_ns
