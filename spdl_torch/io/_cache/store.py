"""Contents by key, written once and read by all processes of a machine.

    ID.data, ID.index    the contents that one process after another wrote, see pairs.py
    taken                its length says how many bytes were given out
    making               nothing; locks on its bytes exclude others from making a content

Everything is read and written by calls that fail with an error; mapped memory would kill the
process if the disk were full or a file cut. Whatever fails once the store is open turns it off, in
this process, and the samples are made without it; what somebody has removed is only missing.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from ...scopes import scope
from .folders import (
    TAKEN,
    bytes_taken,
    last_use,
    open_in,
    open_own_folder,
    remove_unused,
)
from .pairs import RECORD, Descriptor, Pairs, renewed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .memory import MemoryLimit
    from .pairs import Record

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # no lock: the store is off there

_logger = logging.getLogger("spdl_torch.io")

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What stays free of a disk without max_bytes.
_SPARE_SHARE = 20  # the reciprocal of its share
_MOST_SPARE_BYTES = 10_000_000_000
_NUM_KEYS = 1 << 62  # bytes of a file of that size can be locked, whether or not they are written


def spare_bytes(disk_bytes: int) -> int:
    """Return how much of a disk of that size a store without ``max_bytes`` leaves free."""
    return min(disk_bytes // _SPARE_SHARE, _MOST_SPARE_BYTES)


class Store:
    """Contents by key, a number below 2^63 that depends on all that a content is made from.

    folder: made if it does not exist; readable by this user alone. Its name up to a dash is that of
        the dataset: unused folders with the same are removed, the oldest first, while all of them
        together are beyond ``max_bytes``.
    max_bytes: the size of its files at which it stops growing; None = it stops where 5 % of the
        disk, or 10 GB if that is less, are left.
    why_off: why it is not to be used at all.

    A store that cannot be used (a full disk, a file system without locks) is off: nothing is found
    and nothing kept, and the log says so once.

    Threads and processes may use it at once. Raises: OSError: the folder cannot be made or opened;
    ValueError: others could have written what is there.
    """

    def __init__(
        self, folder: str, *, max_bytes: int | MemoryLimit | None = None, why_off: str = ""
    ) -> None:
        self.folder = folder
        self._max_bytes = max_bytes
        self.alive: Descriptor | None = None
        """The open file that holds the folder as long as this store lives, if it is to be held."""
        self.num_found = self.num_missing = 0
        """The calls of ``get`` in this process that found a content, and that did not."""
        self._num_damaged = 0
        self._is_full = False
        self._off = ""
        self.renew_locks()
        if why := why_off or self._open():
            self._turn_off(why)
        renewed.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Store, max_bytes=self._max_bytes, why_off=self._off), (self.folder,)

    def __deepcopy__(self, memo: Any) -> Store:
        return self

    @property
    def num_bytes(self) -> int:
        """The bytes of the contents of all processes."""
        self._pairs.read_tails()
        return self._pairs.num_bytes()

    def get(self, key: int) -> bytearray | None:
        """Return the content of a key; None = there is none."""
        content = self.look(key)
        with self._counting:
            if content is None:
                self.num_missing += 1
            else:
                self.num_found += 1
        return content

    def look(self, key: int) -> bytearray | None:
        """Return what ``get`` returns, and count nothing."""
        if self._off:
            return None
        try:
            record = self._pairs.find(key)
            content = self._content(record)
            if content is None:
                self._pairs.read_tails()  # another process may have added it, or added it anew
                newer = self._pairs.find(key)
                if newer != record:
                    content = self._content(newer)
            return content
        except OSError as error:
            self._turn_off(_reason(error))
            return None

    @scope
    def making(self, key: int) -> Iterator[None]:
        """Wait while another thread or process makes the content of this key, then exclude others
        from making it. Whoever enters checks again whether it is there by now.

        A content that is made for another one excludes and waits for nobody.
        """
        # What cannot be kept nobody need wait for; and who waits while another waits for its own
        # content might wait for ever.
        if self._off or self._is_full or _of_thread.is_making:
            yield
            return
        with self._counting:  # the system's lock excludes no threads
            maker = self._makers.setdefault(key, threading.Lock())
        _of_thread.is_making = True
        place = key % _NUM_KEYS
        try:
            with maker:
                # Where the system refuses, two processes may make the content: either will do.
                is_held = _lock(self._making, place)
                try:
                    yield
                finally:
                    if is_held:
                        fcntl.lockf(self._making, fcntl.LOCK_UN, 1, place)
        finally:
            _of_thread.is_making = False
            with self._counting:
                self._makers.pop(key, None)

    def put(self, key: int, parts: Sequence[Any]) -> bool:
        """Add a content, given in parts; return whether there was room."""
        if self._off or self._is_full:
            return False
        views = [memoryview(part).cast("B") for part in parts]
        try:
            if why := self._take(sum(map(len, views)) + RECORD.itemsize):
                return self._full(why)
            self._pairs.add(key, views)
        except FileNotFoundError:  # somebody has removed the folder
            return False
        except OSError as error:
            if error.errno in _NO_ROOM:
                return self._full(f"no room: {error.strerror}")
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
            num_megabytes = self.num_bytes / 1e6
        except OSError as error:
            return f"The cache in {self.folder} cannot be read: {_reason(error)}."
        share = min(1.0, self._pairs.num_keys() / max(1, num_items))
        return (
            f"The cache in {self.folder} holds {share:.0%} of the items, "
            f"{num_megabytes:.0f} MB.{hits}"
        )

    def renew_locks(self) -> None:
        """Replace the locks in a forked child: another thread may have held them."""
        self._counting = threading.Lock()  # for numbers and makers
        self._makers: dict[int, threading.Lock] = {}  # of the contents that this process makes

    def _open(self) -> str:
        """Open the folder; return why that cannot be done, or an empty text."""
        if fcntl is None:
            return "this system has no fcntl.lockf"
        self._folder = Descriptor(open_own_folder(self.folder))
        self._pairs = Pairs(self._folder)
        try:
            self._making = Descriptor(open_in(self._folder, "making"))
            with self._alone():
                pass
            self._pairs.read_tails()
        except OSError as error:  # a full disk, or a file system without locks
            return _reason(error)
        return ""

    def _turn_off(self, why: str) -> None:
        """Find and keep nothing from now on."""
        if not self._off:
            self._off = why
            _logger.warning("cache %s: not used: %s.", self.folder, why)

    def _content(self, record: Record | None) -> bytearray | None:
        if record is None:
            return None
        content = self._pairs.content(record)
        if content is None:
            self._say_damaged()
        return content

    def _say_damaged(self) -> None:
        """Say the 1st, 10th, 100th ... time that a content is damaged: all of them may be."""
        with self._counting:
            self._num_damaged += 1
            count = self._num_damaged
        if count == 10 ** (len(str(count)) - 1):
            _logger.warning(
                "cache %s: %d contents damaged so far; each is made anew.", self.folder, count
            )

    def _take(self, size: int) -> str:
        """Take bytes for a content and its record; return why there are none, or an empty text."""
        with self._alone() as taken:
            end = os.fstat(taken).st_size + size
            if self._max_bytes is None:
                free, spare = self._disk_bytes()
                if free - spare < size:
                    free_words, spare_words = _size_in_words(free), _size_in_words(spare)
                    return f"{free_words} are free on its disk, and it leaves {spare_words} free"
            elif isinstance(self._max_bytes, int):
                if end > self._max_bytes:
                    return "it has reached its limit"
                self._make_room(self._max_bytes - end)
            elif end > self._max_bytes.left_for(self.folder):
                return "it has reached its limit"
            os.ftruncate(taken, end)
        return ""

    @scope
    def _alone(self) -> Iterator[int]:
        """Exclude all other threads and processes from taking bytes. Each opens the file anew, for
        a lock belongs to all who share an open file.
        """
        file = open_in(self._folder, TAKEN)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a child forked meanwhile has it open, too
            os.close(file)

    def _make_room(self, most: int) -> None:
        """Remove folders of the same dataset that nobody uses while they have more than ``most``
        bytes together: those of its earlier versions and transforms.
        """
        place, own = os.path.split(self.folder)
        dataset, dash, _ = own.partition("-")
        if not dash:
            return
        others = [
            os.path.join(place, name)
            for name in os.listdir(place)
            if name.startswith(f"{dataset}-") and name != own
        ]
        sizes = {folder: bytes_taken(folder) for folder in others}
        for folder in sorted(others, key=last_use):
            if sum(sizes.values()) <= most:
                break
            if remove_unused(folder):
                del sizes[folder]

    def _disk_bytes(self) -> tuple[int, int]:
        """Return the bytes that are free on the disk, and those that are to stay so."""
        disk = os.fstatvfs(self._folder)
        return disk.f_bavail * disk.f_frsize, spare_bytes(disk.f_blocks * disk.f_frsize)

    def _full(self, why: str) -> bool:
        with self._counting:
            is_said, self._is_full = self._is_full, True
        if not is_said:
            _logger.warning(
                "cache %s: %s. It stops growing at %s; other samples are loaded without it.",
                self.folder,
                why,
                _size_in_words(self.num_bytes),
            )
        return False


class _OfThread(threading.local):
    is_making = False
    """Whether it makes a content at the moment."""


_of_thread = _OfThread()


def _lock(file: int, place: int) -> bool:
    """Lock one byte of a file; return whether the system allows it."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX, 1, place)
    except OSError:
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
