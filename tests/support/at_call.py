"""Ctrl-C, or another signal, at a chosen call."""

from __future__ import annotations

import gc
import logging
import signal
import sys
import threading
from contextlib import contextmanager

_KEEP_THEIR_LOCKS = threading.__file__, logging.__file__


class TooLate(TimeoutError):
    """What a handler raises that limits the time of a loop, as many are written: also an OSError,
    which whatever reads takes for a failure of its own."""


@contextmanager
def handled(function, number=signal.SIGUSR1):
    """A signal has this handler for a while."""
    before = signal.signal(number, function)
    try:
        yield
    finally:
        signal.signal(number, before)


class AtCall:
    """Interrupts the main thread at a certain one of the places where Python looks for signals:
    where a function begins, and where one that is written in C has returned.

    Garbage is not collected meanwhile. What a collection finds depends on the tests before, and
    Ctrl-C in a finalizer is only printed.
    """

    def __init__(self, number, signal_number=signal.SIGINT):
        self.number = number
        self.signal_number = signal_number
        self.where = None
        # Held here because Python 3.11 does not hold it: where the frame of a call is made, a
        # finalizer may run whose own call raises, which unsets the profiler. The outer call then
        # goes to freed memory ("'traceback' object is not callable").
        self._profiler = self._look

    def __enter__(self):
        self._collects = gc.isenabled()
        gc.disable()
        sys.setprofile(self._profiler)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        if self._collects:
            gc.enable()

    def _look(self, frame, event, argument):
        # A Condition that is interrupted while it is entered keeps its lock: Python's own, and met
        # by every start of a thread. So does logging, where it looks for a level the first time.
        if event not in ("call", "c_return") or frame.f_code.co_filename in _KEEP_THEIR_LOCKS:
            return
        if frame.f_code is AtCall.__exit__.__code__:  # it has to end what it has begun
            return
        self.number -= 1
        if self.number == 0:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            signal.raise_signal(self.signal_number)
