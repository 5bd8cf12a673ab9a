"""When Python's collector was at work, noted without running a line of Python.

Python looks for signals where a function of its own begins, and drops what a callback of the
collector raises. Ctrl-C that came during a collection would be lost in a callback that is written
in Python. (Met with each of 30 signals during long collections.) So what notes the times is put
together from functions that are written in C, and read later.
"""

from __future__ import annotations

import gc
import operator
from collections import deque
from functools import partial
from time import perf_counter_ns
from typing import Any, NamedTuple, cast

from ..locks import RLock


class Collection(NamedTuple):
    """One run of the collector."""

    began_ns: int
    """On the clock of ``perf_counter_ns``."""
    ended_ns: int
    info: dict[str, int]
    """As the collector's callbacks get it: ``generation``, ``collected``, ``uncollectable``."""


class Collections:
    """The runs of the collector from ``begin`` to ``end``. Any thread may take them."""

    def __init__(self) -> None:
        # Re-entrant: a collection on a thread that holds it may run a finalizer that takes it too.
        self._lock = RLock()
        self._is_taking = False
        self._began: deque[int] = deque()
        self._ended: deque[int] = deque()
        self._infos = _Infos()
        # In this order: where an end is found, its info is there.
        self._callbacks = partial(setattr, self._infos), _noting_times(self._began, self._ended)

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
        """Return the runs that have ended since the last call."""
        found: list[Collection] = []
        with self._lock:
            if self._is_taking:
                return found
            self._is_taking = True
            try:
                for _ in range(len(self._ended)):  # taking them may set the collector off
                    if self._is_whole():
                        times = self._began.popleft(), self._ended.popleft()
                        found.append(Collection(*times, self._infos.popleft()))
            finally:
                self._is_taking = False
        return found

    def _is_whole(self) -> bool:
        """Return whether the first of each belong together. If not, one of them is dropped: Ctrl-C
        cut off the taking of the others, or the noting began or ended within a run.
        """
        began, ended, infos = self._began, self._ended, self._infos
        if len(infos) > len(ended):
            infos.popleft()
        elif len(infos) < len(ended) or not began or began[0] > ended[0]:
            ended.popleft()
        elif len(began) > 1 and began[1] < ended[0]:
            began.popleft()
        else:
            return True
        return False


def _noting_times(began: deque[int], ended: deque[int]) -> Any:
    """Return a callback that appends the time of each begin and each end.

    The collector calls it with ``start`` or ``stop``, and more; ``getattr`` gets the property of
    that name, which has an iterator make one step: it appends the present time.
    """

    def noting(times: deque[int]) -> property:
        now = iter(perf_counter_ns, -1)
        return property(partial(next, map(times.append, now)))

    class Marks:
        start, stop = noting(began), noting(ended)

    return partial(getattr, Marks())


class _Infos(deque[dict[str, int]]):
    """What the collector has said at each end, where ``setattr`` is called with what it says.

    Likewise: to set the property ``stop`` is to append the value; to set ``start`` compares the
    two, for nothing.
    """

    start = property(None, cast("Any", operator.is_))
    stop = property(None, deque.append)
