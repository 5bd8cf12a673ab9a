"""Pinned memory in which batches are made, so that the only copy is the one to the device.

A *piece* holds the large tensors of one batch. It is free again when nothing views it any more: the
transfer keeps a batch until its copy is done, and whoever else keeps a part of it keeps the piece.
So nobody has to say when memory may be written again, and nothing that is still in view can be
overwritten. A transfer looks whether a copy is done only when it needs the slab for another; so
whoever finds no piece asks it to look now. If all pieces are in use even so, a batch is made in
ordinary memory, and packed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ...engine.shared import Loans
from ...handlers import unless_of_handler
from ...locks import RLock
from .region import LimitedLocker, Region, mapped
from .slabs import ALIGNMENT, SMALL_BYTES, rounded_up

if TYPE_CHECKING:
    from torch import Tensor

    from .cuda import CudaBackend


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
