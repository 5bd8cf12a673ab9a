"""Contents by key, written once and read by all processes of a machine.

    data     the contents, see contents.py
    index    where each is; locks on its bytes exclude others from making a content

Everything is read and written by calls that fail with an error; mapped memory would kill the
process if the disk were full or a file cut. Whatever fails once the store is open turns it off, in
this process, and the samples are made without it; what somebody has removed is only missing.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

from ...handlers import unless_of_handler
from ...locks import RLock, lock_held_at_forks
from ...scopes import scope
from . import folders
from .contents import RECORD, Contents, Record

_logger = logging.getLogger("spdl_torch.io")
_counting = lock_held_at_forks()  # for numbers and makers

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
    is_shared: whether ``max_bytes`` is for all folders beside it together, and none makes room.
    alive: the open file that holds the folder as long as this store lives, if it is to be held.
    why_off: why it is not to be used at all.

    A store that cannot be used (a full disk, a file system without locks) is off: nothing is found
    and nothing kept, and the log says so once.

    Threads and processes may use it at once. Raises: OSError: the folder cannot be made or opened;
    ValueError: others could have written what is there.
    """

    def __init__(
        self,
        folder: str,
        *,
        max_bytes: int | None = None,
        is_shared: bool = False,
        alive: folders.Descriptor | None = None,
        why_off: str = "",
    ) -> None:
        self.folder = folder
        self._max_bytes, self._is_shared = max_bytes, is_shared
        self._alive = alive
        self.num_found = self.num_missing = 0
        """The calls of ``get`` in this process that found a content, and that did not."""
        self._is_full = False
        self._said = set[str]()
        self._off = ""
        # Of the contents that a process makes; a forked child has none of its parent's.
        self._makers: dict[tuple[int, int], RLock] = {}
        if why_off:
            self._turn_off(why_off)
        else:
            folders.own_folder(folder)
            try:
                self._contents = Contents(folder)
                self._contents.read_tail()
            except unless_of_handler(OSError) as error:  # a full disk
                self._turn_off(error)

    def __reduce__(self) -> tuple[Any, ...]:
        most, is_shared = self._max_bytes, self._is_shared
        again = partial(Store, max_bytes=most, is_shared=is_shared, why_off=self._off)
        return again, (self.folder,)

    def __deepcopy__(self, memo: Any) -> Store:
        return self

    @property
    def num_bytes(self) -> int:
        """The bytes of the contents of all processes."""
        return self._contents.num_bytes

    def get(self, key: int, *, is_counted: bool = True) -> bytearray | None:
        """Return the content of a key; None = there is none."""
        content = None
        try:
            if not self._off:
                record = self._contents.table.find(key)
                content = self._content(record)
                if content is None:
                    self._contents.read_tail()  # others may have added it, or added it anew
                    if (newer := self._contents.table.find(key)) != record:
                        content = self._content(newer)
        except unless_of_handler(OSError) as error:
            self._turn_off(error)
        if is_counted:
            with _counting:
                self.num_found += content is not None
                self.num_missing += content is None
        return content

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
        own = os.getpid(), key
        with _counting:  # the system's lock excludes no threads
            maker = self._makers.setdefault(own, RLock())
        _of_thread.is_making = True
        try:
            # Where the system refuses, two processes may make the content: either will do.
            with maker, folders.byte_locked(self._contents.index, key % _NUM_KEYS):
                yield
        finally:
            _of_thread.is_making = False
            with _counting:
                self._makers.pop(own, None)

    def put(self, key: int, content: bytes | memoryview) -> bool:
        """Add a content; return whether there was room."""
        if self._off or self._is_full:
            return False
        try:
            with self._contents.adding():
                if not self._is_too_much(len(content) + RECORD.itemsize):
                    self._contents.add(key, content)
                    return True
        except FileNotFoundError:  # somebody has removed the folder
            return False
        except unless_of_handler(OSError) as error:
            if error.errno not in folders.NO_ROOM:
                self._turn_off(error)
                return False
        self._is_full = True
        self._say_once("full; other samples are loaded without it")
        return False

    def counts(self) -> dict[str, int]:
        """Return how often this process found a content, and how often it did not."""
        return {"cache/found": self.num_found, "cache/missing": self.num_missing}

    def remark(self) -> str:
        """Return the line for a report: how often this process found a content."""
        if self._off:
            return f"The cache in {self.folder} is not used: {self._off}."
        found = self.num_found  # read once: others count meanwhile
        calls = found + self.num_missing
        hits = f" This process found {found} of {calls} there." if calls else ""
        return f"The cache is in {self.folder}.{hits}"

    def _turn_off(self, why: str | OSError) -> None:
        """Find and keep nothing from now on, in this process."""
        if not self._off:
            self._off = why if isinstance(why, str) else why.strerror or type(why).__name__
            _logger.warning("cache %s: not used: %s.", self.folder, self._off)

    def _content(self, record: Record | None) -> bytearray | None:
        if record is None:
            return None
        content = self._contents.get(record)
        if content is not None:
            return content
        self._say_once("contents were damaged, and are made anew")
        return None

    def _is_too_much(self, size: int) -> bool:
        """Return whether ``size`` more bytes are too many."""
        most = self._max_bytes
        if most is None:
            disk = os.statvfs(self.folder)
            free, spare = disk.f_bavail * disk.f_frsize, spare_bytes(disk.f_blocks * disk.f_frsize)
            return free - spare < size
        if self._is_shared:
            return folders.bytes_taken_in(os.path.dirname(self.folder)) + size > most
        before = folders.bytes_taken(self.folder)
        if before + size > most:
            return True
        self._make_room(most - before - size)
        return False

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
        sizes = {folder: folders.bytes_taken(folder) for folder in others}
        for folder in sorted(others, key=folders.last_use):
            if sum(sizes.values()) <= most:
                break
            if folders.remove_unused(folder):
                del sizes[folder]

    def _say_once(self, what: str) -> None:
        with _counting:
            is_said = what in self._said
            self._said.add(what)
        if not is_said:
            _logger.warning("cache %s: %s.", self.folder, what)


class _OfThread(threading.local):
    is_making = False
    """Whether it makes a content at the moment."""


_of_thread = _OfThread()
