"""What threads share, correct with a GIL and without one: the lock of every ``with`` in the
package, what a forked process does to begin, counters and sets of live objects, and callables that
do not keep alive what they are for.

``SharedCounter`` and ``LiveObjects`` are for the life of the process.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

if sys.version_info[:2] == (3, 14):
    import _thread

    class RLock(_thread.RLock):
        """A lock that no signal's handler leaves held by raising between ``with`` and its block:
        3.14 alone looks for signals there, after the call (GH-148874). A property is no call.
        """

        __slots__ = ()
        _taken = property(_thread.RLock.acquire)

        def __enter__(self) -> bool:
            return self._taken

else:
    RLock = threading.RLock

_Call = TypeVar("_Call", bound=Callable[[], object])


def in_forked_child(function: _Call) -> _Call:
    """Decorate a function that every child calls which is forked from now on, as it begins."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
    return function


T = TypeVar("T")


class _Locked:
    """Has a lock, and another one in a forked child, where the thread that held it may be gone.
    Re-entrant: a finalizer on the thread may want it, too."""

    def __init__(self) -> None:
        self._renew_lock()
        in_forked_child(self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = RLock()


class SharedCounter(_Locked):
    """Numbers that no two callers share. ``itertools.count`` does not promise this, and
    some interpreters without a GIL break it.
    """

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self._next = first

    def __next__(self) -> int:
        with self._lock:
            number = self._next
            self._next = number + 1
        return number


class LiveObjects(_Locked, Generic[T]):
    """Objects that somebody holds, without keeping any of them alive.

    Any thread may add and list, also in a finalizer. A ``WeakSet`` fails with "Set changed size
    during iteration" if another thread adds to it during an iteration, and without a GIL also if
    one of its objects dies at that moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[int, weakref.ref[T]] = {}  # by their own numbers
        # Filled by the interpreter, on a thread that may hold any lock: so without one; and without
        # a line of Python, where Ctrl-C might come and be lost.
        self._gone: deque[weakref.ref[T]] = deque()

    def add(self, thing: T) -> None:
        """List the object, which is not listed yet, from now on, as long as it lives."""
        reference = weakref.ref(thing, self._gone.append)
        with self._lock:
            self._forget_gone()
            self._found[id(reference)] = reference

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
            self._found.pop(id(self._gone.popleft()), None)


class Loans(Generic[T]):
    """Values that are lent, each until its owner is gone, and those that are back.

    A value is back in one step of the interpreter's, on any thread, which may hold any lock: so
    without one; and without a line of Python, where Ctrl-C might come and be lost, as in a
    ``weakref.finalize``: training drops an owner with each batch.
    """

    def __init__(self) -> None:
        self._out: dict[int, tuple[weakref.ref[Any], T]] = {}  # by the numbers of references
        self._over: deque[weakref.ref[Any]] = deque()
        self._back: deque[T] = deque()

    def lend(self, owner: Any, value: T) -> None:
        """Lend a value as long as ``owner`` lives. Any thread may."""
        reference = weakref.ref(owner, self._over.append)
        self._out[id(reference)] = reference, value

    def give_back(self, value: T) -> None:
        """Have a value back that no owner has. Any thread may."""
        self._back.append(value)

    def __len__(self) -> int:
        """Return how many are back that were not taken."""
        return len(self._over) + len(self._back)

    def take_back(self) -> Iterator[T]:
        """Yield those that are back, once each. One thread at a time."""
        while self._over:
            _, value = self._out.pop(id(self._over.popleft()))
            self._back.append(value)
        while self._back:
            yield self._back.popleft()

    def lent(self) -> list[T]:
        """Return those that nobody has taken back, without those that were given back."""
        return [value for _, value in self._out.copy().values()]


def weakly(method: Any) -> Callable[..., None]:
    """Return the bound method without a reference to its object; without that, it does nothing.

    For threads and finalizers, which live until they have run: a reference of theirs to a run or a
    pool would keep alive for ever all that its ops or dataset refer to, perhaps the very object
    whose end is waited for.
    """
    # Not a WeakMethod, which has callbacks that print errors when the interpreter finalises.
    owner, function = weakref.ref(method.__self__), method.__func__

    def call(*args: Any) -> None:
        alive = owner()
        if alive is not None:
            function(alive, *args)

    return call


def lock_held_at_forks() -> RLock:
    """Return a lock that a thread which forks holds meanwhile, so that a child never finds it held
    by a thread that it has not got."""
    lock = RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
        )
    return lock
