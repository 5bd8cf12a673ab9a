"""Shared memory that is used over and over: the child writes batches, the trainer views them.

A *slab* holds one batch. The child makes it, without a name (``memfd_create``; where there is
none, a temporary file that is unlinked at once), and passes its descriptor to the trainer once. So
nothing has to be removed afterwards, however either side ends: the memory goes with the last
mapping.

A slab is free again when the last tensor of its batch dies in the trainer. Nobody waits for that:
if none is free the child makes another one. What bounds their number is that the trainer copies a
batch out, and sets its slab free, if the loop keeps more than a few.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from collections import deque
from typing import Any, NamedTuple, cast

import numpy as np

__all__ = ["Lease", "Mappings", "SlabPool", "Ticket"]

_STEP_BYTES = 64 * 1024

_HAS_DESCRIPTORS = os.name == "posix"


class Ticket(NamedTuple):
    """What a message says of a slab."""

    slab: int
    size: int
    is_new: bool
    """The trainer has not mapped it yet; behind the message follows the descriptor."""
    tag: str | None
    """Its name where there are no descriptors to pass (Windows), else None."""


class _Slab:
    """The child's side of one."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.is_new = True
        self.descriptor = -1
        self.tag: str | None = None
        if _HAS_DESCRIPTORS:
            self.descriptor = _anonymous_file()
            os.ftruncate(self.descriptor, size)
            self.memory = mmap.mmap(self.descriptor, size)
        else:
            self.tag = f"spdl-torch-{os.getpid()}-{number}"
            self.memory = mmap.mmap(-1, size, self.tag)  # type: ignore[arg-type]
        self.array: np.ndarray[Any, Any] = np.frombuffer(self.memory, np.uint8)

    def close_descriptor(self) -> None:
        """The trainer has it: the mappings are enough."""
        self.is_new = False
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close_descriptor()


class Lease:
    """A slab that is being written, or is on its way; gone before it was sent, it is free again."""

    __slots__ = ("_is_sent", "_pool", "slab")

    def __init__(self, pool: SlabPool, slab: _Slab) -> None:
        self._pool, self.slab, self._is_sent = pool, slab, False

    def ticket(self) -> Ticket:
        slab = self.slab
        return Ticket(slab.number, slab.size, slab.is_new, slab.tag)

    def sent(self) -> None:
        """The trainer has it now, and will tell when it is free."""
        self._is_sent = True
        self.slab.close_descriptor()

    def __del__(self) -> None:
        if not self._is_sent:
            self._pool.give_back(self.slab.number)


class SlabPool:
    """The child's slabs. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collection inside may drop a lease
        self._slabs: dict[int, _Slab] = {}
        self._free: list[int] = []
        self._retired: list[int] = []
        self._num_made = 0
        self._largest = 0

    def take(self, num_bytes: int) -> Lease:
        """A free slab of at least that many bytes, the one used last if there are several: its
        memory is warm. One that is too small is replaced by a new one.
        """
        with self._lock:
            self._largest = max(self._largest, _size_for(num_bytes))
            for place in range(len(self._free) - 1, -1, -1):
                if self._slabs[self._free[place]].size >= num_bytes:
                    return Lease(self, self._slabs[self._free.pop(place)])
            if self._free:
                number = self._free.pop()
                self._retired.append(number)
                del self._slabs[number]
            slab = _Slab(self._num_made, self._largest)
            self._num_made += 1
            self._slabs[slab.number] = slab
            return Lease(self, slab)

    def give_back(self, number: int) -> None:
        """Nobody views it any more."""
        with self._lock:
            if number in self._slabs:
                self._free.append(number)

    def retired(self) -> tuple[int, ...]:
        """Those that were replaced since the last call."""
        with self._lock:
            numbers, self._retired = tuple(self._retired), []
        return numbers


class Mappings:
    """The trainer's views of the slabs. The receiver lends them out, the trainer's thread asks
    which are free again; they become so on any thread.
    """

    def __init__(self, most_held: int, *, pin: bool) -> None:
        self.num_copied = 0
        """Batches that were copied out because the loop keeps many."""
        self._most_held = most_held
        self._pin = pin
        self._memory: dict[int, mmap.mmap] = {}
        self._freed: deque[int] = deque()
        self._num_lent = 0  # the receiver writes
        self._num_told = 0  # of those, how many are known to be free; the trainer's thread writes

    def open(self, ticket: Ticket, descriptor: int | None) -> None:
        """Map a new slab; the descriptor is closed."""
        if descriptor is None:
            memory = mmap.mmap(-1, ticket.size, ticket.tag)  # type: ignore[arg-type]
        else:
            try:
                # Its pages are there already, so that mapping them all at once is quick.
                flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
                memory = mmap.mmap(descriptor, ticket.size, flags=flags)
            finally:
                os.close(descriptor)
        if self._pin:
            _pin(memory)
        self._memory[ticket.slab] = memory

    def lend(self, slab: int, num_bytes: int) -> np.ndarray[Any, Any]:
        """Its bytes, to be viewed; when nothing views them any more it is free."""
        memory = self._memory[slab]
        if self._num_lent - self._num_told - len(self._freed) >= self._most_held:
            self.num_copied += 1
            copy = np.frombuffer(memory, np.uint8, num_bytes).copy()
            self.give_back(slab)
            return copy
        # Views of it have it as their base, because its own base is no array.
        owner: np.ndarray[Any, Any] = np.frombuffer(memory, np.uint8, num_bytes)
        self._num_lent += 1
        weakref.finalize(owner, self._freed.append, slab).atexit = False
        return owner

    def give_back(self, slab: int) -> None:
        """Nothing was made of it."""
        self._num_lent += 1
        self._freed.append(slab)

    def forget(self, slabs: tuple[int, ...]) -> None:
        """They will not come again."""
        for slab in slabs:
            self._memory.pop(slab, None)

    def close(self) -> None:
        """None will come again: what the loop still holds keeps its own memory."""
        self._memory.clear()

    def freed(self) -> tuple[int, ...]:
        """Those that have become free since the last call."""
        freed = []
        while self._freed:
            freed.append(self._freed.popleft())
        self._num_told += len(freed)
        return tuple(freed)

    @property
    def has_freed(self) -> bool:
        """Whether there is something to tell."""
        return bool(self._freed)


def _size_for(num_bytes: int) -> int:
    """Rounded up to an eighth of a power of two, so that batches which grow a little fit."""
    step = max(_STEP_BYTES, 1 << max(0, num_bytes.bit_length() - 4))
    return -(-num_bytes // step) * step


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("spdl-torch-slab")
    with tempfile.TemporaryFile() as file:  # unlinked at once
        return os.dup(file.fileno())


def _pin(memory: mmap.mmap) -> None:
    """Lock its pages for the GPU, which then copies out of it. If that fails, batches are staged
    through pinned memory as any other."""
    import torch

    address = np.frombuffer(memory, np.uint8).ctypes.data
    runtime: Any = cast("Any", torch.cuda).cudart()
    if int(runtime.cudaHostRegister(address, len(memory), 0)) == 0:
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
