"""Start threads such that Ctrl-C, whenever it comes, leaves them able to run.

``Thread.start`` waits for an Event. Ctrl-C inside that wait, which is written in Python, may leave
the Event's lock held for ever (3.11 to 3.13); then the new thread, which sets the Event first of
all, never reaches its target and never ends. (Met twice in 2,500 random interrupts of loaders.)
"""

from __future__ import annotations

import os
import threading
from collections import deque
from time import perf_counter_ns
from typing import Any

# The system's ids of the latest threads started here. One that has ended in Python may still be
# among the system's threads for a moment, without a name.
_latest: deque[int | None] = deque(maxlen=256)


def start(*threads: threading.Thread) -> None:
    """Start the threads, as ``thread.start()`` does; wait for all of them together, as for each one
    the system would have to switch threads twice."""
    for thread in threads:
        mine: Any = thread
        # A private name of Python: where it is not an Event, the thread starts as always.
        if isinstance(getattr(mine, "_started", None), threading.Event):
            mine._started = _Started()
        mine.spdl_started_ns = perf_counter_ns()
        thread.start()
    for thread in threads:
        started: Any = getattr(thread, "_started", None)
        if isinstance(started, _Started):
            started.wait_for_thread()
        _latest.append(thread.native_id)


def started_ns(thread: threading.Thread) -> int:
    """Return when a thread was started here; 0 = elsewhere."""
    return int(getattr(thread, "spdl_started_ns", 0))


def num_other_threads() -> int:
    """Return the number of this process's threads, the main one included, without this package's.

    As Python counts for its warning about forks: the system's threads where it can, else Python's.
    """
    own = [each for each in threading.enumerate() if each.name.startswith("spdl-")]
    try:
        running = set(map(int, os.listdir("/proc/self/task")))
    except OSError:
        return threading.active_count() - len(own)
    return len(running - {each.native_id for each in own} - set(_latest.copy()))


class _Started:
    """The part of an Event that ``Thread`` uses, made of one bare lock, which the new thread
    releases without waiting for anybody.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._at_fork_reinit()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        # The flag first: a wait that begins now returns at once, and one that blocks is released.
        if not self._is_set:
            self._is_set = True
            self._unset.release()

    def wait(self, timeout: float | None = None) -> bool:
        return self._is_set  # start() waits, for several threads together

    def wait_for_thread(self) -> None:
        if not self._is_set:
            self._unset.acquire()
            self._unset.release()

    def _at_fork_reinit(self) -> None:
        self._unset = threading.Lock()
        if not self._is_set:
            self._unset.acquire()
