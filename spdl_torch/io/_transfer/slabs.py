"""Reused pinned memory, and the packing of a batch into it.

A GPU copies from page-locked memory without the CPU, but locking pages takes longer than the copy.
So a few *slabs* are locked once. Each batch is packed into one of them, with as few copies to the
device as possible: one for each large tensor, one for all small ones.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from .cuda import Event

ALIGNMENT = 512
"""The alignment in bytes that the CUDA allocator gives to every tensor, as kernels expect."""

SMALL_BYTES = 64 * 1024
"""The size below which tensors share one copy. Copying them takes 3 µs at 20 GB/s, less than
starting a copy; and a label that the user keeps does not keep an image alive."""


_GRAIN = 32_768  # elements; torch copies fewer on one thread

# numpy has no bfloat16; copying needs only the bits.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Slot(NamedTuple):
    """The memory of one tensor in a slab."""

    tensor: Tensor
    block: int
    """The number of its block in the layout."""
    offset: int
    """The offset in bytes from the start of the slab."""
    strides: tuple[int, ...]
    """The strides of the copy: the tensor's own if it has no holes."""


class Layout(NamedTuple):
    """The layout of a packed batch."""

    slots: list[Slot]
    blocks: list[tuple[int, int]]
    """The offset and size in bytes of each block, which is copied at once."""
    num_bytes: int


def plan(tensors: Sequence[Tensor]) -> Layout:
    """Lay out tensors one after the other, the small ones together at the end."""
    large = [tensor for tensor in tensors if tensor.nbytes >= SMALL_BYTES]
    small = [tensor for tensor in tensors if tensor.nbytes < SMALL_BYTES]
    slots: list[Slot] = []
    blocks: list[tuple[int, int]] = []
    end = 0
    for tensor in large:
        slots.append(Slot(tensor, len(blocks), end, dense_strides(tensor)))
        blocks.append((end, tensor.nbytes))
        end += _aligned(tensor.nbytes)
    start = end
    for tensor in small:
        slots.append(Slot(tensor, len(blocks), end, dense_strides(tensor)))
        end += _aligned(tensor.nbytes)
    if end > start:
        blocks.append((start, end - start))
    return Layout(slots, blocks, end)


def _aligned(num_bytes: int) -> int:
    return max(1, math.ceil(num_bytes / ALIGNMENT)) * ALIGNMENT


def rounded_up(num_bytes: int) -> int:
    """Round up to an eighth of a power of two, and to 64 KiB."""
    step = max(SMALL_BYTES, 1 << max(0, num_bytes.bit_length() - 4))
    return -(-num_bytes // step) * step


def dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of ``tensor.to(device)``: the tensor's own, or without the holes."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()


def typed(block: Tensor, slot: Slot, offset: int) -> Tensor:
    """Return the bytes of ``block`` from ``offset`` on, as a tensor like the one packed there.

    Not a view in autograd's sense: an operation with gradients may change a batch in place.
    """
    tensor = slot.tensor
    empty = torch.empty(0, dtype=tensor.dtype, device=block.device)
    start = block.storage_offset() + offset
    return empty.set_(block.untyped_storage(), start // tensor.itemsize, tensor.shape, slot.strides)


def copy_alone(target: Tensor, source: Tensor) -> None:
    """Copy ``source`` to ``target`` on this thread alone, unlike ``copy_``.

    torch would wake one thread for each core, and its own team for each thread that copies, which
    take the cores from decoding.
    """
    if source.numel() <= _GRAIN or source.is_conj() or source.is_neg():
        target.copy_(source)
        return
    bits = _BITS[source.itemsize]
    np.copyto(target.view(bits).numpy(), source.view(bits).numpy())


class Slab:
    """Pinned memory for one batch, and the event after which it is free again."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._memory: Tensor | None = None
        self._busy_until: Event | None = None
        self._sources: list[Any] = []

    def wait(self) -> None:
        """Wait until the copies of the previous batch are done."""
        event = self._busy_until
        if event is not None:
            event.synchronize()
        self._busy_until, self._sources = None, []

    def room(self, num_bytes: int) -> Tensor:
        """Return at least that many bytes: uint8, one dimension. Grows to the largest batch."""
        if self._memory is None:
            self._memory = self._allocate(max(num_bytes, SMALL_BYTES))
        elif self._memory.numel() < num_bytes:
            # Batches differ in size: take enough for one that is a little larger. One that is twice
            # as large is of another kind: before it, only parts of batches had to be packed.
            is_alike = num_bytes < 2 * self._memory.numel()
            self._memory = None  # frees the old memory before it takes new
            self._memory = self._allocate(rounded_up(num_bytes) if is_alike else num_bytes)
        return self._memory

    def busy_until(self, event: Event, sources: Sequence[Any]) -> None:
        """Mark the slab and ``sources`` as in use by copies that are done at ``event``."""
        self._busy_until, self._sources = event, list(sources)

    @property
    def num_bytes(self) -> int:
        """The size of its memory."""
        memory = self._memory
        return 0 if memory is None else memory.nbytes

    def let_go(self) -> None:
        """Let go of the sources if the copies are done. Never blocks; any thread may call it."""
        # In this order: if the slab is taken meanwhile, the event is that of later copies.
        sources, event = self._sources, self._busy_until
        try:
            if sources and event is not None and event.query():
                sources.clear()
        except RuntimeError:
            pass  # the device has failed: whoever takes the slab gets the error, and says where


class SlabRing:
    """Slabs in turn: one is packed while the previous one is copied."""

    def __init__(
        self, allocate: Callable[[int], Tensor], num_slabs: int, *, at_once: bool = False
    ) -> None:
        """``at_once``: all have memory before the first batch, and so the first step, begins."""
        self._pid = os.getpid()
        self._is_wanted = at_once
        self._slabs = [Slab(allocate) for _ in range(num_slabs)]
        self._next = 0

    def take(self) -> Slab:
        """Return the least recently used slab; waits until its copies are done."""
        slab = self._slabs[self._next]
        slab.wait()
        # Only after the wait, which may raise: then the same slab is next.
        self._next = (self._next + 1) % len(self._slabs)
        return slab

    def room(self, slab: Slab, num_bytes: int) -> Tensor:
        """Return at least that many bytes of the slab that was taken; see ``Slab.room``."""
        if self._is_wanted and num_bytes:
            for each in self._slabs:
                each.room(num_bytes)
            self._is_wanted = False
        return slab.room(num_bytes)

    @property
    def num_bytes(self) -> int:
        """The size of their memory."""
        return sum(slab.num_bytes for slab in self._slabs)

    def let_go(self) -> None:
        """Let go of whatever has been copied. Never blocks; any thread may call it."""
        for slab in self._slabs:
            slab.let_go()

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        # The device may still copy from the slabs and from the tensors that they hold: wait before
        # they go. In a forked process the events are the parent's.
        if not is_exiting() and os.getpid() == self._pid:
            for slab in self._slabs:
                slab.wait()
