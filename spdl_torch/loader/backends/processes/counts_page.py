"""What a worker process has counted, in memory that it shares with the trainer.

The process writes without being asked, and the trainer reads when somebody asks for figures: no
message carries them, and they are true however long the loop has been away.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from typing import TYPE_CHECKING

from .shared_memory import anonymous_file
from .wire import File

if TYPE_CHECKING:
    from typing import Self

_BYTES = 64 * 1024  # of which only the pages that are written take memory
_MOST_TRIES = 100  # a copy takes microseconds, and the process writes a few times a second

_idle = struct.Struct("q")  # aligned, and so written and read as one
_head = struct.Struct("IIq")  # checksum, bytes, epoch
_CONTENT = _idle.size + _head.size


class CountsPage:
    """The memory, on either side."""

    def __init__(self, file: File) -> None:
        self._memory = mmap.mmap(file, _BYTES)

    @classmethod
    def new(cls) -> tuple[Self, File]:
        """Return a page of this process, and its file for the trainer."""
        file = File(anonymous_file("spdl-torch-counts"))
        os.ftruncate(file, _BYTES)
        return cls(file), file

    @property
    def idle_since_ns(self) -> int:
        """Since when the process has had no job, by ``perf_counter_ns``; 0 = it has one."""
        return int(_idle.unpack_from(self._memory)[0])

    @idle_since_ns.setter
    def idle_since_ns(self, since_ns: int) -> None:
        _idle.pack_into(self._memory, 0, since_ns)

    def write(self, epoch: int, content: bytes) -> None:
        """Replace what stands there. What does not fit is left out."""
        end = _CONTENT + len(content)
        if end <= _BYTES:
            _head.pack_into(self._memory, _idle.size, zlib.crc32(content), len(content), epoch)
            self._memory[_CONTENT:end] = content

    def read(self, epoch: int) -> bytes | None:
        """Return what was written last in that epoch; None = nothing, or it is being written."""
        for _ in range(_MOST_TRIES):
            checksum, size, of_epoch = _head.unpack_from(self._memory, _idle.size)
            content = self._memory[_CONTENT : _CONTENT + size]
            if size and of_epoch == epoch and zlib.crc32(content) == checksum:
                return content
            if of_epoch != epoch or not size:
                return None
        return None
