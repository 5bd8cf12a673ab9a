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
