"""Start a thread such that Ctrl-C, whenever it comes, leaves the new thread able to run.

``Thread.start`` waits for an Event. Ctrl-C inside that wait, which is written in Python, may leave
the Event's lock held for ever (3.11 to 3.13); then the new thread, which sets the Event first of
all, never comes to its target and never ends. (Met twice in 2,500 random interrupts of loaders.)
"""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["start"]


def start(thread: threading.Thread) -> None:
    """Start the thread, as ``thread.start()`` does."""
    mine: Any = thread
    # A private name of Python; where it is missing, or is no Event, the thread starts as always.
    if isinstance(getattr(mine, "_started", None), threading.Event):
        mine._started = _Started()
    thread.start()


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
        if not self._is_set and self._unset.acquire(timeout=-1 if timeout is None else timeout):
            self._unset.release()  # for whoever waits next
        return self._is_set

    def _at_fork_reinit(self) -> None:
        self._unset = threading.Lock()
        if not self._is_set:
            self._unset.acquire()
