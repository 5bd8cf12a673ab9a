"""Shared memory that is reused: the child packs batches into it, the trainer views them.

A *slab* holds the large blocks of one batch, which are copied once: into it. torch's
``default_collate``, the rows of a ``TensorDataset`` and the batch kernel write straight into it.
The child makes it, without a name (``memfd_create``; where there is
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
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ....io._transfer.region import Mapped, mapped_file
from ....io._transfer.slabs import rounded_up
from ....locks import LiveObjects, Loans, lock_held_at_forks
from ...fetching.collating import LARGE_BYTES
from .pickling import pickled
from .wire import Free, Packed, anonymous_file

if TYPE_CHECKING:
    from .wire import File, Span


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
        self._viewed: set[int] = set()  # also those that are back, until take() looks
        self._views: Loans[int] = Loans()
        self._num_made = 0
        self._largest = 0
        self._is_known = False  # the size of a whole batch

    def take(self, num_bytes: int, *, is_guess: bool = False) -> Slab:
        """Take a free slab of at least ``num_bytes``, preferably the one used last, whose memory is
        warm. If none is large enough, a new one replaces a free one: of that size or, where batches
        grow, up to an eighth larger.

        is_guess: the batch may turn out to be larger.
        """
        self._viewed.difference_update(self._views.take_back())
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
        owner = Mapped(slab.memory).array(slab.size)
        self._viewed.add(slab.number)
        self._views.lend(owner, slab.number)
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


_ALIGNMENT = 128  # bytes; at least torch's alignment of tensors in host memory
_INLINE_BYTES = 2 * 1024  # a longer pickle lies in the slab, so that no message is long


class SlabWriter:
    """Offers space in slabs for batches, and packs them, one at a time: the worker, on its own
    thread, calls ``begin``, ``room`` for each large tensor, ``pack``, and ``sent``. A batch that
    gets no further leaves its slab to the next one.
    """

    def __init__(self) -> None:
        self.slabs = SlabPool()
        self.slab: Slab | None = None
        """The slab of the batch; None = it needs none yet."""
        self._view: torch.Tensor | None = None  # of the slab, for tensors that are made there
        self._is_packed = False
        self._end = 0  # of what lies in the slab
        self._expected = 0  # the bytes of the previous batch

    def begin(self) -> None:
        """Begin a batch."""
        slab, self.slab, self._view = self.slab, None, None
        if slab is not None:
            self.slabs.freed((slab.number,), ())
        self._is_packed, self._end = False, 0

    def room(self, num_bytes: int) -> torch.Tensor | None:
        """Return bytes of the batch's slab for a tensor: uint8, one dimension; None = use other
        memory: the tensor is small, or does not fit.
        """
        if num_bytes < LARGE_BYTES:
            return None
        if self.slab is None:
            # The first batch cannot know how many tensors follow.
            is_guess = self._expected == 0
            self.slab = self.slabs.take(max(self._expected, num_bytes), is_guess=is_guess)
        start = self._end
        if start + num_bytes > self.slab.size:
            return None
        if self._view is None:
            self._view = self.slabs.viewed(self.slab)
        self._end = _aligned(start + num_bytes)
        return self._view[start : start + num_bytes]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in the slab of the batch."""
        address = tensor.untyped_storage().data_ptr()
        return self.slab is not None and self.slab.has(address)

    def end(self) -> None:
        """Do nothing: ``pack`` ends the batch."""

    def pack(self, batch: Any) -> Packed:
        """Pack a batch on the worker that made it. Large copies release the GIL.

        Raises: what pickle raises on a part that cannot be pickled.
        """
        if self._is_packed:
            self.begin()
        body, contents = pickled(batch)
        is_long = len(body) > _INLINE_BYTES
        if is_long:
            contents.append(np.frombuffer(body, np.uint8))
        blocks = tuple(self._placed(contents)) if contents else ()
        if not contents:
            self.begin()  # it needs no slab
        self._view, self._is_packed = None, True
        slab, content = self.slab, b"" if is_long else bytes(body)
        if slab is None:
            return Packed(None, 0, content, blocks)
        return Packed(slab.number, 0 if slab.file is None else slab.size, content, blocks)

    def sent(self) -> tuple[File, ...]:
        """Note that the batch is sent: the trainer has its slab, and reports when it is free.
        Return the file that goes with it, if the slab is new."""
        slab, self.slab = self.slab, None
        if slab is None or slab.file is None:
            return ()
        file, slab.file = slab.file, None
        return (file,)

    def _placed(self, contents: list[Any]) -> list[Span]:
        """Copy into a slab whatever does not lie there yet; return the spans of all."""
        slab = self.slab
        spans = [None if slab is None else slab.span_of(content) for content in contents]
        rest = sum(
            _aligned(content.nbytes)
            for content, span in zip(contents, spans, strict=True)
            if span is None
        )
        if slab is None or self._end + rest > slab.size:
            # The first batch, or a larger one than before: all of it goes elsewhere.
            self.slab = self.slabs.take(sum(_aligned(each.nbytes) for each in contents))
            self._end, spans = 0, [None] * len(contents)
            if slab is not None:
                self.slabs.freed((slab.number,), ())
            slab = self.slab
        written = []
        for content, span in zip(contents, spans, strict=True):
            if span is None:
                span = self._end, content.nbytes
                slab.write(self._end, content)
                self._end += _aligned(content.nbytes)
            written.append(span)
        self._expected = self._end
        return written


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


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
        self, most_held: int, *, lock: Callable[[mmap.mmap], Mapped] | None = None
    ) -> None:
        self.num_copied = 0
        """The number of batches that were copied out because the loop keeps many."""
        self.regions: dict[int, Mapped] = {}
        """The slabs that are mapped, by number."""
        self._most_held = most_held
        self._region_of = lock or Mapped
        self._lent: set[int] = set()  # also those that are back, until they are read
        self._loans: Loans[int] = Loans()
        self._free: list[int] = []  # read, and not reported yet
        self._spent: set[int] = set()
        with _no_fork:
            _live.add(self)

    def open(self, slab: int, size: int, file: File) -> None:
        """Map a new slab, and close its file. Its pages are found when they are read: the loop may
        be waiting here."""
        find = mmap.mmap if self._region_of is Mapped else mapped_file
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
        return region.lent(num_bytes, self._loans, slab)

    def give_back(self, slab: int) -> None:
        """Free a slab from which no batch was made."""
        self._lent.add(slab)
        self._loans.give_back(slab)

    def forget(self, slabs: Iterable[int]) -> None:
        """Unmap slabs that will not come again."""
        for slab in slabs:
            self.regions.pop(slab, None)

    def close(self) -> None:
        """Unmap the slabs of a child that sends nothing more. Batches that the loop still holds
        keep their own memory alive.
        """
        self.regions.clear()
        self._region_of = Mapped  # the statistics keep this object: drop the device stage from it

    def freed(self) -> Free:
        """Return the slabs that have become free since the last call."""
        if not (self._loans or self._free):
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
        return len(self._lent) - len(self._loans)

    def read(self) -> None:
        """Note which are not lent any more. Nobody may fork meanwhile."""
        for slab in self._loans.take_back():
            self._lent.discard(slab)
            self._free.append(slab)

    def spend(self) -> None:
        """Mark all lent slabs as spent: a forked process may view them."""
        self._spent |= self._lent


_live: LiveObjects[Mappings] = LiveObjects()


def _before_fork() -> None:
    for each in _live.now():
        each.read()  # those that nothing views are not spent


def _after_fork_in_parent() -> None:
    for each in _live.now():
        each.spend()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent)
# So that freed() on another thread waits for spend(). After those functions: it is taken before
# them, and given back after them.
_no_fork = lock_held_at_forks()
