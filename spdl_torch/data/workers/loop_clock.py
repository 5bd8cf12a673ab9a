"""The clock of what a loader's loop does itself before it can wait for a batch: drawing from the
sampler, starting workers. It is no nearer to a batch in that time than where it waits."""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class LoopClock:
    """Times calls of one kind. Only the loop's thread makes them; any may read."""

    __slots__ = ("_reading",)

    def __init__(self) -> None:
        # The time of the calls that have ended, and when the present one began; 0 = there is none.
        # One object: whoever reads meanwhile must not miss a call, or count it twice.
        self._reading = (0, 0)

    def time(self, call: Callable[[], T]) -> T:
        """Return ``call()``, and count its time."""
        total_ns, began_ns = self._reading[0], perf_counter_ns()
        self._reading = total_ns, began_ns
        try:
            return call()
        finally:
            self._reading = total_ns + perf_counter_ns() - began_ns, 0

    def total_ns(self) -> int:
        """Return the time of all calls, with that of the present one so far."""
        total_ns, began_ns = self._reading
        return total_ns + (perf_counter_ns() - began_ns if began_ns else 0)
