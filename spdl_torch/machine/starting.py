"""Start threads and processes such that what a signal's handler raises, whenever it comes, leaves
them able to run, and arrives as itself.

``Thread.start`` waits for an Event. Ctrl-C inside that wait, which is written in Python, may leave
the Event's lock held for ever (3.11 to 3.13); then the new thread, which sets the Event first of
all, never reaches its target and never ends. Another exception, which ``start`` takes for its own,
becomes a KeyError, or the thread's end. (Met twice in 2,500, and 16 times in 600 random signals.)
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # not in typeshed: signal without its enums
import signal
import threading
from collections.abc import Iterator
from time import perf_counter_ns
from typing import Any

from ..locks import in_forked_child
from ..scopes import scope


def start(*threads: threading.Thread) -> None:
    """Start the threads, as ``thread.start()`` does."""
    with handlers_deferred():
        # Out of Python's set of all threads, where a forked process looks for those that have not
        # begun, or have ended: what a handler raises in its callbacks, which are written in Python,
        # as the last reference to a thread goes, would be lost.
        getattr(threading, "_dangling", set()).difference_update(threads)
        for thread in threads:
            mine: Any = thread
            mine.spdl_started_ns = perf_counter_ns()
            thread.start()


def started_ns(thread: threading.Thread) -> int:
    """Return when a thread was started here; 0 = elsewhere."""
    return int(getattr(thread, "spdl_started_ns", 0))


@scope
def handlers_deferred() -> Iterator[None]:
    """Let the program's signal handlers run after the block, so that none raises in its middle.

    Python runs them on the main thread; on another one there is nothing to do, nor inside such a
    block. The signals are not blocked: the system would give them to another thread, and Python
    would run their handlers on this one all the same.
    """
    global _deferral
    is_inside = _deferral is not None and _deferral.is_on
    if is_inside or threading.current_thread() is not threading.main_thread():
        yield
        return
    deferral = _deferral = _Deferral()
    try:
        deferral.begin()
        yield
    finally:
        try:
            deferral.end()
        except BaseException:  # a handler that is in its place again
            deferral.end()
            raise
        finally:
            _deferral = None
        for number in dict.fromkeys(deferral.noted):
            signal.raise_signal(number)


class _Deferral:
    """A temporary handler for all signals that have one.

    It asks the module below ``signal``, which looks for no members of enums: a tenth of the time.
    """

    def __init__(self) -> None:
        found = {number: _signal.getsignal(number) for number in range(1, signal.NSIG)}
        self._handlers: dict[int, Any] = {n: each for n, each in found.items() if callable(each)}
        self.is_on = True
        """Whether signals are noted; False while the handlers are put back, and afterwards."""
        self.noted: list[int] = []
        """The signals that came meanwhile."""

    def __call__(self, number: int, frame: Any) -> None:
        if self.is_on:
            self.noted.append(number)
        else:  # its handler is about to be put back
            self._handlers[number](number, frame)

    def begin(self) -> None:
        """Take the place of the handlers."""
        for number in self._handlers:
            _signal.signal(number, self)

    def end(self) -> None:
        """Put the handlers back."""
        self.is_on = False
        for number, handler in self._handlers.items():
            _signal.signal(number, handler)


_deferral: _Deferral | None = None


@in_forked_child
def _end_deferral() -> None:
    """Put the handlers back in a process that was forked meanwhile."""
    global _deferral
    if _deferral is not None:
        _deferral.end()
        _deferral = None
