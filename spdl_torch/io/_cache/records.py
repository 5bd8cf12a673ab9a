"""The records of a store's indexes, and the table of those that a process has read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

RECORD = np.dtype(
    [("key", "<i8"), ("offset", "<i8"), ("length", "<i8"), ("checksum", "<u4"), ("pair", "<u4")]
)
"""Where a content is. ``pair`` is the number of the files, as this process counts them; 0 on disk.
``checksum`` becomes 0 in memory once it was compared."""

Record = tuple[int, ...]

_FEW = 1000


def sound(records: NDArray[np.void], num_bytes: int) -> NDArray[np.bool_]:
    """Return for each record whether it can be right, if the contents have so many bytes."""
    offset, length = records["offset"], records["length"]
    found: NDArray[np.bool_] = (offset >= 0) & (offset <= num_bytes) & (length >= 0)
    return found & (length <= num_bytes - offset) & (records["checksum"] > 0)


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
