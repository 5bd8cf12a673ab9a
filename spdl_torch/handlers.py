"""What a signal's handler raises, whenever it comes: it arrives as itself, for whoever has set the
handler, and leaves threads and processes able to run.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # not in typeshed: signal without its enums
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from time import perf_counter_ns
from types import CodeType
from typing import Any, TypeVar

from .locks import in_forked_child
from .scopes import scope

E = TypeVar("E", bound=BaseException)


def raised_in_handler(error: BaseException) -> bool:
    """Return whether a signal's handler raised an error, whatever it interrupted: the code of one
    that is in place is among the error's frames. Their locals are not looked at, as the frames
    would keep what they are let go of later.
    """
    # Without the enums of signal.getsignal, which take ten times as long: a pass ends by an error,
    # too.
    found = map(_signal.getsignal, range(1, signal.NSIG))
    set_ones = (each for each in found if callable(each))
    handlers = {*map(_code_of, set_ones)} - {None}
    entry = error.__traceback__ if handlers else None
    while entry is not None and entry.tb_frame.f_code not in handlers:
        entry = entry.tb_next
    return entry is not None


def unless_of_handler(*kinds: type[E]) -> tuple[type[E], ...]:
    """Return what an ``except`` clause is to catch: these kinds, or nothing if a signal's handler
    has raised what is on its way, which is for whoever has set the handler.
    """
    error = sys.exc_info()[1]
    return () if error is not None and raised_in_handler(error) else kinds


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, partial):
        handler = handler.func
    if callable(handler) and not hasattr(handler, "__code__"):
        handler = handler.__call__
    code: CodeType | None = getattr(handler, "__code__", None)  # a method has its function's
    return code


def start(*threads: threading.Thread) -> None:
    """Start the threads, as ``thread.start()`` does.

    That waits for an Event. Ctrl-C inside that wait, which is written in Python, may leave the
    Event's lock held for ever (3.11 to 3.13); then the new thread, which sets the Event first of
    all, never reaches its target and never ends. Another exception, which ``start`` takes for its
    own, becomes a KeyError, or the thread's end. (Met twice in 2,500, and 16 times in 600 random
    signals.)
    """
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
