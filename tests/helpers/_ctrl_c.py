"""Ctrl-C at a chosen call or time, and what a loader might leave then."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
from time import monotonic

import psutil
from _gates import shared_memory_of
from _loader_helpers import PATIENCE_SECONDS
from test_isolation import num_mapped_slabs


class AtCall:
    """Interrupts the main thread at a certain one of the places where Python looks for signals:
    where a function begins, and where one that is written in C has returned.

    Garbage is not collected meanwhile. What a collection finds depends on the tests before, and
    Ctrl-C in a finalizer is only printed.
    """

    def __init__(self, number):
        self.number = number
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
        # by every start of a thread.
        if event not in ("call", "c_return") or frame.f_code.co_filename == threading.__file__:
            return
        if frame.f_code is AtCall.__exit__.__code__:  # it has to end what it has begun
            return
        self.number -= 1
        if self.number == 0:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            signal.raise_signal(signal.SIGINT)


class AtTime:
    """Interrupts the main thread so many seconds later, wherever it is: in a wait, too."""

    def __init__(self, seconds):
        self.where = f"after {seconds} s"
        self.seconds = seconds

    def __enter__(self):
        self.before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)
        return self

    def __exit__(self, *_):
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)


def belongings():
    """What a loader might leave."""
    gc.collect()
    return {
        "threads": [t.name for t in threading.enumerate() if t.ident and "spdl" in t.name],
        "children": sorted(p.pid for p in psutil.Process().children(recursive=True)),
        "processes": [p.name for p in multiprocessing.active_children()],
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "slabs": num_mapped_slabs(),
        "names": shared_memory_of(os.getpid()),
    }


def assert_nothing_is_left(before, where):
    """Without further help, as soon as the child has ended."""
    end = monotonic() + PATIENCE_SECONDS
    while (left := belongings()) != before:
        assert monotonic() < end, f"{where}: {left} instead of {before}"
        threading.Event().wait(0.005)
