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
import time
import zlib
from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np

from ...locks import RLock
from .folders import Descriptor, open_in, take

if TYPE_CHECKING:
    from numpy.typing import NDArray

RECORD = np.dtype(
    [("key", "<i8"), ("offset", "<i8"), ("length", "<i8"), ("checksum", "<u4"), ("pair", "<u4")]
)
"""Where a content is. ``pair`` is the number of the files, as this process counts them; 0 on disk.
``checksum`` becomes 0 in memory once it was compared."""

_FEW = 1000  # records in a dict

Record = tuple[int, ...]


class Pairs:
    """The pairs in an open folder: what all processes have written there, and where this one does.

    Threads may use it at once. Errors are the system's.
    """

    def __init__(self, folder: int) -> None:
        self._folder = folder
        self.table = RecordTable()
        """The records that were read."""
        self._listed = 0  # when the folder had changed, as it was listed
        self._pairs: dict[str, _Pair] = {}  # by ID, in the order of their numbers
        self._data: list[Descriptor] = []  # the contents of each
        self._own: _OwnPair | None = None
        self.renew_lock()

    def renew_lock(self) -> None:
        """Replace the lock in a forked child: another thread may have held it."""
        self._lock = RLock()  # to write, and to add to the table; finding takes none

    def num_bytes(self) -> int:
        """Return the bytes of all contents."""
        return sum(os.fstat(file).st_size for file in self._data)

    def content(self, record: Record) -> bytearray | None:
        """Return the content of a record; None = it is damaged."""
        key, offset, length, checksum, pair = record
        content = bytearray(length)
        if _read_into(self._data[pair], content, offset) < length:
            return None
        if checksum:  # the first time in this process
            if _checksum(key, content) != checksum:
                return None
            self.table.set_checked(record)
        return content

    def add(self, key: int, content: bytes | memoryview) -> None:
        """Write a content, and then its record."""
        checksum = _checksum(key, content)
        with self._lock:
            if self._own is None or self._own.pid != os.getpid():  # a forked child's is another
                self._own = self._found_or_new()
            own = self._own
            offset = os.fstat(own.data).st_size
            _write(own.data, content, offset)
            record = np.array((key, offset, len(content), checksum, 0), RECORD).tobytes()
            # In place of one of which only a part could be written.
            end = os.fstat(own.index).st_size
            _write(own.index, record, end - end % len(record))

    def read_tails(self) -> None:
        """Read the records that were added by any process since the last time."""
        with self._lock:
            self._find_pairs()
            for pair in self._pairs.values():
                if (records := pair.tail()) is not None:
                    self.table.add(records)

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
            if stem not in self._pairs:
                try:
                    pair = _Pair(self._folder, stem, len(self._data))
                except FileNotFoundError:  # somebody has removed it
                    continue
                self._pairs[stem] = pair
                self._data.append(pair.data)

    def _found_or_new(self) -> _OwnPair:
        """Return the pair to which this process alone appends: one that others have left, or a new
        one.
        """
        for stem in self._pairs:
            try:
                return _OwnPair(self._folder, stem)
            except (BlockingIOError, FileNotFoundError):  # it is another's, or gone
                continue
        return _OwnPair(self._folder, os.urandom(8).hex(), os.O_CREAT)


class _Pair:
    """The files of one writer, and how far its index was read."""

    def __init__(self, folder: int, stem: str, number: int = 0, flags: int = 0) -> None:
        # Contents first: whoever finds an index finds them, too.
        self.data = open_in(folder, f"{stem}.data", flags)
        self.index = open_in(folder, f"{stem}.index", flags)
        self._number, self._num_read = number, 0

    def tail(self) -> NDArray[np.void] | None:
        """Return the records that were added since the last time; None = none."""
        first = self._num_read * RECORD.itemsize
        size = os.fstat(self.index).st_size - first
        if size < RECORD.itemsize:
            return None
        content = os.pread(self.index, size, first)
        records = np.frombuffer(content, RECORD, len(content) // RECORD.itemsize).copy()
        self._num_read += len(records)
        records["pair"] = self._number
        return records[_is_sound(records, os.fstat(self.data).st_size)]


class _OwnPair(_Pair):
    """The files to which this process alone appends, as long as it has them open.

    Raises: BlockingIOError: another process has them.
    """

    def __init__(self, folder: int, stem: str, flags: int = 0) -> None:
        # Opened anew, because a lock belongs to all who share an open file, as forked children do.
        super().__init__(folder, stem, flags=flags)
        take(self.index)
        self.pid = os.getpid()


class RecordTable:
    """The records of all keys, the later ones of a key in front of the earlier ones.

    Sorted arrays take 40 bytes a record, a fifth of what a dict does; only the newest are in one.
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
            self._newest[key] = (*record[:3], 0, record[4])
        else:  # it has come into the arrays, which are read after that
            keys, records = self._sorted
            records["checksum"][bisect_right(keys, key) - 1] = 0

    def num_keys(self) -> int:
        """Return how many keys have a record."""
        newest = np.array([*self._newest], np.int64)
        return len(np.unique(np.concatenate([self._sorted[1]["key"], newest])))


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
