"""The two files of a store: contents, and the records that say where each is.

Whoever adds a content excludes all others meanwhile: it appends the content to one file, and then a
record of it to the other. A process that is killed at any moment leaves a content without a record,
which nobody finds, or a part of a record, which the next one overwrites.

    data     content | content | content (killed: no record) | content
    index    record  | record  | record                       key, offset, length, checksum

Nothing else is overwritten, so readers need no lock: they read what was added to the index, and
then each content by one call. Of two records of a key either will do: a key depends on all that its
content was made from.
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ...locks import lock_held_at_forks
from ...scopes import scope
from .folders import DATA, INDEX, is_at, locked, open_file

if TYPE_CHECKING:
    from numpy.typing import NDArray

RECORD = np.dtype([("key", "<i8"), ("offset", "<i8"), ("length", "<i8"), ("checksum", "<u4")])
"""Where a content is. ``checksum`` becomes 0 in memory once it was compared."""

_FEW = 1000  # records in a dict

Record = tuple[int, ...]

_lock = lock_held_at_forks()  # to add to a table; finding takes none


class Contents:
    """The contents in a folder, of all processes. Threads may use it at once.

    Errors are the system's.
    """

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, DATA)
        self._data, self.index = open_file(self._path), open_file(os.path.join(folder, INDEX))
        self.table = RecordTable()
        """The records that were read."""
        self._num_read = 0

    @property
    def num_bytes(self) -> int:
        """The bytes of all contents."""
        return os.fstat(self._data).st_size

    def get(self, record: Record) -> bytearray | None:
        """Return the content of a record; None = it is damaged."""
        key, offset, length, checksum = record
        content = bytearray(length)
        if _read_into(self._data, content, offset) < length:
            return None
        if checksum:  # the first time in this process
            if _checksum(key, content) != checksum:
                return None
            self.table.set_checked(record)
        return content

    @scope
    def adding(self) -> Iterator[None]:
        """Exclude all others from adding. Raises: FileNotFoundError: somebody has removed the
        files."""
        if not is_at(self._path, self._data):
            raise FileNotFoundError(self._path)
        with locked(open_file(self._path)):
            yield

    def add(self, key: int, content: bytes | memoryview) -> None:
        """Write a content, and then its record, while others are excluded."""
        offset = self.num_bytes
        _write(self._data, content, offset)
        record = np.array((key, offset, len(content), _checksum(key, content)), RECORD).tobytes()
        # In place of one of which only a part could be written.
        end = os.fstat(self.index).st_size
        _write(self.index, record, end - end % len(record))

    def read_tail(self) -> None:
        """Read the records that were added by any process since the last time."""
        with _lock:
            first = self._num_read * RECORD.itemsize
            size = os.fstat(self.index).st_size - first
            if size < RECORD.itemsize:
                return
            tail = os.pread(self.index, size, first)
            records = np.frombuffer(tail, RECORD, len(tail) // RECORD.itemsize)
            self._num_read += len(records)
            self.table.add(records[_is_sound(records, self.num_bytes)])


class RecordTable:
    """The records of all keys, the later ones of a key in front of the earlier ones.

    Sorted arrays take 36 bytes a record, a fifth of what a dict does; only the newest are in one.
    A thread at a time adds to it; finding takes no lock, and does not let go of the GIL, which
    several threads would wait for at each hit (as NumPy's ``searchsorted`` does).
    """

    def __init__(self) -> None:
        self._newest: dict[int, Record] = {}
        self._sorted = np.empty(0, np.int64).data, np.empty(0, RECORD)

    def find(self, key: int) -> Record | None:
        """Return the last record of a key; None = it has none."""
        # The newest first: they come into the arrays before they leave the dict.
        found = self._newest.get(key)
        if found is not None:
            return found
        keys, records = self._sorted
        place = bisect_right(keys, key) - 1
        return records[place].item() if place >= 0 and keys[place] == key else None

    def add(self, records: NDArray[np.void]) -> None:
        """Add records, in the order in which they were written."""
        newest, (_, before) = self._newest, self._sorted
        if len(records) < _FEW and len(newest) < _FEW + len(before) // 8:
            newest.update((record[0], record) for record in records.tolist())
            return
        everything = np.concatenate([before, np.array([*newest.values()], RECORD), records])
        everything = everything[everything["key"].argsort(kind="stable")]
        self._sorted = everything["key"].copy().data, everything
        self._newest = {}

    def set_checked(self, record: Record) -> None:
        """Note that the checksum of a record was right, unless there is a later one of its key."""
        key = record[0]
        if self.find(key) != record:
            return
        if key in self._newest:
            self._newest[key] = (*record[:3], 0)
        else:  # it has come into the arrays, which are read after that
            keys, records = self._sorted
            records["checksum"][bisect_right(keys, key) - 1] = 0


def _is_sound(records: NDArray[np.void], num_bytes: int) -> NDArray[np.bool_]:
    """Return for each record whether it can be right, if the contents have so many bytes."""
    offset, length = records["offset"], records["length"]
    found: NDArray[np.bool_] = (offset >= 0) & (offset <= num_bytes) & (length >= 0)
    return found & (length <= num_bytes - offset) & (records["checksum"] > 0)


def _checksum(key: int, content: bytes | bytearray | memoryview) -> int:
    """Return the checksum of a key and its content, which is never 0."""
    return zlib.crc32(content, zlib.crc32(key.to_bytes(8, "little"))) or 1


def _write(file: int, content: bytes | memoryview, offset: int) -> None:
    view = memoryview(content)
    while view:  # two gigabytes at a time, or as much as a disk has room for
        done = os.pwrite(file, view, offset)
        view, offset = view[done:], offset + done


def _read_into(file: int, buffer: bytearray, offset: int) -> int:
    """Fill the buffer, and return the number of bytes that were there."""
    done = os.preadv(file, [buffer], offset) if buffer else 0
    while 0 < done < len(buffer):  # two gigabytes at a time
        number = os.preadv(file, [memoryview(buffer)[done:]], offset + done)
        if not number:
            break
        done += number
    return done
