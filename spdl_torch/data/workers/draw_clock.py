"""The clock of a loader's sampler, from which the loop draws itself: it waits in that time."""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class DrawClock:
    """Times the loop's draws from its sampler, whole batches where there are any. Only the loop's
    thread draws; any may read."""

    __slots__ = ("_reading",)

    def __init__(self) -> None:
        # The time of the draws that have ended, and when the present one began; 0 = there is none.
        # One object: whoever reads meanwhile must not miss a draw, or count it twice.
        self._reading = (0, 0)

    def time(self, draw: Callable[[], T]) -> T:
        """Return ``draw()``, and count its time."""
        total_ns, began_ns = self._reading[0], perf_counter_ns()
        self._reading = total_ns, began_ns
        try:
            return draw()
        finally:
            self._reading = total_ns + perf_counter_ns() - began_ns, 0

    def total_ns(self) -> int:
        """Return the time of all draws, with that of the present one so far."""
        total_ns, began_ns = self._reading
        return total_ns + (perf_counter_ns() - began_ns if began_ns else 0)
