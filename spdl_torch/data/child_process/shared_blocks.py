"""Large arrays and tensors of a dataset, in memory that all children of a crew map.

Where children are not forked, each gets the dataset as a pickle. Its large blocks are not in the
pickle: the trainer writes them into one file without a name, in memory, and every child maps that
file privately. So they exist once however many children there are, and a child that writes to them
gets its own copy, page by page, as after a fork.

The file is freed with its last user: the crew, a child that is being started, or a mapping.
"""

from __future__ import annotations

import mmap
import os
import threading
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any

import numpy as np

from ...engine.threads.shared_state import LiveObjects
from .messages import Span
from .shared_memory import anonymous_file

if TYPE_CHECKING:
    from collections.abc import Sequence

CAN_SHARE_BLOCKS = os.name == "posix"
"""Whether a child can be given a descriptor while it is started."""

LEAST_BLOCK_BYTES = 1 << 20

_STEP_BYTES = 1 << 20  # in which blocks are compared


class SharedBlocks:
    """The trainer's side: the file. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor = -1
        self._end = 0
        self._spans: dict[int, Span] = {}  # of the latest content of each block, by its number
        _live.add(self)

    def put(self, number: int, content: memoryview) -> Span:
        """Return where block ``number`` of the pickle lies, written there unless it already is.

        Each child has a pickle of its own, since locks and pipes are each child's. Its blocks are
        compared with those of the pickle before: a dataset may make new arrays for each.

        Raises: OSError: there is no memory for it.
        """
        with self._lock:
            span = self._spans.get(number)
            if span is not None and self._equals(span, content):
                return span
            if self._descriptor < 0:
                self._descriptor = anonymous_file("spdl-torch-data")
            span = Span(self._end, content.nbytes)
            written = 0
            while written < span.size:
                written += os.pwrite(self._descriptor, content[written:], span.offset + written)
            # At whole pages: a child that writes into one block does not copy part of the next.
            self._end = -(-(span.offset + span.size) // mmap.PAGESIZE) * mmap.PAGESIZE
            os.ftruncate(self._descriptor, self._end)
            self._spans[number] = span
            return span

    def for_child(self, spans: Sequence[Span]) -> MappedBlocks:
        """Return what the child that is just being started gets: the file, and its own blocks."""
        with self._lock:
            return MappedBlocks(reduction.DupFd(self._descriptor), self._end, tuple(spans))

    def _equals(self, span: Span, content: memoryview) -> bool:
        return span.size == content.nbytes and all(
            os.pread(self._descriptor, _STEP_BYTES, span.offset + start)
            == content[start : start + _STEP_BYTES].tobytes()
            for start in range(0, span.size, _STEP_BYTES)
        )

    def close(self) -> None:
        """Close this process's descriptor; mappings stay."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


class MappedBlocks:
    """The child's side; it is pickled while the child is started."""

    def __init__(self, descriptor: Any, size: int, spans: tuple[Span, ...]) -> None:
        self._descriptor = descriptor  # a DupFd, which multiprocessing sends along
        self._size = size
        self._spans = spans

    def open(self) -> list[np.ndarray[Any, Any]]:
        """Map the file, once; return its blocks as arrays of bytes that may be written."""
        descriptor = self._descriptor.detach()
        try:
            memory = mmap.mmap(
                descriptor,
                self._size,
                # NORESERVE: only what is written takes memory of its own.
                flags=mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0),
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
        finally:
            os.close(descriptor)
        whole = np.frombuffer(memory, np.uint8)
        return [whole[span.offset : span.offset + span.size] for span in self._spans]


_live: LiveObjects[SharedBlocks] = LiveObjects()


def _after_fork() -> None:
    """Close the files in a forked process, which starts no children of its parent's crews."""
    for blocks in _live.now():
        blocks.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
