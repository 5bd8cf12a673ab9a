"""The threads of a stage: how many there are, where each one counts, and who leaves last."""

from __future__ import annotations

import heapq
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..stats.thread_time import Headcount

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..hooks.task_hooks import TaskCell
    from ..recorder.rings import Ring

__all__ = ["Slot", "StageThreads"]


@dataclass(order=True, slots=True)
class Slot:
    """A thread's place; the next one to take it goes on counting there."""

    number: int
    ring: Ring = field(compare=False)
    cell: TaskCell | None = field(default=None, compare=False)


class StageThreads:
    """Who works at a stage. A thread sits down by ``slots`` or ``add`` and leaves once."""

    def __init__(self, count: int, new_ring: Callable[[int], Ring]) -> None:
        self.headcount = Headcount(count)
        self.has_begun = False
        self._new_ring = new_ring
        self._lock = threading.Lock()
        self._num_slots = 0
        self._num_present = 0
        self._free: list[Slot] = []  # a heap, so that low numbers are taken first

    def slots(self) -> list[Slot]:
        """For those who begin with the stage."""
        self.has_begun = True
        self._num_present = self.headcount.count
        return [self._next_slot() for _ in range(self._num_present)]

    def add(self, count: int) -> list[Slot]:
        """For ``count`` more; [] if the stage has ended."""
        with self._lock:
            if not self._num_present:
                return []
            self._num_present += count
            return [self._next_slot() for _ in range(count)]

    def leave(self, slot: Slot | None, workers: int = 1) -> bool:
        """``workers`` are done; True for the last one. None: nobody will sit there again."""
        with self._lock:
            self._num_present -= workers
            if slot is not None:
                heapq.heappush(self._free, slot)
            if self._num_present:
                return False
        self.headcount.end()
        return True

    @property
    def num_slots(self) -> int:
        """The most threads that there ever were at once."""
        return self._num_slots

    def _next_slot(self) -> Slot:
        if self._free:
            return heapq.heappop(self._free)
        number, self._num_slots = self._num_slots, self._num_slots + 1
        return Slot(number, self._new_ring(number))
