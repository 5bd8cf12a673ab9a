"""How many items may wait in a channel, and what it measures of itself beside their number."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Final

from ..stats.counters import QueueCounters
from .waits import WaitTime

_QUICK_NS: Final = 100_000  # between two items taken, on average: quicker ones may come in bursts


class Capacity:
    """``capacity`` items; more, where bursts are allowed, while items are taken quickly.

    Quick items are small: nothing large is produced ten thousand times a second. Passing them on
    one by one would cost a thread switch each (10 µs on a virtual machine with idle cores), many
    times the work on them. The channel's lock is held in every method but ``allow_bursts``.
    """

    __slots__ = ("_last_full", "capacity", "low_water", "most", "now")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"Channel: capacity must be >= 1, got {capacity}.")
        self.capacity = capacity
        self.most = capacity
        self.now = capacity
        self.low_water = _low_water(capacity)
        self._last_full = (perf_counter_ns(), 0)  # when it was found full, items taken till then

    def allow_bursts(self, most: int) -> None:
        """Let up to ``most`` items wait while more than 10,000 a second are taken."""
        self.most = max(most, self.capacity)

    def grow(self, capacity: int) -> None:
        """Let ``capacity`` items wait, if that is more than now."""
        if capacity > self.capacity:
            now = max(self.now, capacity)
            most, low_water = max(self.most, capacity), _low_water(now)
            # All of them or none: Python runs signal handlers at calls, not between assignments.
            self.capacity, self.now, self.most, self.low_water = capacity, now, most, low_water

    def may_burst(self, num_taken: int) -> bool:
        """Double the room of a full channel if items were taken quickly, else go back to
        ``capacity``. True if there is more room now."""
        full_ns, taken_before = self._last_full
        taken = num_taken - taken_before
        if self.most == self.capacity or taken < self.capacity:
            return False  # too few to judge: the takers may be busy with their first items
        now_ns, before = perf_counter_ns(), self.now
        self._last_full = now_ns, num_taken
        quick = now_ns - full_ns < _QUICK_NS * taken
        self.now = min(2 * before, self.most) if quick else self.capacity
        self.low_water = _low_water(self.now)
        return self.now > before


def _low_water(room: int) -> int:
    """Return how many items are left when a producer that found the channel full is woken: it then
    brings several items per wake-up. Small channels, whose items are few and large, are refilled at
    once."""
    return room if room < 8 else room // 2


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
