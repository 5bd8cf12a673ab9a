"""What a channel measures of itself, beside the number of its items."""

from __future__ import annotations

from time import perf_counter_ns

from ..stats.counters import QueueCounters
from .waits import WaitTime


class Occupancy:
    """How full a channel was, and how long it made others wait. The channel's lock is held.

    The channel writes ``empty_since_ns``, ``empty_ns`` and ``peak`` itself, as it puts and takes:
    a call for each item would cost as much as the rest.
    """

    __slots__ = (
        "_created_ns",
        "_ended_ns",
        "empty_ns",
        "empty_since_ns",
        "get_wait",
        "peak",
        "put_wait",
    )

    def __init__(self) -> None:
        self.put_wait = WaitTime()
        self.get_wait = WaitTime()
        self._created_ns = self.empty_since_ns = perf_counter_ns()
        self.empty_ns = 0
        self._ended_ns: int | None = None
        self.peak = 0
        """The most items that waited at once."""

    def end(self) -> None:
        """Stop the clock, with the last item."""
        self._ended_ns = self._ended_ns or perf_counter_ns()

    def counters(self, num_put: int, num_got: int) -> QueueCounters:
        """Return everything measured so far, open waits and open empty time included."""
        now = self._ended_ns or perf_counter_ns()
        open_empty = now - self.empty_since_ns if self.empty_since_ns else 0
        return QueueCounters(
            elapsed_ns=now - self._created_ns,
            num_put=num_put,
            num_got=num_got,
            put_wait=self.put_wait.read(),
            get_wait=self.get_wait.read(),
            empty_ns=self.empty_ns + max(0, open_empty),
            peak_items=self.peak,
        )
