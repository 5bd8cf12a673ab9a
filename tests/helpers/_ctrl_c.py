"""Ctrl-C at a chosen time, and what a loader might leave then."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from time import monotonic

import psutil
from _gates import shared_memory_of
from _isolated import num_mapped_slabs, release_what_has_ended
from _loader_helpers import PATIENCE_SECONDS


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
    """When the next loader has begun, as soon as the child has ended."""
    release_what_has_ended()
    end = monotonic() + PATIENCE_SECONDS
    while (left := belongings()) != before:
        assert monotonic() < end, f"{where}: {left} instead of {before}"
        threading.Event().wait(0.005)
