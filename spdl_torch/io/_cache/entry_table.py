"""The table of a store's index in memory: the last entry of each number."""

from __future__ import annotations

from typing import Any

import numpy as np


class EntryTable:
    """The place in the index of the last entry of each number, as far as the index was read.

    One thread at a time adds to it; finding takes no lock.

    num_numbers: the numbers are below this; None = any of 64 bits.
    """

    def __init__(self, num_numbers: int | None) -> None:
        self.num_numbers = num_numbers
        self.num_read = 0
        """The number of entries that were added."""
        self.is_checked = bytearray()
        """For each of them whether this process has compared its content's checksum."""
        # Places plus 1; 0 = none.
        self._places: Any = {} if num_numbers is None else np.zeros(num_numbers, np.int64)

    def place(self, number: int) -> int:
        """Return the place of a number's last known entry; -1 = none."""
        if self.num_numbers is None:
            return int(self._places.get(number, 0)) - 1
        return int(self._places[number]) - 1

    def add(self, numbers: np.ndarray[Any, Any]) -> None:
        """Add the entries that follow in the index, by their numbers."""
        first, count = self.num_read, len(numbers)
        places = np.arange(first + 1, first + count + 1)
        # The flags come first: other threads look them up for what they find in the table.
        self.is_checked.extend(bytes(count))
        if self.num_numbers is None:
            self._places.update(zip(numbers.tolist(), places.tolist(), strict=True))
        else:
            is_known = numbers < self.num_numbers
            self._places[numbers[is_known].astype(np.int64)] = places[is_known]
        self.num_read = first + count

    def num_known(self) -> int:
        """Return how many numbers have an entry."""
        known = self._places
        return len(known) if isinstance(known, dict) else int(np.count_nonzero(known))
