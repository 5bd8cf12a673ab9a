"""Marks, which pass through channels beside items: the end of an epoch, the lack of an item."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

__all__ = [
    *("ABSENT", "END_OF_DATA", "EPOCH_END", "SKIPPED"),
    *("Mark", "MarkNumbers", "is_eof", "is_epoch_end"),
]


class Mark:
    """No item: no op is called with it and no figure counts it, but it takes room as items do."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name}>"


class MarkNumbers:
    """The numbers of the marks in a channel, where they have some as items do, so that figures can
    leave them out. The channel's lock is held.
    """

    __slots__ = ("_numbers", "num_got")

    def __init__(self) -> None:
        self._numbers: deque[int] = deque()  # of those that wait, or were got lately
        self.num_got = 0
        """Marks that were got, as of the last count."""

    def add(self, number: int) -> None:
        """Note the number of a mark that was put."""
        self._numbers.append(number)

    def count_waiting(self, num_got: int) -> int:
        """Count those that wait; ``num_got`` items and marks were got."""
        while self._numbers and self._numbers[0] < num_got:
            self._numbers.popleft()
            self.num_got += 1
        return len(self._numbers)

    def __bool__(self) -> bool:
        return bool(self._numbers)


SKIPPED: Final = Mark("skipped")
"""Takes the place, in the order, of an item that was dropped; never leaves a channel."""

EPOCH_END: Final = Mark("end of the epoch")
"""Stands in a channel between two epochs of a continuous source."""

ABSENT: Final = Mark("absent")
"""Takes the place of a part of a batch: no element went this way, or the path dropped them all."""

END_OF_DATA: Final = Mark("end of the data")
"""Given to a merge op of the user's where a queue has ended."""


def is_eof(item: Any) -> bool:
    """Whether a merge op was given the end of a queue instead of an item."""
    return item is END_OF_DATA


def is_epoch_end(item: Any) -> bool:
    """Whether a merge op was given the end of an epoch instead of an item."""
    return item is EPOCH_END
