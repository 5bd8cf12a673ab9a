"""Decide how many workers run at once, and how many of them on one batch.

One thread makes small samples whose Python code holds the GIL faster than several, which contend
for the GIL at every call that releases it. The sign is how often they give up the processor while
together they use no more than one core (measured with 2, 4 and 8 threads on 2 cores: 20 to 70 times
a millisecond with three calls of torch for a row, or to read a small file; 1 to 5 times in numpy's
or Pillow's longer calls). Then one worker is tried alone, and stays alone while it makes more
samples a second than all did together. The data does not depend on it.

With it over without, 2 and 4 threads on 2 idle cores, medians of 5 rounds: MNIST with Pillow 1.98
and 2.71, rows with arithmetic 1.79 and 3.24, npy files 1.64 and 2.20, JSON lines 1.12 and 1.39,
``(x[i], i)`` 0.95 and 1.34, CIFAR with Pillow 0.99 and 0.98. By default most of these load in
processes; it serves ``isolation="thread"``.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ...engine.channel.channel import Channel
from ...engine.channel.waits import ChannelClosed
from ...machine.gil import take_turns
from ...named_tuples import NamedTuple

try:
    from resource import RUSAGE_THREAD, getrusage
except ImportError:  # only Linux counts per thread
    CAN_COUNT = False
else:
    CAN_COUNT = True

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .activity import Activity

# If a whole batch takes less than this, waking other threads costs more than they gain (a wake-up
# takes 10 to 50 µs, measured), so one thread makes the batch alone.
_SHARE_ABOVE_NS = 1_000_000

_SWITCHES_PER_MS = 8
"""Voluntary switches in a millisecond of CPU time from which threads may be contending for the
GIL."""
_LEAST_AT_ONCE = 1.3
"""The average number of busy workers below which they do not contend."""
_LONGEST_BATCH_NS = 30_000_000
"""The CPU time of a batch above which the trial itself would cost too much."""
_WINDOW_NS, _WINDOW_JOBS = 50_000_000, 8
_GAIN, _LOSS = 1.1, 1.5
"""The speedup that one worker alone has to reach, and the slowdown that ends its trial."""
_FIRST_HOLD_NS, _LONGEST_HOLD_NS = 1_000_000_000, 60_000_000_000
"""The first and the longest time until the other way is tried again; it doubles each time."""
_LOOK_SECONDS = 1.0
_ENOUGH = 1_000_000  # room for wake-up calls, more than are ever left over


class Spell(NamedTuple):
    """A worker's readings when it began a job."""

    wall_ns: int
    cpu_s: float = 0.0
    switches: int = -1
    """The thread's voluntary switches since it started; -1 = not counted."""


@dataclass(slots=True, eq=False, repr=False)
class _Window:
    """The work of all workers over a period."""

    busy_ns: int = 0  # time in which at least one worker was busy
    wall_ns: int = 0  # busy time, summed over the workers
    cpu_ns: float = 0.0
    switches: int = 0
    jobs: int = 0
    samples: int = 0
    size: int = 0  # of a batch

    @property
    def is_full(self) -> bool:
        return self.busy_ns >= _WINDOW_NS and self.jobs >= _WINDOW_JOBS and self.samples > 0

    @property
    def sample_ns(self) -> float:
        return self.busy_ns / self.samples

    @property
    def is_contended(self) -> bool:
        """Whether the workers seem to contend for the GIL."""
        return (
            self.wall_ns >= _LEAST_AT_ONCE * self.busy_ns
            and self.switches >= _SWITCHES_PER_MS * self.cpu_ns / 1e6
            # Workers that wait for storage use less, and workers that run in parallel more.
            and take_turns(self.cpu_ns / self.busy_ns)
            and self.cpu_ns / self.samples * self.size <= _LONGEST_BATCH_NS
        )


@dataclass(slots=True, eq=False, repr=False)
class _Trial:
    """Whether one worker alone is faster than all together."""

    together_ns: float
    """The time of a sample before."""
    is_settled: bool = False
    """Whether the others have finished their last jobs."""
    is_proven: bool = False

    def is_hopeless(self, window: _Window) -> bool:
        """Return whether one alone is so slow that the trial can end."""
        is_slow = window.samples > 0 and window.sample_ns > _LOSS * self.together_ns
        return is_slow and not self.is_proven


class Contention:
    """The contention of one epoch's workers for the GIL, and whether one of them works alone.

    Workers read ``alone`` without the lock: a stale value lets one more job through, or costs one
    more look, and changes nothing in what is loaded. Only the holder of the lock sets it.
    """

    def __init__(self, activities: Sequence[Activity], *, shares_jobs: bool) -> None:
        self.parked: Channel[None] = Channel(_ENOUGH)
        """The channel on which workers wait while one works alone."""
        self.alone: int | None = None
        """The worker that works alone; None = all work."""
        self._activities = activities
        self._shares_jobs = shares_jobs
        self._adapts = CAN_COUNT  # else all always work together
        self._sample_ns = 0.0  # time per sample of the last job
        self._lock = threading.Lock()  # guards all that follows, and writes to alone
        self._inside = 0  # workers that have a job
        self._marked_ns = 0  # busy time is counted up to here
        self._window = _Window()
        self._trial: _Trial | None = None  # while one works alone
        self._until_ns = 0  # no change before this
        self._hold_ns = _FIRST_HOLD_NS

    def hands(self, index: Any, num_workers: int) -> int:
        """Return how many workers share a batch: all, or one if it is too small to share."""
        if not self._shares_jobs or not isinstance(index, list | tuple) or self.alone is not None:
            return 1
        if 0 < self._sample_ns * len(index) < _SHARE_ABOVE_NS:
            return 1
        return max(1, min(num_workers, len(index)))

    def wait(self, worker: int) -> None:
        """Block while another worker works alone. Called before a job is taken.

        Raises: ChannelClosed.
        """
        while self.alone not in (None, worker):
            try:
                self.parked.get(_LOOK_SECONDS)
            except TimeoutError:
                self._look_after()

    def enter(self) -> Spell:
        """Take the readings at the start of a job."""
        if not self._adapts:
            return Spell(perf_counter_ns())
        usage, now = getrusage(RUSAGE_THREAD), perf_counter_ns()
        with self._lock:
            self._count_time(now)
            self._inside += 1
        return Spell(now, usage.ru_utime + usage.ru_stime, usage.ru_nvcsw)

    def leave(self, worker: int, spell: Spell, num_samples: int, size: int) -> None:
        """Count a finished job, of which this worker made ``num_samples`` of ``size`` samples, and
        decide who works next.
        """
        now = perf_counter_ns()
        if num_samples:
            self._sample_ns = (now - spell.wall_ns) / num_samples
        if spell.switches < 0:
            return
        usage = getrusage(RUSAGE_THREAD)
        with self._lock:
            self._count_time(now)
            self._inside -= 1
            window = self._window
            window.jobs += 1
            window.samples += num_samples
            window.size = max(window.size, size)
            window.wall_ns += now - spell.wall_ns
            window.cpu_ns += (usage.ru_utime + usage.ru_stime - spell.cpu_s) * 1e9
            window.switches += usage.ru_nvcsw - spell.switches
            self._judge(worker, now)

    def gone(self, worker: int | None) -> None:
        """Let all work together again if ``worker``, which works alone, leaves."""
        with self._lock:
            if worker is not None and self.alone == worker:
                self._open(perf_counter_ns())

    def _count_time(self, now: int) -> None:
        if self._inside:
            self._window.busy_ns += now - self._marked_ns
        self._marked_ns = now

    def _judge(self, worker: int, now: int) -> None:
        """Decide, at the end of a job, who works next. The caller holds the lock."""
        window, trial = self._window, self._trial
        if trial is not None and not trial.is_settled:
            if self._inside:  # the others still finish jobs: this would not be one alone
                return
            trial.is_settled = True
        elif not (window.is_full or (trial is not None and trial.is_hopeless(window))):
            return
        elif trial is None:
            if self._adapts and now >= self._until_ns and window.is_contended:
                self._trial, self.alone = _Trial(window.sample_ns), worker
        elif not trial.is_proven:
            trial.is_proven = window.sample_ns * _GAIN < trial.together_ns
            self._until_ns = now + self._hold_ns
            self._hold_ns = min(2 * self._hold_ns, _LONGEST_HOLD_NS)
            if not trial.is_proven:
                self._open(self._until_ns)
        elif now >= self._until_ns:
            self._open(now)
        self._window = _Window()

    def _open(self, until_ns: int) -> None:
        """Let all work together, at least until ``until_ns``. The caller holds the lock."""
        self.alone, self._trial, self._until_ns = None, None, until_ns
        try:
            for _ in self._activities:
                self.parked.put(None)
        except ChannelClosed:
            pass  # the epoch ended, and every wait with it

    def _look_after(self) -> None:
        """Let all work if the one alone is stuck: its sample may be waiting for the others."""
        with self._lock:
            alone = self.alone
            if alone is None or self._activities[alone].job is None:
                return
            if perf_counter_ns() - self._activities[alone].since_ns > _LOOK_SECONDS * 1e9:
                self._adapts = False
                self._open(0)
