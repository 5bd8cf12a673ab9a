"""Bytes by number, written once and read by all processes of a machine.

A store is a folder with two files. Contents are written to ``data`` first, each at a place of its
own; then an entry is added to ``index``. A process that is killed at any moment leaves a content
without an entry, which nobody finds. Entries and contents have checksums, because a machine that
goes down may keep the one and lose the other.

    index   | header: next free byte of data, checksum | entry 0 | entry 1 | ...
    data    | content | content (killed: no entry) | content | ...

Nothing is overwritten: a later entry of a number takes the place of an earlier one. A header that
is damaged is made anew from the entries. Places and entries are given out under a lock on
``index``, which the system releases when a process ends.

Everything is read and written by calls that fail with an error; mapped memory would kill the
process if the disk were full or the file truncated. Whatever fails once the store is open turns it
off, in this process, and the samples are made without it.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import sys
import threading
import weakref
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...engine.threads.shared_state import LiveObjects
from ...scopes import scope
from .entry_table import EntryTable
from .own_files import open_own_file, open_own_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .memory import MemoryLimit

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # no lock: the store is off there

_logger = logging.getLogger("spdl_torch.io")

_MAGIC = b"spdlcch1"
_HEADER = struct.Struct("<8sQI44x")  # magic, next free byte, their checksum
_HEADER_SUMMED = 16
_ENTRY = struct.Struct("<QQQQI20xI4x")  # number, stamp, offset, length, their checksums
_ENTRY_SUMMED = _ENTRY.size - 8
_ENTRY_DTYPE = np.dtype({"names": ["number"], "formats": ["<u8"], "itemsize": _ENTRY.size})
_ALIGNED = 64
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What stays free of a disk without max_bytes.
_SPARE_SHARE = 20  # the reciprocal of its share
_MOST_SPARE_BYTES = 10_000_000_000


def spare_bytes(disk_bytes: int) -> int:
    """Return how much of a disk of that size a store without ``max_bytes`` leaves free."""
    return min(disk_bytes // _SPARE_SHARE, _MOST_SPARE_BYTES)


class _Entry(NamedTuple):
    number: int
    stamp: int
    offset: int
    length: int
    checksum: int

    def packed(self) -> bytes:
        content = _ENTRY.pack(*self, 0)
        return content[:_ENTRY_SUMMED] + struct.pack("<I4x", zlib.crc32(content[:_ENTRY_SUMMED]))

    @classmethod
    def unpacked(cls, content: bytes) -> _Entry | None:
        """Return the entry; None = it is damaged."""
        if len(content) != _ENTRY.size:
            return None
        *fields, checksum = _ENTRY.unpack(content)
        return cls(*fields) if zlib.crc32(content[:_ENTRY_SUMMED]) == checksum else None


class Store:
    """Contents by number, each with the stamp of what it was made from.

    folder: made if it does not exist; readable by this user alone.
    max_bytes: the size of both files at which it stops growing; None = it stops where 5 % of the
        disk, or 10 GB if that is less, are left.
    num_numbers: the numbers are below this; None = they may be any of 64 bits, which takes more
        memory.

    why_off: why it is not to be used at all.

    A store that cannot be used (a full disk, a file system without locks, an index that is damaged
    at its start) is off: nothing is found and nothing kept, and the log says so once.

    Threads and processes may use it at once. Raises: OSError: the folder cannot be made or opened;
    ValueError: others could have written what is there.
    """

    def __init__(
        self,
        folder: str,
        *,
        max_bytes: int | MemoryLimit | None = None,
        num_numbers: int | None = None,
        why_off: str = "",
    ) -> None:
        self.folder = folder
        self._max_bytes = max_bytes
        self.num_found = self.num_missing = 0
        """The calls of ``get`` in this process that found a content, and that did not."""
        self._table = EntryTable(num_numbers)
        self._num_damaged = 0
        self._counting = threading.Lock()
        # Held to add entries to the table, and briefly to change _makers. Finding takes no lock: a
        # thread that misses an entry being added waits for this one in look(), and looks again.
        self._reading = threading.Lock()
        self._makers: dict[int, threading.Event] = {}  # of the contents that this process makes
        self._is_full = False
        self._off = ""
        if why := why_off or self._open():
            self._turn_off(why)
        _renewed.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.folder, self._max_bytes, self._table.num_numbers, self._off)

    def __deepcopy__(self, memo: Any) -> Store:
        return self

    @property
    def num_entries(self) -> int:
        """The number of entries that all processes added, several for one number included."""
        if self._off:
            return 0
        return max(0, os.fstat(self._index).st_size - _HEADER.size) // _ENTRY.size

    @property
    def num_bytes(self) -> int:
        """The bytes given out to contents by all processes."""
        return 0 if self._off else self._next_free()

    def get(self, number: int, stamp: int) -> bytearray | None:
        """Return the content of a number; None = there is none with this stamp."""
        content = self.look(number, stamp)
        with self._counting:
            if content is None:
                self.num_missing += 1
            else:
                self.num_found += 1
        return content

    def look(self, number: int, stamp: int) -> bytearray | None:
        """Return what ``get`` returns, and count nothing."""
        if self._off:
            return None
        try:
            place = self._table.place(number)
            content = self._find(place, number, stamp)
            if content is None:
                self._read_entries()  # another process may have added it, or another thread read it
                now = self._table.place(number)
                if now != place:
                    content = self._find(now, number, stamp)
            return content
        except OSError as error:
            self._turn_off(_reason(error))
            return None

    @scope
    def making(self, number: int) -> Iterator[None]:
        """Wait while another thread or process makes the content of this number, then exclude
        others from making it. Whoever enters checks again whether it is there by now.

        A thread that makes another content meanwhile does not wait for a thread: that one might
        wait for it.
        """
        if self._off or self._is_full:  # what is made cannot be kept: nobody need wait for it
            yield
            return
        with self._reading:
            others = self._makers.get(number)
            if others is None:
                self._makers[number] = threading.Event()
        if others is not None:
            if not _of_thread.num_made:
                # The maker sets it however it ends. If it failed, each waiter tries for itself.
                others.wait()
            yield
            return
        _of_thread.num_made += 1
        try:
            with self._files.making(number):
                yield
        finally:
            _of_thread.num_made -= 1
            with self._reading:
                event = self._makers.pop(number, None)  # None in a child forked in the block
            if event is not None:
                event.set()

    def put(self, number: int, stamp: int, parts: Sequence[Any]) -> bool:
        """Add a content, given in parts; return whether there was room."""
        if self._off or self._is_full:
            return False
        views = [memoryview(part).cast("B") for part in parts]
        length = sum(len(view) for view in views)
        checksum = 0
        for view in views:
            checksum = zlib.crc32(view, checksum)
        try:
            offset = self._place_for(length)
            if offset is None:
                return self._full(self._limit_in_words())
            try:
                _write_all(self._data, views, offset)
                self._add(_Entry(number, stamp, offset, length, checksum))
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                return self._full(f"no room: {error.strerror}")
        except OSError as error:
            self._turn_off(_reason(error))
            return False
        return True

    def counts(self) -> dict[str, int]:
        """Return how often this process found a content, and how often it did not."""
        return {"cache/found": self.num_found, "cache/missing": self.num_missing}

    def remark(self, num_items: int) -> str:
        """Return the line for a report: the share of ``num_items`` that the store holds, and the
        hits.
        """
        if self._off:
            return f"The cache in {self.folder} is not used: {self._off}."
        num_calls = self.num_found + self.num_missing
        hits = f" This process found {self.num_found} of {num_calls} there." if num_calls else ""
        try:
            self._read_entries()
            num_megabytes = self.num_bytes / 1e6
        except OSError as error:
            return f"The cache in {self.folder} cannot be read: {_reason(error)}."
        share = min(1.0, self._table.num_known() / max(1, num_items))
        return (
            f"The cache in {self.folder} holds {share:.0%} of the items, "
            f"{num_megabytes:.0f} MB.{hits}"
        )

    def renew_locks(self) -> None:
        """Replace the locks in a forked child: another thread may have held them."""
        self._counting = threading.Lock()
        self._reading = threading.Lock()
        self._makers = {}

    def _open(self) -> str:
        """Open the files, and make them if they do not exist; return why that cannot be done, or
        an empty text.
        """
        if fcntl is None:
            return "this system has no fcntl.lockf"
        self._files = _Files.of(self.folder)
        self._index, self._data = self._files.index, self._files.data
        try:
            with self._files.locked():
                begin = os.pread(self._index, len(_MAGIC), 0)
                if not _MAGIC.startswith(begin):
                    return "'index' is damaged or of another release; delete the folder"
                if os.fstat(self._index).st_size < _HEADER.size:
                    self._write_header(0)
        except OSError as error:  # a full disk, or a file system without locks
            return _reason(error)
        return ""

    def _turn_off(self, why: str) -> None:
        """Find and keep nothing from now on."""
        if not self._off:
            self._off = why
            _logger.warning("cache %s: not used: %s.", self.folder, why)

    def _count_damaged(self) -> None:
        """Say the 1st, 10th, 100th ... time that a content is damaged: all of them may be."""
        with self._counting:
            self._num_damaged += 1
            count = self._num_damaged
        if str(count).strip("0") == "1":
            _logger.warning(
                "cache %s: %d contents in its file 'data' damaged so far; each is made anew.",
                self.folder,
                count,
            )

    def _find(self, place: int, number: int, stamp: int) -> bytearray | None:
        if place < 0:
            return None
        content = os.pread(self._index, _ENTRY.size, _HEADER.size + place * _ENTRY.size)
        entry = _Entry.unpacked(content)
        if entry is None or entry.number != number or entry.stamp != stamp:
            return None
        found = bytearray(entry.length)
        if _read_into(self._data, found, entry.offset) < entry.length:
            return None
        if not self._table.is_checked[place]:
            if zlib.crc32(found) != entry.checksum:
                self._count_damaged()
                return None
            self._table.is_checked[place] = 1  # without the lock: any thread would write the same
        return found

    def _read_entries(self) -> None:
        """Read the entries added since the last read."""
        with self._reading:
            first = self._table.num_read
            count = self.num_entries - first
            if count <= 0:  # less than none: the file was cut
                return
            content = bytearray(count * _ENTRY.size)
            num_bytes = _read_into(self._index, content, _HEADER.size + first * _ENTRY.size)
            count = num_bytes // _ENTRY.size
            self._table.add(np.frombuffer(content, _ENTRY_DTYPE, count)["number"])

    def _place_for(self, length: int) -> int | None:
        """Return the offset of free bytes in ``data``, now given out; None = no room."""
        size = -(-length // _ALIGNED) * _ALIGNED
        with self._files.locked():
            # Normally the header's offset; after a crash of the machine, that may be an old one.
            written = -(-os.fstat(self._data).st_size // _ALIGNED) * _ALIGNED
            offset = max(self._next_free(), written)
            if not self._has_room(offset + size, size):
                return None
            self._write_header(offset + size)
        return offset

    def _has_room(self, end: int, size: int) -> bool:
        if self._max_bytes is not None:
            limit = self._max_bytes
            most = limit if isinstance(limit, int) else limit.left_for(self.folder)
            return end + os.fstat(self._index).st_size + _ENTRY.size <= most
        free, spare = self._disk_bytes()
        return free - spare >= size

    def _disk_bytes(self) -> tuple[int, int]:
        """Return the bytes that are free on the disk, and those that are to stay so."""
        disk = os.fstatvfs(self._data)
        return disk.f_bavail * disk.f_frsize, spare_bytes(disk.f_blocks * disk.f_frsize)

    def _limit_in_words(self) -> str:
        if self._max_bytes is not None:
            return "it has reached its limit"
        free, spare = map(_size_in_words, self._disk_bytes())
        return f"{free} are free on its disk, and it leaves {spare} free"

    def _next_free(self) -> int:
        """Return the byte of ``data`` behind all that was given out: the header's or, if the header
        is damaged, the entries'.
        """
        header = os.pread(self._index, _HEADER.size, 0)
        if len(header) == _HEADER.size:
            magic, next_free, checksum = _HEADER.unpack(header)
            if magic == _MAGIC and checksum == zlib.crc32(header[:_HEADER_SUMMED]):
                return int(next_free)
        content = bytearray(self.num_entries * _ENTRY.size)
        num_bytes = _read_into(self._index, content, _HEADER.size)
        places = range(0, num_bytes, _ENTRY.size)
        entries = (_Entry.unpacked(bytes(content[n : n + _ENTRY.size])) for n in places)
        return max(
            (entry.offset + entry.length for entry in entries if entry is not None), default=0
        )

    def _write_header(self, next_free: int) -> None:
        content = _HEADER.pack(_MAGIC, next_free, 0)[:_HEADER_SUMMED]
        header = _HEADER.pack(_MAGIC, next_free, zlib.crc32(content))
        _write_all(self._index, [memoryview(header)], 0)

    def _add(self, entry: _Entry) -> None:
        with self._files.locked():
            # Not at the end of the file: an entry that was cut off there is to be overwritten.
            end = _HEADER.size + self.num_entries * _ENTRY.size
            _write_all(self._index, [memoryview(entry.packed())], end)

    def _full(self, why: str) -> bool:
        self._is_full = True
        with _opening:
            is_said = self.folder in _full
            _full.add(self.folder)
        if not is_said:
            _logger.warning(
                "cache %s: %s. It stops growing at %s; other samples are loaded without it.",
                self.folder,
                why,
                _size_in_words(self.num_bytes),
            )
        return False


class _OfThread(threading.local):
    num_made = 0
    """The contents that it makes at the moment, one for another."""


_of_thread = _OfThread()


class _Files:
    """The open files of a folder, one object in a process: file locks belong to the process, and it
    loses them as soon as it closes the file anywhere.
    """

    def __init__(self, folder: str) -> None:
        self.index = self.data = -1
        self._lock = threading.Lock()
        own = open_own_folder(folder)
        try:
            self.index = open_own_file(own, "index", os.path.join(folder, "index"))
            self.data = open_own_file(own, "data", os.path.join(folder, "data"))
        finally:
            os.close(own)
        _renewed.add(self)

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        for file in (self.index, self.data):
            if file >= 0 and not is_exiting():
                os.close(file)

    @classmethod
    def of(cls, folder: str) -> _Files:
        """Return the files of a folder, made if they are not there."""
        with _opening:
            key = os.path.realpath(folder)
            files = _open_files.get(key)
            if files is None or not files.is_there(folder):
                files = _open_files[key] = cls(folder)
            return files

    def is_there(self, folder: str) -> bool:
        """Return whether the files are still those of the folder."""
        try:
            there = os.stat(os.path.join(folder, "index"))
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self.index))

    @scope
    def locked(self) -> Iterator[None]:
        """Exclude other threads by a lock, and other processes by one on the file, which a forked
        child does not inherit.
        """
        with self._lock:
            while not _locks(self.index):  # mistaken for a deadlock: free in a moment
                os.sched_yield()
            try:
                yield
            finally:
                fcntl.lockf(self.index, fcntl.LOCK_UN)

    @scope
    def making(self, number: int) -> Iterator[None]:
        """Exclude other processes from making the content of a number, by a lock on one byte of
        ``data``, whether or not it is written.
        """
        place = number % (1 << 62)
        # If the system refuses, two processes may make the content: the later entry counts.
        try:
            is_held = _locks(self.data, 1, place)
        except OSError:
            is_held = False
        try:
            yield
        finally:
            if is_held:
                fcntl.lockf(self.data, fcntl.LOCK_UN, 1, place)

    def renew_locks(self) -> None:
        """Replace the locks in a forked child: another thread may have held them."""
        self._lock = threading.Lock()


_open_files: weakref.WeakValueDictionary[str, _Files] = weakref.WeakValueDictionary()
_renewed: LiveObjects[Any] = LiveObjects()
_opening = threading.Lock()
_full = set[str]()
"""The folders of which this process has said so."""


def _after_fork() -> None:
    global _opening
    _opening = threading.Lock()
    for each in _renewed.now():
        each.renew_locks()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _locks(file: int, *part: int) -> bool:
    """Lock a file or a part of it; return False if the system refuses.

    It refuses where two processes seem to wait for each other, because a thread of each waits for
    what another thread of the other one holds. They do not: a thread that holds ``index`` waits for
    nothing, and one that makes a content waits for ``index`` alone.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX, *part)
    except OSError as error:
        if error.errno != errno.EDEADLK:
            raise
        return False
    return True


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__


def _size_in_words(num_bytes: int) -> str:
    """Return a size with three digits at most: ``"12 kB"``, ``"3.3 MB"``."""
    unit, name = (
        (1e9, "GB") if num_bytes >= 1e9 else (1e6, "MB") if num_bytes >= 1e6 else (1e3, "kB")
    )
    return f"{num_bytes / unit:.1f}".removesuffix(".0") + f" {name}"


def _reopened(
    folder: str, max_bytes: int | MemoryLimit | None, num_numbers: int | None, why_off: str
) -> Store:
    return Store(folder, max_bytes=max_bytes, num_numbers=num_numbers, why_off=why_off)


def _write_all(file: int, views: Sequence[memoryview], offset: int) -> None:
    for view in views:
        while len(view):
            number = os.pwrite(file, view, offset)
            view, offset = view[number:], offset + number


def _read_into(file: int, buffer: bytearray, offset: int) -> int:
    """Fill the buffer, and return the number of bytes that were there."""
    view, done = memoryview(buffer), 0
    while done < len(view):
        number = os.preadv(file, [view[done:]], offset + done)
        if not number:
            break
        done += number
    return done
