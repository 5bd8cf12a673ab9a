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
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ....io._transfer.region import Region
from ....io._transfer.slabs import rounded_up
from .wire import anonymous_file

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .messages import Span
    from .wire import File


class Slab:
    """The child's side of a slab."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        file = anonymous_file("spdl-torch-slab", size)
        self.memory = mmap.mmap(file, size)
        self.file: File | None = file
        """Its file, until the trainer is sent it: the mappings are enough."""
        self.array: np.ndarray[Any, Any] = np.frombuffer(self.memory, np.uint8)
        self._address = int(self.array.ctypes.data)

    def has(self, address: int) -> bool:
        """Return whether an address lies in this slab."""
        return 0 <= address - self._address < self.size

    def span_of(self, content: np.ndarray[Any, Any]) -> Span | None:
        """Return the span of bytes that lie in this slab; None = they lie elsewhere."""
        offset = content.__array_interface__["data"][0] - self._address
        return (offset, content.nbytes) if 0 <= offset < self.size else None

    def write(self, offset: int, content: np.ndarray[Any, Any]) -> None:
        """Copy bytes to that place."""
        self.array[offset : offset + content.nbytes] = content


class SlabPool:
    """The child's slabs. The worker's thread alone uses it; a slab is with the one that took it
    until it is given back."""

    def __init__(self) -> None:
        self._slabs: dict[int, Slab] = {}
        self._free: list[int] = []
        self._retired: list[int] = []
        self._viewed: set[int] = set()  # includes those in _unviewed until take() looks
        self._unviewed: deque[int] = deque()  # by finalizers, on any thread, without a lock
        self._num_made = 0
        self._largest = 0
        self._is_known = False  # the size of a whole batch

    def take(self, num_bytes: int, *, is_guess: bool = False) -> Slab:
        """Take a free slab of at least ``num_bytes``, preferably the one used last, whose memory is
        warm. If none is large enough, a new one replaces a free one: of that size or, where batches
        grow, up to an eighth larger.

        is_guess: the batch may turn out to be larger.
        """
        while self._unviewed:
            self._viewed.discard(self._unviewed.popleft())
        if num_bytes > self._largest:
            self._largest = rounded_up(num_bytes) if self._is_known else num_bytes
        self._is_known = self._is_known or not is_guess
        unseen = [n for n, number in enumerate(self._free) if number not in self._viewed]
        for index in reversed(unseen):
            if self._slabs[self._free[index]].size >= num_bytes:
                return self._slabs[self._free.pop(index)]
        if unseen:
            number = self._free.pop(unseen[-1])
            self._retired.append(number)
            del self._slabs[number]
        slab = Slab(self._num_made, self._largest)
        self._num_made += 1
        self._slabs[slab.number] = slab
        return slab

    def viewed(self, slab: Slab) -> torch.Tensor:
        """Return a slab's bytes for tensors of this process. While one of them lives, nobody gets
        the slab, even if it was given back."""
        owner = Region(slab.memory).array(slab.size)
        self._viewed.add(slab.number)
        weakref.finalize(owner, self._unviewed.append, slab.number).atexit = False
        return torch.from_numpy(owner)

    def freed(self, slabs: Iterable[int], spent: Iterable[int]) -> None:
        """Take back slabs that the trainer does not view any more; drop those that must not be
        written again."""
        self._free += [number for number in slabs if number in self._slabs]
        for number in spent:
            self._slabs.pop(number, None)

    def retired(self) -> tuple[int, ...]:
        """Return the slabs replaced since the last call."""
        numbers, self._retired = tuple(self._retired), []
        return numbers
