"""The number of a stage's threads over time, and the time that they had together."""

from __future__ import annotations

from time import perf_counter_ns


class ThreadCount:
    """The number of a stage's threads, which may change while it runs.

    Ratios of a stage are shares of the time that all its threads had: concurrency times elapsed
    time, as long as the number never changes.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        """The number of threads that the stage is to have now."""
        self._changes: list[tuple[int, int]] = []  # when, and by how many
        self._ended_ns: int | None = None

    def change(self, count: int) -> None:
        """Set the number. One thread at a time may call this; any thread may read."""
        self._changes.append((perf_counter_ns(), count - self.count))
        self.count = count

    def end(self) -> None:
        """Stop the clock at the end of the stage."""
        self._ended_ns = self._ended_ns or perf_counter_ns()

    def thread_ns(self, elapsed_ns: int) -> int:
        """Return the time that all threads had in the last ``elapsed_ns``, up to now or the end."""
        # A copy in one step: another thread may append a change meanwhile.
        changes, count = tuple(self._changes), self.count
        end_ns = self._ended_ns or perf_counter_ns()
        total = elapsed_ns * (count - sum(delta for _, delta in changes))
        return total + sum(
            delta * min(elapsed_ns, max(0, end_ns - when_ns)) for when_ns, delta in changes
        )
