"""Measure what a stage's own clock cannot show: waits for the GIL, a core, the collector.

One thread in a process probes while any loader or pipeline dataset runs. Ten times a second it
sleeps 10 ms and notes how late it wakes, less the time for which it had no core: the rest was a
wait for the GIL. How long our threads were ready to run without a core, and what threads that ops
started have computed, is read at the begin and the end of every window, once a second in between,
and by every thread of ours that ends: see :mod:`.thread_times`. When Python's collector was at work
is noted without running a line of Python.
"""

from __future__ import annotations

import gc
import operator
import threading
from collections import deque
from functools import partial
from time import monotonic, perf_counter_ns, process_time_ns
from typing import Any, NamedTuple, cast

from ..handlers import start
from ..locks import RLock, in_forked_child
from .histogram import Histogram
from .thread_times import OwnRunDelay, ThreadTimes, run_delay_ns

_PERIOD_SECONDS = 0.1
_SLEEP_SECONDS = 0.01
_SCHEDSTAT_SECONDS = 1.0
_LONG_COLLECTION_NS = 100_000
_MOST_COLLECTIONS = 1_000

_OWN_NAME = "spdl-probe"


# Python looks for signals where a function of its own begins, and drops what a callback of the
# collector raises. Ctrl-C that came during a collection would be lost in a callback that is written
# in Python. (Met with each of 30 signals during long collections.) So what notes the times is put
# together from functions that are written in C, and read later.


class Collection(NamedTuple):
    """One run of the collector."""

    began_ns: int
    """On the clock of ``perf_counter_ns``."""
    ended_ns: int
    info: dict[str, int]
    """As the collector's callbacks get it: ``generation``, ``collected``, ``uncollectable``."""


class Collections:
    """The runs of the collector from ``begin`` to ``end``."""

    def __init__(self) -> None:
        self._is_taking = False
        self._noted = _Noted()
        # In this order: where an end is found, its info is there.
        self._callbacks = partial(setattr, self._noted), _noting_times(self._noted)

    def begin(self) -> None:
        """Note the runs of the collector from now on."""
        if self._callbacks[-1] not in gc.callbacks:
            gc.callbacks.extend(self._callbacks)

    def end(self) -> None:
        """Note no more runs. What was noted can still be taken."""
        for callback in self._callbacks:
            if callback in gc.callbacks:
                gc.callbacks.remove(callback)

    def taken(self) -> list[Collection]:
        """Return the runs that have ended since the last call, for one thread at a time; none where
        a collection in the middle of it runs a finalizer that asks, too.
        """
        found: list[Collection] = []
        if self._is_taking:
            return found
        self._is_taking, noted = True, self._noted
        try:
            for _ in range(len(noted)):  # taking them may set the collector off
                if len(noted) < 3:
                    break
                began, info, ended = noted[0], noted[1], noted[2]
                if not isinstance(began, dict) and isinstance(info, dict):
                    found.append(Collection(began, ended, info))
                    noted.popleft(), noted.popleft()
                # Else the noting began or ended within a run, or Ctrl-C cut off the taking of one.
                noted.popleft()
        finally:
            self._is_taking = False
        return found


def _noting_times(noted: deque[Any]) -> Any:
    """Return a callback that appends the time of each begin and each end.

    The collector calls it with ``start`` or ``stop``, and more; ``getattr`` gets the property of
    that name, which has an iterator make one step: it appends the present time.
    """
    now = iter(perf_counter_ns, -1)

    class Marks:
        start = stop = property(partial(next, map(noted.append, now)))

    return partial(getattr, Marks())


class _Noted(deque[Any]):
    """When the collector began, what it has said at its end, and when it ended; and so on.

    ``setattr`` is called with what it says, likewise: to set the property ``stop`` is to append the
    value; to set ``start`` compares the two, for nothing.
    """

    start = property(None, cast("Any", operator.is_))
    stop = property(None, deque.append)


class ProbeCounters(NamedTuple):
    """A reading of the probe; a window is the difference of two."""

    wall_ns: int
    late: tuple[int, ...]
    """The probe's waits for the GIL: a histogram of nanoseconds."""
    run_delay_ns: int
    """The time that the loader's threads were ready to run without a core, added up."""
    thread_ns: int
    """The wall time over which that was added up; 0 = the system does not report it."""
    gc_ns: int | None
    """The time of garbage collections; None = nobody heard of them."""
    cpu_ns: int
    """The CPU time of this process, all threads."""
    helpers_ns: int = 0
    """The CPU time of threads that ops started, such as a codec's."""


class _Probe:
    """The probing thread and its counters, one for the process."""

    def __init__(self) -> None:
        # Guards the set of users and the thread. Re-entrant: the garbage collector may run a
        # finalizer, which calls stop_probing(), on a thread that holds it.
        self._lock = RLock()
        self._users: set[int] = set()  # their ids
        self._going_on = threading.Lock()
        self._thread: threading.Thread | None = None
        self._late = Histogram()
        self._gc_ns = 0
        self._garbage = Collections()
        self._long_collections: list[Collection] = []
        self._times = ThreadTimes()

    def start(self, user: object) -> bool:
        """Start probing for ``user``; it ends when all users have stopped it. Return
        whether nobody probed before: then the run delays were read just now.
        """
        with self._lock:
            is_first = not self.is_used
            self._users.add(id(user))
            if not is_first:
                return False
            # A bare lock, because a finalizer may release it: see Reporter.
            self._going_on = going_on = threading.Lock()
            going_on.acquire()
            self._garbage.begin()
        self._times.begin()
        # Without the lock: starting takes another one, and a finalizer that wants our lock may run
        # on a thread that holds that one.
        thread = threading.Thread(target=self._run, args=(going_on,), name=_OWN_NAME, daemon=True)
        start(thread)
        self._thread = thread
        return True

    def stop(self, user: object) -> None:
        """Stop probing for ``user``, if it was. Never blocks; a finalizer may call it."""
        with self._lock:
            self._users.discard(id(user))
            if not self.is_used:
                # Ctrl-C may have come in the middle of start().
                self._garbage.end()
                if self._going_on.locked():
                    self._going_on.release()

    def hear_of_garbage(self) -> None:
        """Count the collections that were noted."""
        with self._lock:  # several threads may add to the sum
            for each in self._garbage.taken():
                took_ns = each.ended_ns - each.began_ns
                self._gc_ns += took_ns
                if took_ns >= _LONG_COLLECTION_NS:
                    self._long_collections.append(each)
            del self._long_collections[:-_MOST_COLLECTIONS]

    def long_collections(self) -> list[Collection]:
        """Return the latest collections of 0.1 ms or more that came while somebody probed."""
        self.hear_of_garbage()
        return self._long_collections.copy()

    def join(self, timeout: float) -> None:
        """Wait until the probe has ended, if nobody uses it. It was asked to, so this is short."""
        with self._lock:
            thread = None if self.is_used else self._thread
        # A garbage collection on that thread may be what ends the last user.
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def count_alone(self) -> None:
        """Count the calling thread as the only one of ours: a worker with a process of its own,
        whose other threads sleep, or were started by an op.
        """
        self._times.count_alone()

    def thread_ends(self) -> None:
        """Count the calling thread's time for the last time: short passes have ended before anybody
        looks.
        """
        if self.is_used:
            self._times.ends()

    @property
    def is_used(self) -> bool:
        return bool(self._users)

    def read(self, *, run_delays: bool = True) -> ProbeCounters:
        """Return the measurements so far.

        ``run_delays=False``: run delays as last read, since reading them costs a file for each of
        our threads and a lock; the other measurements cost neither.
        """
        times = self._times
        self.hear_of_garbage()
        if run_delays:
            times.read()
        return ProbeCounters(
            perf_counter_ns(),
            self._late.counts(),
            times.run_delay_ns,
            times.thread_ns,
            self._gc_ns,
            process_time_ns(),
            times.helpers_ns,
        )

    def _run(self, going_on: threading.Lock) -> None:
        due = monotonic() + _SCHEDSTAT_SECONDS
        own_delay_ns = OwnRunDelay()
        try:
            while not going_on.acquire(timeout=_PERIOD_SECONDS - _SLEEP_SECONDS):
                delay_ns, began_ns = own_delay_ns(), perf_counter_ns()
                if going_on.acquire(timeout=_SLEEP_SECONDS):
                    return
                late_ns = perf_counter_ns() - began_ns - int(_SLEEP_SECONDS * 1e9)
                self._late.add(max(0, late_ns - own_delay_ns() + delay_ns))
                if monotonic() >= due:
                    due = monotonic() + _SCHEDSTAT_SECONDS
                    self._times.read()
                    self.hear_of_garbage()
        finally:
            own_delay_ns.close()


_probe = _Probe()
start_probing, stop_probing, join_probing = _probe.start, _probe.stop, _probe.join
probe_counters = _probe.read
long_collections = _probe.long_collections
count_only_this_thread, thread_ends = _probe.count_alone, _probe.thread_ends


def probe_counters_of(native_id: int, *, run_delays: bool = True) -> ProbeCounters:
    """Return what ``probe_counters`` does for one thread, for which nobody probes: of waits its run
    delay alone, which is unknown with ``run_delays=False``.
    """
    counters = probe_counters(run_delays=run_delays)
    delay_ns = run_delay_ns(native_id) if run_delays else None
    thread_ns = 0 if delay_ns is None else counters.wall_ns
    return counters._replace(late=(), run_delay_ns=delay_ns or 0, thread_ns=thread_ns, gc_ns=None)


@in_forked_child
def _forget_parent() -> None:
    """Start afresh in a forked child, which has the parent's counts and callback, but no thread."""
    _probe._garbage.end()
    _probe.__init__()  # type: ignore[misc]  # as if made anew
