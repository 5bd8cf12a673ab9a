"""The threads of a stage: how many there are, where each one counts, which one leaves last."""

from __future__ import annotations

import heapq
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..stats.counters import ThreadCount

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..hooks.task_hooks import TaskCell
    from ..recorder.rings import Ring


@dataclass(order=True, slots=True)
class Slot:
    """The ring and the cell of a thread; a later thread in the same slot continues with them."""

    number: int
    ring: Ring = field(compare=False)
    cell: TaskCell | None = field(default=None, compare=False)


class StageThreads:
    """The threads of a stage. Each gets a slot by ``slots`` or ``resize``, and leaves once."""

    def __init__(self, count: int, new_ring: Callable[[int], Ring]) -> None:
        self.wanted = count
        """The number of threads that the stage is to have."""
        self.thread_count = ThreadCount(count)
        self.has_begun = False
        self._new_ring = new_ring
        # Guards the numbers and the free slots: threads leave while the run adds some. Never held
        # in a wait.
        self._lock = threading.Lock()
        self._num_slots = 0
        self._num_present = 0
        self._free: list[Slot] = []  # a heap, so that low numbers are taken first

    def slots(self) -> list[Slot]:
        """Return the slots of the threads that begin with the stage."""
        self.has_begun = True
        self.thread_count.count = self.wanted
        self._num_present = self.wanted
        return [self._next_slot() for _ in range(self.wanted)]

    def resize(self, count: int) -> list[Slot]:
        """Have ``count`` threads from now on; return the slots of those to be started."""
        with self._lock:
            self.wanted = count
            more = count - self.thread_count.count
            if more <= 0 or not self._num_present:  # else the last one has ended the stage
                return []
            self.thread_count.change(count)
            self._num_present += more
            return [self._next_slot() for _ in range(more)]

    def is_spare(self) -> bool:
        """Return whether the calling thread, between two items, is one too many; it then leaves."""
        if self.thread_count.count <= self.wanted:
            return False
        with self._lock:
            count = self.thread_count.count
            if count <= self.wanted:
                return False
            self.thread_count.change(count - 1)
            return True

    def leave(self, slot: Slot | None, workers: int = 1) -> bool:
        """Count ``workers`` that end; True for the last one. None: the slot is not used again."""
        with self._lock:
            self._num_present -= workers
            if slot is not None:
                heapq.heappush(self._free, slot)
            if self._num_present:
                return False
        self.thread_count.end()
        return True

    def _next_slot(self) -> Slot:
        if self._free:
            return heapq.heappop(self._free)
        number, self._num_slots = self._num_slots, self._num_slots + 1
        return Slot(number, self._new_ring(number))
