"""State that several threads share, correct with a GIL and without one.

Both classes are for the life of the process: each renews its lock in a forked child, where the
thread that held it may be gone.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class SharedCounter:
    """Numbers that no two callers share. ``itertools.count`` does not promise this, and
    some interpreters without a GIL break it.
    """

    def __init__(self, first: int = 0) -> None:
        self._next = first
        self._renew_lock()
        _call_in_forks(self._renew_lock)

    def __next__(self) -> int:
        with self._lock:
            number = self._next
            self._next = number + 1
        return number

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()  # re-entrant: a finalizer on this thread may count, too


class _Numbered(weakref.ref[T]):
    """A weak reference that knows the object's number when the object is gone."""

    __slots__ = ("number",)
    number: int


class LiveObjects(Generic[T]):
    """Objects that somebody holds, without keeping any of them alive.

    Any thread may add and list, also in a finalizer. A ``WeakSet`` fails with "Set changed size
    during iteration" if another thread adds to it during an iteration, and without a GIL also if
    one of its objects dies at that moment.
    """

    def __init__(self) -> None:
        self._found: dict[int, _Numbered[T]] = {}
        # Filled by the interpreter, on a thread that may hold any lock: so without one; and without
        # a line of Python, where Ctrl-C might come and be lost.
        self._gone: deque[_Numbered[T]] = deque()
        self._renew_lock()
        _call_in_forks(self._renew_lock)

    def add(self, thing: T) -> None:
        """List the object from now on, as long as it lives."""
        reference = _Numbered(thing, self._gone.append)
        reference.number = id(thing)
        with self._lock:
            self._forget_gone()
            self._found[reference.number] = reference

    def now(self) -> list[T]:
        """Return the objects that live, in the order in which they were added."""
        with self._lock:
            self._forget_gone()
            references = list(self._found.values())
        return [thing for each in references if (thing := each()) is not None]

    def clear(self) -> None:
        """List none of them any more."""
        with self._lock:
            self._found.clear()

    def _forget_gone(self) -> None:
        while self._gone:
            reference = self._gone.popleft()
            # Another object may have got the number since.
            if self._found.get(reference.number) is reference:
                del self._found[reference.number]

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()  # re-entrant: a finalizer on this thread may list, too


def _call_in_forks(function: Callable[[], None]) -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
