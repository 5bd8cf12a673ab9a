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
    """The threads of a stage. Each gets a slot by ``slots`` or ``add``, and leaves once."""

    def __init__(self, count: int, new_ring: Callable[[int], Ring]) -> None:
        self.thread_count = ThreadCount(count)
        self.has_begun = False
        self._new_ring = new_ring
        # Guards the numbers below and the free slots: threads leave while the run adds some. Never
        # held in a wait.
        self._lock = threading.Lock()
        self._num_slots = 0
        self._num_present = 0
        self._free: list[Slot] = []  # a heap, so that low numbers are taken first

    def slots(self) -> list[Slot]:
        """Return the slots of the threads that begin with the stage."""
        self.has_begun = True
        self._num_present = self.thread_count.count
        return [self._next_slot() for _ in range(self._num_present)]

    def add(self, count: int) -> list[Slot]:
        """Return slots for ``count`` more threads; [] if the stage has ended."""
        with self._lock:
            if not self._num_present:  # the last thread has ended the stage: the outlet is finished
                return []
            self._num_present += count
            return [self._next_slot() for _ in range(count)]

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
