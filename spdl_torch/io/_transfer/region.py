"""Memory with locked pages, from which a GPU copies without the CPU; and batches that are made in
such memory, so that the only copy is the one to the device.

A *piece* holds the large tensors of one batch. It is free again when nothing views it any more: the
transfer keeps a batch until its copy is done, and whoever else keeps a part of it keeps the piece.
So nobody has to say when memory may be written again, and nothing that is still in view can be
overwritten. A transfer looks whether a copy is done only when it needs the slab for another; so
whoever finds no piece asks it to look now. If all pieces are in use even so, a batch is made in
ordinary memory, and packed.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from ...handlers import unless_of_handler
from ...locks import LiveObjects, Loans, RLock
from .slabs import ALIGNMENT, SMALL_BYTES, rounded_up

if TYPE_CHECKING:
    from torch import Tensor

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
        self._locker, self._most = locker, most
        self.readers = locker.readers
        """What is lent of the memory that it has locked."""
        # Without a lock: a region may be unlocked by a finalizer, in the middle of anything.
        self._permits: deque[None] = deque([None] * most)
        self._is_refused = False  # by the system, which would refuse again until some are unlocked

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
        if not is_locked:
            self._is_refused = True
            self._permits.append(None)
        return is_locked

    def unlock_pages(self, address: int) -> None:
        """Unlock the pages of memory that is still mapped."""
        self._locker.unlock_pages(address)
        self._permits.append(None)
        self._is_refused = False


class Mapped:
    """An mmap, from which tensors are made."""

    is_locked = False
    """Whether the pages are locked."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._address = int(np.frombuffer(memory, np.uint8).ctypes.data)

    def lock(self) -> None:
        """Lock the pages, if they are to be locked and are not."""

    def __len__(self) -> int:
        """Return the size in bytes."""
        return len(self._memory)

    def array(self, num_bytes: int) -> np.ndarray[Any, Any]:
        """Return the first bytes. The array has no base, so it is the base of all its views."""
        return np.asarray(_Exposed(self, self._address, num_bytes))

    def lent(self, num_bytes: int, loans: Loans[T], value: T) -> np.ndarray[Any, Any]:
        """Return the first bytes. ``value`` is back when they may be written again: nothing views
        them, and where they are locked, no copy reads them any more.
        """
        owner = self.array(num_bytes)
        loans.lend(owner, value)  # CUDA has read such memory when the call returns
        return owner


class Region(Mapped):
    """An mmap whose pages stay locked as long as anything views it.

    The pages must be unlocked before the mapping goes: afterwards another mapping may have the
    address, and would be unlocked in its place. A dying mmap is unmapped before its finalizers
    run. So every array of it holds this object, which unlocks and then lets go of the mmap.
    """

    def __init__(self, memory: mmap.mmap, locker: CudaBackend | LimitedLocker) -> None:
        super().__init__(memory)
        self._locker = locker
        self._pid = os.getpid()
        self.lock()

    def lock(self) -> None:
        """Lock the pages, unless they are locked, or the locker refuses."""
        if not self.is_locked:
            self.is_locked = self._locker.lock_pages(self._address, len(self._memory))

    def lent(self, num_bytes: int, loans: Loans[T], value: T) -> np.ndarray[Any, Any]:
        if not self.is_locked:
            return super().lent(num_bytes, loans, value)
        owner = self.array(num_bytes)
        self._locker.readers.lend(owner, self, partial(loans.give_back, value))
        return owner

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # At exit the system unlocks everything. In a forked process the lock is the parent's.
        if self.is_locked and not is_exiting() and os.getpid() == self._pid:
            self._locker.unlock_pages(self._address)


class _Exposed:
    """The array interface of a region; numpy keeps this object as long as the array lives."""

    def __init__(self, region: Mapped, address: int, num_bytes: int) -> None:
        self._region = region
        self.__array_interface__ = {
            "version": 3,
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


class BatchMemory:
    """At most ``most_pieces`` pieces of pinned memory, made when they are needed. Each is as large
    as the largest batch so far; where batches grow, up to an eighth larger. Any thread may use it.

    A thread that makes a batch calls ``begin``, then ``room`` for each of its tensors, then
    ``end``.
    """

    def __init__(self, locker: CudaBackend, most_pieces: int, let_go: Callable[[], None]) -> None:
        """``let_go``: called where no piece is free, to free those that have been copied."""
        self._locker = LimitedLocker(locker, most_pieces)
        self.let_go = let_go
        self._lock = RLock()
        self._free: list[Region] = []
        self._loans: Loans[Region] = Loans()
        self._largest = 0
        self._expected = 0  # the bytes of the last batch
        self._is_known = False  # the size of a whole batch
        self._current = _Current()  # of each thread

    def grow(self, most_pieces: int) -> None:
        """Allow more pieces, for a loader that prefetches more."""
        self._locker.grow(most_pieces)

    @property
    def free_bytes(self) -> int:
        """The bytes of the pieces that nothing uses."""
        with self._lock:
            self._free.extend(self._loans.take_back())
            return sum(map(len, self._free))

    def begin(self) -> None:
        """Begin a batch on this thread."""
        self._current.piece, self._current.asked = None, 0

    def room(self, num_bytes: int) -> Tensor | None:
        """Return memory for a tensor of the thread's batch: uint8, one dimension, pinned; None =
        take any other: the tensor is small, or there is no piece with room for it.
        """
        if num_bytes < SMALL_BYTES:
            return None
        current, start = self._current, self._current.asked
        current.asked = start + -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if start == 0:
            # The first tensor takes the piece for all of them, as many as the last batch had.
            current.piece = self._take(max(self._expected, current.asked))
        if current.piece is None or start + num_bytes > len(current.piece):
            return None
        return current.piece[start : start + num_bytes]

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in the piece that holds the thread's batch."""
        piece = self._current.piece
        return piece is not None and _start_of(tensor) == _start_of(piece)

    def end(self) -> None:
        """Let go of the batch: from here on its tensors alone keep the piece."""
        if self._current.asked:
            self._expected = self._current.asked
        self.begin()

    def _take(self, num_bytes: int) -> Tensor | None:
        if not (self._free or self._loans or self._locker.has_room):
            self.let_go()  # without the lock: it asks the device
        with self._lock:
            self._free.extend(self._loans.take_back())
            large = [piece for piece in self._free if len(piece) >= num_bytes]
            piece = large[-1] if large else None
            if piece is not None:
                self._free.remove(piece)
            elif not self._locker.has_room:
                if not self._free:
                    return None
                self._free.pop()  # too small: it makes room for one that is not
            size = self._size_for(num_bytes)
        if piece is None:
            piece = self._new(size)  # without the lock: locking pages takes milliseconds
        return None if piece is None else self._lent(piece, num_bytes)

    def _size_for(self, num_bytes: int) -> int:
        if num_bytes > self._largest:
            self._largest = rounded_up(num_bytes) if self._is_known else num_bytes
        self._is_known = self._expected > 0  # the first batch asks for its first tensor alone
        return self._largest

    def _new(self, size: int) -> Region | None:
        try:
            piece = self._locker.region(mapped(size))
        except unless_of_handler(OSError):  # there is not that much memory
            return None
        return piece if piece.is_locked else None

    def _lent(self, piece: Region, num_bytes: int) -> Tensor:
        return torch.from_numpy(piece.lent(num_bytes, self._loans, piece))


def _start_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Current(threading.local):
    """The batch that a thread makes."""

    piece: Tensor | None = None
    asked: int = 0
    """The bytes that its tensors take, also those that found no room."""
