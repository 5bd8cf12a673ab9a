"""The pairs of files of a store: contents, and the records that say where each is.

Each process that writes appends to a pair of its own: a content to one file, and then a record of
it to the other. A process that is killed at any moment leaves a content without a record, which
nobody finds; the next process that writes goes on behind it.

    ID.data    content | content | content (killed: no record)
    ID.index   record  | record                                   key, offset, length, checksum

Nobody else writes there, so readers need no lock: they read what was added to the indexes, and then
each content by one call. Nothing is overwritten, and of two records of a key either will do: a key
depends on all that its content was made from.
"""

from __future__ import annotations

import os
import struct
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from ...engine.shared import LiveObjects
from .folders import open_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # stores are off there

RECORD = np.dtype(
    [("key", "<i8"), ("offset", "<i8"), ("length", "<i8"), ("checksum", "<u4"), ("pair", "<u4")]
)
"""Where a content is. ``pair`` is the number of the files, as this process counts them; 0 on disk.
``checksum`` becomes 0 in memory once it was compared."""

_FEW = 1000  # records in a dict
_MOST_PARTS = 64  # that are written by one call; of more, the system may refuse some

Record = tuple[int, ...]

renewed: LiveObjects[Any] = LiveObjects()
"""What has locks, which are renewed in forked children."""


class Pairs:
    """The pairs in an open folder: what all processes have written there, and where this one does.

    Threads may use it at once. Errors are the system's.
    """

    def __init__(self, folder: int) -> None:
        self._folder = folder
        self._table = RecordTable()
        self._listed = 0  # when the folder had changed, as it was listed
        self._pairs: dict[str, _Pair] = {}
        self.data: list[Descriptor] = []
        """The contents of each pair."""
        self._writer: _Writer | None = None
        self.renew_locks()
        renewed.add(self)

    def renew_locks(self) -> None:
        """Replace the lock in a forked child: another thread may have held it."""
        self._lock = threading.Lock()  # for pairs, and to add to the table; finding takes none

    def find(self, key: int) -> Record | None:
        """Return the last record of a key that was read; None = there is none."""
        return self._table.find(key)

    def num_keys(self) -> int:
        """Return how many keys have a record that was read."""
        return self._table.num_keys()

    def num_bytes(self) -> int:
        """Return the bytes of all contents."""
        return sum(os.fstat(file).st_size for file in self.data)

    def content(self, record: Record) -> bytearray | None:
        """Return the content of a record; None = it is damaged."""
        key, offset, length, checksum, pair = record
        content = bytearray(length)
        if _read_into(self.data[pair], content, offset) < length:
            return None
        if checksum:  # the first time in this process
            if _checksum(key, [memoryview(content)]) != checksum:
                return None
            self._table.set_checked(key)
        return content

    def add(self, key: int, views: Sequence[memoryview]) -> None:
        """Write a content, and then its record."""
        length = sum(map(len, views))
        with self._lock:
            writer = self._own_writer()
            offset = writer.end
            writer.end += length
        _write_all(writer.data, views, offset)
        record = np.array((key, offset, length, _checksum(key, views), 0), RECORD)
        with self._lock:
            writer.append(record.tobytes())

    def read_tails(self) -> None:
        """Read the records that were added by any process since the last time."""
        with self._lock:
            self._find_pairs()
            for pair in self._pairs.values():
                if (records := pair.tail()) is not None:
                    self._table.add(records)

    def _find_pairs(self) -> None:
        """Open the pairs that were made since the last time."""
        changed = os.fstat(self._folder).st_mtime_ns
        if changed == self._listed:
            return
        # What is made within a tick of the file system's clock does not show in that time.
        self._listed = changed if time.time_ns() - changed > 1_000_000_000 else 0
        try:
            # Forked children share the place in an open folder, so each listing opens it anew.
            folder = os.open(".", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._folder)
            names = os.listdir(Descriptor(folder))
        except FileNotFoundError:  # somebody has removed it
            return
        for stem in [name.removesuffix(".index") for name in names if name.endswith(".index")]:
            if stem in self._pairs:
                continue
            try:
                index, data = self._open(f"{stem}.index", 0), self._open(f"{stem}.data", 0)
            except FileNotFoundError:  # somebody has removed it
                continue
            self._pairs[stem] = _Pair(len(self.data), index, data)
            self.data.append(data)

    def _own_writer(self) -> _Writer:
        """Return the pair to which this process alone appends: one that others have left, or a new
        one. In a forked child, that is not its parent's.
        """
        if self._writer is None or self._writer.pid != os.getpid():
            left = (self._writer_of(stem, 0) for stem in [*self._pairs])
            self._writer = next((writer for writer in left if writer is not None), None)
        while self._writer is None:
            self._writer = self._writer_of(os.urandom(8).hex(), os.O_CREAT)
        return self._writer

    def _writer_of(self, stem: str, flags: int) -> _Writer | None:
        try:
            # Contents first: whoever finds an index finds them, too. Opened anew, because a lock
            # belongs to all who share an open file, as forked children do.
            data, index = self._open(f"{stem}.data", flags), self._open(f"{stem}.index", flags)
            fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        except FileNotFoundError:
            if flags:
                raise
            return None
        return _Writer(index, data)

    def _open(self, name: str, flags: int) -> Descriptor:
        return Descriptor(open_in(self._folder, name, flags))


class Descriptor(int):
    """An open file, closed when nobody has it any more."""

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self)


class _Pair:
    """The files of one writer, and how far its index was read."""

    def __init__(self, number: int, index: int, data: int) -> None:
        self._number, self._index, self._data = number, index, data
        self._num_read = 0

    def tail(self) -> NDArray[np.void] | None:
        """Return the records that were added since the last time; None = none."""
        first = self._num_read * RECORD.itemsize
        size = os.fstat(self._index).st_size - first
        if size < RECORD.itemsize:
            return None
        content = os.pread(self._index, size, first)
        records = np.frombuffer(content, RECORD, len(content) // RECORD.itemsize).copy()
        self._num_read += len(records)
        records["pair"] = self._number
        return records[_is_sound(records, os.fstat(self._data).st_size)]


class _Writer:
    """The files to which this process alone appends, as long as it has them."""

    def __init__(self, index: int, data: int) -> None:
        self.pid = os.getpid()
        self.data = data
        self.end = os.fstat(data).st_size
        self._index = index
        self._end_of_index = os.fstat(index).st_size // RECORD.itemsize * RECORD.itemsize

    def append(self, record: bytes) -> None:
        """Add a record, in place of one of which only a part could be written."""
        _write_all(self._index, [memoryview(record)], self._end_of_index)
        self._end_of_index += len(record)


class RecordTable:
    """The records of all keys, the later ones of a key in front of the earlier ones.

    Sorted arrays take 40 bytes a record, a fifth of what a dict does; only the newest are in one.
    A thread at a time adds to it; finding takes no lock.
    """

    def __init__(self) -> None:
        self._newest: dict[int, Record] = {}
        none = np.empty(0, RECORD)
        self._sorted: tuple[NDArray[np.int64], NDArray[np.void]] = none["key"].copy(), none

    def find(self, key: int) -> Record | None:
        """Return the last record of a key; None = it has none."""
        # The newest first: they come into the arrays before they leave the dict.
        found = self._newest.get(key)
        if found is not None:
            return found
        keys, records = self._sorted
        place = int(keys.searchsorted(key, "right")) - 1
        return records[place].item() if place >= 0 and keys[place] == key else None

    def add(self, records: NDArray[np.void]) -> None:
        """Add records, in the order in which they were written."""
        newest, (keys, sorted_records) = self._newest, self._sorted
        if len(records) < _FEW and len(newest) < _FEW + len(keys) // 8:
            newest.update((record[0], record) for record in records.tolist())
            return
        parts: list[Any] = [sorted_records, np.array([*newest.values()], RECORD), records]
        everything = np.concatenate(parts)
        everything = everything[everything["key"].argsort(kind="stable")]
        self._sorted = everything["key"].copy(), everything
        self._newest = {}

    def set_checked(self, key: int) -> None:
        """Note that the checksum of a key's last content was right."""
        if (record := self._newest.get(key)) is not None:
            self._newest[key] = (*record[:3], 0, record[4])
            return
        keys, records = self._sorted
        records["checksum"][int(keys.searchsorted(key, "right")) - 1] = 0

    def num_keys(self) -> int:
        """Return how many keys have a record."""
        newest = np.fromiter(self._newest, np.int64)
        return len(np.unique(np.concatenate([self._sorted[0], newest])))


def _is_sound(records: NDArray[np.void], num_bytes: int) -> NDArray[np.bool_]:
    """Return for each record whether it can be right, if the contents have so many bytes."""
    offset, length = records["offset"], records["length"]
    found: NDArray[np.bool_] = (offset >= 0) & (offset <= num_bytes) & (length >= 0)
    return found & (length <= num_bytes - offset) & (records["checksum"] > 0)


def _checksum(key: int, views: Sequence[memoryview]) -> int:
    """Return the checksum of a key and its content, which is never 0."""
    checksum = zlib.crc32(struct.pack("<q", key))
    for view in views:
        checksum = zlib.crc32(view, checksum)
    return checksum or 1


def _write_all(file: int, views: Sequence[memoryview], offset: int) -> None:
    total, done = sum(map(len, views)), 0
    if len(views) <= _MOST_PARTS:
        done = os.pwritev(file, views, offset)
    if done < total:  # two gigabytes at a time, or as much as a disk has room for
        rest = memoryview(b"".join(views))
        while done < total:
            done += os.pwrite(file, rest[done:], offset + done)


def _read_into(file: int, buffer: bytearray, offset: int) -> int:
    """Fill the buffer, and return the number of bytes that were there."""
    done = os.preadv(file, [buffer], offset) if buffer else 0
    while 0 < done < len(buffer):  # two gigabytes at a time
        number = os.preadv(file, [memoryview(buffer)[done:]], offset + done)
        if not number:
            break
        done += number
    return done


def _after_fork() -> None:
    for each in renewed.now():
        each.renew_locks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
