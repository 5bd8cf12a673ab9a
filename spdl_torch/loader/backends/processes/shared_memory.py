"""Shared memory that is reused: the child writes batches, the trainer views them.

A *slab* holds one batch. The child makes it, without a name (``memfd_create``; where there is
none, a temporary file that is unlinked at once), and passes its descriptor to the trainer once. So
nothing has to be removed afterwards, however either side ends: the memory goes with the last
mapping.

A slab is free again when the last tensor of its batch has died in the trainer, and in the child,
where a dataset may keep samples that were made in the slab. Nobody waits for that: if none is free
the child makes another one. Their number is bounded because the trainer copies a batch out, and
frees its slab, if the loop keeps more than a few.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ....io._transfer.region import Region
from ....io._transfer.slabs import rounded_up
from .messages import Span, Ticket

if TYPE_CHECKING:
    from collections.abc import Callable


class _Slab:
    """The child's side of a slab."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.is_new = True
        self.descriptor = anonymous_file("spdl-torch-slab")
        os.ftruncate(self.descriptor, size)
        self.memory = mmap.mmap(self.descriptor, size)
        self.array: np.ndarray[Any, Any] = np.frombuffer(self.memory, np.uint8)
        self._address = int(self.array.ctypes.data)

    def has(self, address: int) -> bool:
        """Return whether an address lies in this slab."""
        return 0 <= address - self._address < self.size

    def span_of(self, content: np.ndarray[Any, Any]) -> Span | None:
        """Return the span of bytes that lie in this slab; None = they lie elsewhere."""
        offset = content.__array_interface__["data"][0] - self._address
        return Span(offset, content.nbytes) if 0 <= offset < self.size else None

    def write(self, span: Span, content: np.ndarray[Any, Any]) -> None:
        """Copy bytes to a span."""
        self.array[span.offset : span.offset + span.size] = content

    def close_descriptor(self) -> None:
        """Close the descriptor, which the trainer has received: the mappings are enough."""
        self.is_new = False
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_exiting():
            self.close_descriptor()


class Lease:
    """The use of a slab that is being written or sent. Dropped before it is sent, it frees the
    slab."""

    __slots__ = ("_is_sent", "_pool", "_tensor", "slab")

    def __init__(self, pool: SlabPool, slab: _Slab) -> None:
        self._pool, self.slab, self._is_sent = pool, slab, False
        self._tensor: torch.Tensor | None = None

    def room(self, start: int, num_bytes: int) -> torch.Tensor:
        """Return bytes of the slab, which is not leased again while anything here views them."""
        if self._tensor is None:
            self._tensor = self._pool.viewed(self.slab)
        return self._tensor[start : start + num_bytes]

    def ticket(self) -> Ticket:
        slab = self.slab
        return Ticket(slab.number, slab.size, slab.is_new)

    def sent(self) -> None:
        """Mark the slab as sent: the trainer has it now, and reports when it is free."""
        self._is_sent = True
        self._tensor = None
        self.slab.close_descriptor()

    def __del__(self) -> None:
        if not self._is_sent:
            self._pool.give_back(self.slab.number)


class SlabPool:
    """The child's slabs. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a garbage collection inside may drop a lease
        self._slabs: dict[int, _Slab] = {}
        self._free: list[int] = []
        self._retired: list[int] = []
        self._viewed: set[int] = set()  # includes those in _unviewed until take() looks
        self._unviewed: deque[int] = deque()  # by finalizers, on any thread, without a lock
        self._num_made = 0
        self._largest = 0
        self._is_known = False  # the size of a whole batch

    def take(self, num_bytes: int, *, is_guess: bool = False) -> Lease:
        """Lease a free slab of at least ``num_bytes``, preferably the one used last, whose memory
        is warm. If none is large enough, a new one replaces a free one: of that size or, where
        batches grow, up to an eighth larger.

        is_guess: the batch may turn out to be larger.
        """
        with self._lock:
            while self._unviewed:
                self._viewed.discard(self._unviewed.popleft())
            if num_bytes > self._largest:
                self._largest = rounded_up(num_bytes) if self._is_known else num_bytes
            self._is_known = self._is_known or not is_guess
            unseen = [n for n, number in enumerate(self._free) if number not in self._viewed]
            for index in reversed(unseen):
                if self._slabs[self._free[index]].size >= num_bytes:
                    return Lease(self, self._slabs[self._free.pop(index)])
            if unseen:
                number = self._free.pop(unseen[-1])
                self._retired.append(number)
                del self._slabs[number]
            slab = _Slab(self._num_made, self._largest)
            self._num_made += 1
            self._slabs[slab.number] = slab
            return Lease(self, slab)

    def viewed(self, slab: _Slab) -> torch.Tensor:
        """Return a leased slab's bytes for tensors of this process, which may outlive the lease."""
        owner = Region(slab.memory).array(slab.size)
        with self._lock:
            self._viewed.add(slab.number)
        weakref.finalize(owner, self._unviewed.append, slab.number).atexit = False
        return torch.from_numpy(owner)

    def give_back(self, number: int) -> None:
        """Take back a slab that the trainer does not view any more."""
        with self._lock:
            if number in self._slabs:
                self._free.append(number)

    def drop(self, number: int) -> None:
        """Drop a slab that the trainer is done with but that must not be written again."""
        with self._lock:
            self._slabs.pop(number, None)

    def retired(self) -> tuple[int, ...]:
        """Return the slabs replaced since the last call."""
        with self._lock:
            numbers, self._retired = tuple(self._retired), []
        return numbers


def anonymous_file(name: str) -> int:
    """Return the descriptor of a new file in memory; ``name`` shows in ``/proc/*/maps``."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:  # unlinked at once
        return os.dup(file.fileno())
