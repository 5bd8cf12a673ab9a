"""The trainer's views of the slabs that its children write."""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from ....engine.shared import LiveObjects
from ....io._transfer.region import Region, mapped_file
from .messages import Free

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import numpy as np

    from .wire import File

_NOTHING_FREED = Free((), ())


class Mappings:
    """The trainer's views of the slabs of one child.

    Whoever reads batches lends slabs; their last tensor, and with it the slab, may be freed on any
    thread; the trainer's thread collects those that are free again.

    A process forked from the trainer shares this memory and the views that exist at that moment,
    which must never change for it. The slabs that are lent at a fork are therefore *spent*: when
    the trainer frees them they are dropped, not written again.
    """

    def __init__(
        self, most_held: int, *, lock: Callable[[mmap.mmap], Region] | None = None
    ) -> None:
        self.num_copied = 0
        """The number of batches that were copied out because the loop keeps many."""
        self.regions: dict[int, Region] = {}
        """The slabs that are mapped, by number."""
        self._most_held = most_held
        self._region_of = lock or Region
        self._lent: set[int] = set()  # includes freed ones until they are read
        self._unread: deque[int] = deque()  # freed by finalizers, on any thread, without a lock
        self._free: list[int] = []  # read, and not reported yet
        self._spent: set[int] = set()
        with _no_fork:
            _live.add(self)

    def open(self, slab: int, size: int, file: File) -> None:
        """Map a new slab, and close its file. Its pages are found when they are read: the loop may
        be waiting here."""
        find = mmap.mmap if self._region_of is Region else mapped_file
        try:
            memory = find(file, size)
        finally:
            file.close()
        self.regions[slab] = self._region_of(memory)

    def lend(self, slab: int, num_bytes: int) -> np.ndarray[Any, Any]:
        """Return a slab's bytes to be viewed; when nothing views them any more, it is free."""
        region = self.regions[slab]
        region.lock()  # in case it was refused before, when others had all that may be locked
        if self.num_held >= self._most_held:
            self.num_copied += 1
            copy = region.array(num_bytes).copy()
            self.give_back(slab)
            return copy
        self._lent.add(slab)
        return region.lent(num_bytes, partial(self._unread.append, slab))

    def give_back(self, slab: int) -> None:
        """Free a slab from which no batch was made."""
        self._lent.add(slab)
        self._unread.append(slab)

    def forget(self, slabs: Iterable[int]) -> None:
        """Unmap slabs that will not come again."""
        for slab in slabs:
            self.regions.pop(slab, None)

    def close(self) -> None:
        """Unmap the slabs of a child that sends nothing more. Batches that the loop still holds
        keep their own memory alive.
        """
        self.regions.clear()
        self._region_of = Region  # the statistics keep this object: drop the device stage from it

    def freed(self) -> Free:
        """Return the slabs that have become free since the last call."""
        if not (self._unread or self._free):
            return _NOTHING_FREED
        with _no_fork:  # a fork on another thread must spend a slab before it is reported free
            self.read()
            free, self._free = self._free, []
            spent = self._spent.intersection(free)
            if not spent:
                return Free(tuple(free), ())
            self._spent -= spent
        self.forget(spent)
        return Free(tuple(slab for slab in free if slab not in spent), tuple(spent))

    @property
    def num_held(self) -> int:
        """The number of slabs that something views."""
        return len(self._lent) - len(self._unread)

    def read(self) -> None:
        """Note which are not lent any more. Nobody may fork meanwhile."""
        while self._unread:
            slab = self._unread.popleft()
            self._lent.discard(slab)
            self._free.append(slab)

    def spend(self) -> None:
        """Mark all lent slabs as spent: a forked process may view them."""
        self._spent |= self._lent


_live: LiveObjects[Mappings] = LiveObjects()

# Held by a forking thread during the fork, so that freed() on another thread waits for spend().
_no_fork = threading.RLock()


def _before_fork() -> None:
    _no_fork.acquire()
    for each in _live.now():
        each.read()  # those that nothing views are not spent


def _after_fork_in_parent() -> None:
    try:
        for each in _live.now():
            each.spend()
    finally:
        _no_fork.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_no_fork.release,
    )
