"""Memory with locked pages, from which a GPU copies without the CPU."""

from __future__ import annotations

import mmap
import os
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ...engine.shared import LiveObjects, Loans

if TYPE_CHECKING:
    from .cuda import CudaBackend
    from .kept import TransferKeeper

T = TypeVar("T")


def mapped(num_bytes: int) -> mmap.mmap:
    """Return new memory that can be locked at once: its pages are there.

    The driver has one lock for all of CUDA, which it holds while it has the system find pages:
    nobody could launch a kernel meanwhile. Touching them here needs neither that nor the GIL. It is
    a shared mapping: the pages of a private one move when a process writes to it after a fork, and
    the device would go on reading the old ones.
    """
    memory = mmap.mmap(-1, max(1, num_bytes))
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE].fill(0)
    return memory


def mapped_file(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Return a file in memory, mapped with all of its pages.

    MAP_POPULATE would find them under the GIL, which is most of what mapping takes. Reading a byte
    of each needs no GIL, and changes nothing that another process has written.
    """
    memory = mmap.mmap(descriptor, num_bytes)
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE].max()
    return memory


keepers: LiveObjects[TransferKeeper] = LiveObjects()
"""Those of this process. What they keep goes when the system refuses to lock more."""


class LimitedLocker:
    """Locks the pages of at most ``most`` regions at once: one bound shared by several owners, each
    of which goes on with unlocked memory where it is refused. Any thread may use it.
    """

    def __init__(self, locker: CudaBackend, most: int) -> None:
        self._locker = locker
        self._most = most
        # Without a lock: a region may be unlocked by a finalizer, in the middle of anything.
        self._permits: deque[None] = deque([None] * most)
        self._is_refused = False  # by the system, which would refuse again

    @property
    def has_room(self) -> bool:
        """Whether the system would be asked to lock one more."""
        return bool(self._permits) and not self._is_refused

    def grow(self, most: int) -> None:
        """Allow more regions, and ask a system again that has refused."""
        self._is_refused = False
        self._permits.extend([None] * max(0, most - self._most))
        self._most = max(self._most, most)

    def region(self, memory: mmap.mmap) -> Region:
        """Return a region of that memory, locked if the bound allows; else its ``lock`` may."""
        return Region(memory, self)

    def lock_pages(self, address: int, num_bytes: int) -> bool:
        """Lock pages; return False if the system or the bound refuses."""
        if self._is_refused:
            return False
        try:
            self._permits.pop()
        except IndexError:
            return False
        is_locked = self._locker.lock_pages(address, num_bytes)
        self._is_refused = not is_locked
        return is_locked

    def unlock_pages(self, address: int) -> None:
        """Unlock the pages of memory that is still mapped."""
        self._locker.unlock_pages(address)
        self._permits.append(None)

    def lend(
        self, owner: np.ndarray[Any, Any], region: Region, give_back: Callable[[], object]
    ) -> None:
        """Call ``give_back`` when nothing views ``owner``, and nothing reads its locked memory."""
        self._locker.lend(owner, region, give_back)


class Region:
    """An mmap whose pages stay locked as long as anything views it.

    The pages must be unlocked before the mapping goes: afterwards another mapping may have the
    address, and would be unlocked in its place. A dying mmap is unmapped before its finalizers
    run. So every array of it holds this object, which unlocks and then lets go of the mmap.
    """

    def __init__(
        self, memory: mmap.mmap, locker: CudaBackend | LimitedLocker | None = None
    ) -> None:
        self._locker: CudaBackend | LimitedLocker | None = None  # who has locked it
        self._memory = memory
        self._address = int(np.frombuffer(memory, np.uint8).ctypes.data)
        self._pid = os.getpid()
        self._wanted = locker
        self.lock()

    def lock(self) -> None:
        """Lock the pages, unless they are locked, or the locker refuses."""
        locker = self._wanted
        if self._locker is not None or locker is None:
            return
        if locker.lock_pages(self._address, len(self._memory)):
            self._locker = locker

    def __len__(self) -> int:
        """Return the size in bytes."""
        return len(self._memory)

    @property
    def is_locked(self) -> bool:
        """Whether the pages are locked."""
        return self._locker is not None

    def array(self, num_bytes: int) -> np.ndarray[Any, Any]:
        """Return the first bytes. The array has no base, so it is the base of all its views."""
        return np.asarray(_Exposed(self, self._address, num_bytes))

    def lent(self, num_bytes: int, loans: Loans[T], value: T) -> np.ndarray[Any, Any]:
        """Return the first bytes. ``value`` is back when they may be written again: nothing views
        them, and where they are locked, no copy reads them any more.
        """
        owner = self.array(num_bytes)
        if self._locker is None:  # CUDA has read such memory when the call returns
            loans.lend(owner, value)
        else:
            self._locker.lend(owner, self, partial(loans.give_back, value))
        return owner

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # At exit the system unlocks everything. In a forked process the lock is the parent's.
        if self._locker is not None and not is_exiting() and os.getpid() == self._pid:
            self._locker.unlock_pages(self._address)


class _Exposed:
    """The array interface of a region; numpy keeps this object as long as the array lives."""

    def __init__(self, region: Region, address: int, num_bytes: int) -> None:
        self._region = region
        self.__array_interface__ = {
            "version": 3,
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
        }
