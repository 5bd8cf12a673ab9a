"""Sentinels, which pass through channels among the items: the end of an epoch."""

from __future__ import annotations

from collections import deque
from typing import Final


class Sentinel:
    """A mark among the items: no op is called with it and no statistic counts it; it takes room."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name}>"


class SentinelNumbers(deque[int]):
    """The numbers of the sentinels in a channel that wait or were taken since the last count, so
    that statistics can leave them out.

    Sentinels are numbered with the items. The channel's lock is held, but for ``bool``.
    """

    __slots__ = ("num_got",)

    def __init__(self) -> None:
        super().__init__()
        self.num_got = 0
        """The number of sentinels that were taken, as of the last count."""

    def count_waiting(self, num_got: int) -> int:
        """Count those that wait, after ``num_got`` items and sentinels were taken."""
        while self and self[0] < num_got:
            self.popleft()
            self.num_got += 1
        return len(self)


SKIPPED: Final = Sentinel("skipped")
"""Takes the place, in the order, of an item that was dropped; never leaves a channel."""

EPOCH_END: Final = Sentinel("end of the epoch")
"""Stands in a channel between two epochs of a continuous source."""
