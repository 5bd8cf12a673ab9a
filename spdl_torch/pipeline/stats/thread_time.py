"""How many threads a stage has had, and how much time they had together."""

from __future__ import annotations

from time import perf_counter_ns

__all__ = ["Headcount"]


class Headcount:
    """The number of a stage's threads, which may change while it runs.

    Shares of the threads' time are of the time that all of them had: concurrency times elapsed
    time as long as the number never changes.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        """Threads that the stage is to have now."""
        self._changes: list[tuple[int, int]] = []  # when, and by how many
        self._ended_ns: int | None = None

    def change(self, count: int) -> None:
        """From now on it is ``count``. One thread at a time may call this; anyone may read."""
        self._changes.append((perf_counter_ns(), count - self.count))
        self.count = count

    def end(self) -> None:
        """The stage has ended: the clock stops."""
        self._ended_ns = self._ended_ns or perf_counter_ns()

    def thread_ns(self, elapsed_ns: int) -> int:
        """Time of all threads together in the last ``elapsed_ns``, up to now or the end."""
        changes, count = tuple(self._changes), self.count
        end_ns = self._ended_ns or perf_counter_ns()
        total = elapsed_ns * (count - sum(delta for _, delta in changes))
        return total + sum(
            delta * min(elapsed_ns, max(0, end_ns - when_ns)) for when_ns, delta in changes
        )
