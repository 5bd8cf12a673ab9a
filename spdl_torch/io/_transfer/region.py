"""Memory with locked pages, from which a GPU can copy by itself."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable

__all__ = ["PageLocker", "Region"]


class PageLocker(Protocol):
    """The device that locks pages."""

    def lock_pages(self, address: int, num_bytes: int) -> bool:
        """Lock pages; return False if the system refuses."""
        ...

    def unlock_pages(self, address: int) -> None:
        """Unlock the pages of memory that is still mapped."""
        ...


class Region:
    """An mmap whose pages stay locked for as long as anything views it.

    The lock has to go before the mapping does: afterwards another mapping may have the address,
    and would be unlocked in its place. An mmap that dies unmaps first and is finalized second. So
    every array of it holds this object, which unlocks and then lets go of the mmap.
    """

    def __init__(self, memory: mmap.mmap, locker: PageLocker | None = None) -> None:
        self._locker = None
        self._memory = memory
        self._address = int(np.frombuffer(memory, np.uint8).ctypes.data)
        self._pid = os.getpid()
        if locker is not None and locker.lock_pages(self._address, len(memory)):
            self._locker = locker

    @property
    def is_locked(self) -> bool:
        """Whether the pages are locked."""
        return self._locker is not None

    def array(self, num_bytes: int) -> np.ndarray[Any, Any]:
        """The first bytes. Every view of this array has it as its base: it has none itself."""
        return np.asarray(_Window(self, self._address, num_bytes))

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # At exit everything goes by itself. In a forked process the lock is the parent's.
        if self._locker is not None and not is_exiting() and os.getpid() == self._pid:
            self._locker.unlock_pages(self._address)


class _Window:
    """What numpy asks for a pointer; it keeps this object for as long as the array lives."""

    def __init__(self, region: Region, address: int, num_bytes: int) -> None:
        self._region = region
        self.__array_interface__ = {
            "version": 3,
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
        }
