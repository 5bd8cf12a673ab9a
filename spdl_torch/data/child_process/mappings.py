"""The trainer's views of the slabs that its children write.

Where pages are locked for a GPU, which takes longer than to copy a batch, the slabs of a child that
has ended are kept with their descriptors, and the next child begins with them.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from ...engine.threads.shared_state import LiveObjects
from ...io._transfer.region import Region, mapped_file
from .messages import Free
from .shared_memory import HAS_DESCRIPTORS, GivenSlabs

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from ...io._transfer.kept import Shelf
    from .shared_memory import Ticket

_NOTHING_FREED = Free((), ())

_MOST_GIVEN = 64
"""The slabs that a child begins with: a fork server takes 252 descriptors for a child."""


class MappedSlabs:
    """The slabs that the trainer has mapped: those of one child, and when it has ended, perhaps of
    another.

    A process forked from the trainer shares this memory and the views that exist at that moment,
    which must never change for it. The slabs that are lent at a fork are therefore *spent*: when
    the trainer frees them they are dropped, not written again.
    """

    def __init__(self) -> None:
        self.regions: dict[int, Region] = {}
        self.num_made = 0
        """The number of the next slab: none is given twice, also to those that are not kept."""
        self.lent: set[int] = set()  # includes freed ones until they are read
        self.unread: deque[int] = deque()  # freed by finalizers, on any thread, without a lock
        self.free: list[int] = []  # read, and not reported yet
        self._descriptors: dict[int, int] = {}
        self._pid = os.getpid()
        self._spent: set[int] = set()
        with _no_fork:
            _live.add(self)

    def add(self, slab: int, region: Region) -> None:
        """Add a new slab."""
        self.regions[slab] = region
        self.num_made = max(self.num_made, slab + 1)

    def keep_descriptor(self, slab: int, descriptor: int) -> None:
        """Keep what another child needs to map a slab."""
        self._descriptors[slab] = descriptor

    def forget(self, slabs: tuple[int, ...]) -> None:
        """Unmap slabs that will not come again."""
        for slab in slabs:
            self.regions.pop(slab, None)
            descriptor = self._descriptors.pop(slab, -1)
            if descriptor >= 0:
                os.close(descriptor)

    def freed(self) -> Free:
        """Return the slabs that have become free since the last call."""
        with _no_fork:  # a fork on another thread must spend a slab before it is reported free
            self.read()
            free, self.free = self.free, []
            spent = self._spent.intersection(free)
            if not spent:
                return Free(tuple(free), ())
            self._spent -= spent
        self.forget(tuple(spent))
        return Free(tuple(slab for slab in free if slab not in spent), tuple(spent))

    def read(self) -> None:
        """Note which are not lent any more. Nobody may fork meanwhile."""
        while self.unread:
            slab = self.unread.popleft()
            self.lent.discard(slab)
            self.free.append(slab)

    def given(self) -> GivenSlabs:
        """Return what another child begins with, when the last one has ended. Slabs that are lent
        are reported to it when they are free.

        Raises: OSError: this process has no descriptor left.
        """
        self.freed()  # nobody else hears of these
        self.forget(tuple(self.regions.keys() - [*self._descriptors][:_MOST_GIVEN]))
        sizes = {slab: len(region) for slab, region in self.regions.items()}
        with _no_fork:  # or freed() is about to report one to the child that has ended
            free = sizes.keys() - self.lent
        given = GivenSlabs(sizes, free, self.num_made)
        for slab in sizes:
            given.add(os.dup(self._descriptors[slab]))
        return given

    def spend(self) -> None:
        """Mark all lent slabs as spent: a forked process may view them."""
        self._spent |= self.lent

    @property
    def num_bytes(self) -> int:
        """The size of their memory."""
        return sum(len(region) for region in tuple(self.regions.values()))

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # A forked process may have closed its copies, and have other files with their numbers.
        if not is_exiting() and os.getpid() == self._pid:
            self.forget(tuple(self._descriptors))


class Mappings:
    """The trainer's views of the slabs.

    The receiver lends slabs; their last tensor, and with it the slab, may be freed on any thread;
    the trainer's thread collects those that are free again.

    shelf: where slabs are taken from at first, and left at the end.
    """

    def __init__(
        self,
        most_held: int,
        *,
        lock: Callable[[mmap.mmap], Region] | None = None,
        shelf: Shelf | None = None,
    ) -> None:
        self.num_copied = 0
        """The number of batches that were copied out because the loop keeps many."""
        self._most_held = most_held
        self._region_of = lock or Region
        self._shelf = shelf if HAS_DESCRIPTORS else None
        self._slabs = MappedSlabs()
        self.given: GivenSlabs | None = None
        """What the child begins with; None = nothing."""
        if (slabs := shelf.take() if shelf else None) is not None:
            try:
                self.given, self._slabs = slabs.given(), slabs
            except OSError:  # this process has no descriptor left: the child makes its own
                pass

    def open(self, ticket: Ticket, descriptor: int | None) -> None:
        """Map a new slab, and close the descriptor, unless another child may need it."""
        if descriptor is None:
            memory = mmap.mmap(-1, ticket.size, ticket.tag)  # type: ignore[arg-type]  # Windows' tag
        else:
            try:
                memory = mapped_file(descriptor, ticket.size)
            except BaseException:
                os.close(descriptor)
                raise
            if self._shelf is None:
                os.close(descriptor)
            else:
                self._slabs.keep_descriptor(ticket.slab, descriptor)
        self._slabs.add(ticket.slab, self._region_of(memory))

    def lend(self, slab: int, num_bytes: int) -> np.ndarray[Any, Any]:
        """Return a slab's bytes to be viewed; when nothing views them any more, it is free."""
        slabs = self._slabs
        region = slabs.regions[slab]
        region.lock()  # in case it was refused before, when others had all that may be locked
        if self.num_held >= self._most_held:
            self.num_copied += 1
            copy = region.array(num_bytes).copy()
            self.give_back(slab)
            return copy
        slabs.lent.add(slab)
        return region.lent(num_bytes, partial(slabs.unread.append, slab))

    def give_back(self, slab: int) -> None:
        """Free a slab from which no batch was made."""
        self._slabs.lent.add(slab)
        self._slabs.unread.append(slab)

    def forget(self, slabs: tuple[int, ...]) -> None:
        """Unmap slabs that will not come again."""
        self._slabs.forget(slabs)

    def unmap(self) -> None:
        """Unmap the slabs of a child that sends nothing more, unless another child gets them: this
        one may still write there."""
        if self._shelf is None:
            self.close()

    def close(self) -> None:
        """Leave the slabs of a child that has ended to another, or unmap all of them. Batches that
        the loop still holds keep their own memory alive.
        """
        # The statistics keep this object: drop the device stage and the shelf from it.
        slabs, self._slabs = self._slabs, MappedSlabs()
        shelf, self._shelf, self._region_of = self._shelf, None, Region
        if shelf is not None:
            shelf.put(slabs)

    def freed(self) -> Free:
        """Return the slabs that have become free since the last call."""
        slabs = self._slabs
        return slabs.freed() if slabs.unread or slabs.free else _NOTHING_FREED

    @property
    def num_held(self) -> int:
        """The number of slabs that something views."""
        return len(self._slabs.lent) - len(self._slabs.unread)


_live: LiveObjects[MappedSlabs] = LiveObjects()

# Held by a forking thread during the fork, so that freed() on another thread waits for spend().
_no_fork = threading.RLock()


def _before_fork() -> None:
    _no_fork.acquire()
    for slabs in _live.now():
        slabs.read()  # those that nothing views are not spent


def _after_fork_in_parent() -> None:
    try:
        for slabs in _live.now():
            slabs.spend()
    finally:
        _no_fork.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork,
        after_in_parent=_after_fork_in_parent,
        after_in_child=_no_fork.release,
    )
