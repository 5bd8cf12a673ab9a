"""How the results of a stage come into the queue after it.

A stage numbers items in the order in which it takes them. One that keeps their order puts each
result with its number, and the outlet restores the order: that costs neither a thread nor a second
buffer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING, Any

from ..locks import RLock
from .channel import EPOCH_END

if TYPE_CHECKING:
    from .stage_hooks import StatsQueue


class AsDone:
    """As they are done. One thread alone keeps their order, and epochs apart."""

    def __init__(self, inlet: StatsQueue, outlet: StatsQueue) -> None:
        self._outlet = outlet

    def emit(self, number: int, result: Any, *, last: bool = True) -> int:
        """Pass on a result of the item of that number, ``last``: the only or last one. Return its
        number in the outlet, -1 = unknown."""
        return self._outlet.put(result)

    def skip(self, number: int) -> None:
        """Note that the item of that number has no result, or no further one."""

    def end_epoch(self, number: int) -> None:
        """Pass on the end of an epoch, the mark of that number, behind all of its items."""
        self.emit(number, EPOCH_END)

    def is_turn(self, number: int) -> bool:
        """Return whether a result of that item can be passed on before those of others, so that one
        thread may do it for all."""
        return True


class InOrder(AsDone):
    """In the order of the items."""

    def emit(self, number: int, result: Any, *, last: bool = True) -> int:
        return self._outlet.put_at(number, result, last=last)

    def skip(self, number: int) -> None:
        self._outlet.skip(number)

    def is_turn(self, number: int) -> bool:
        return number == self._outlet.turn or self._outlet.has_room(number, True)


class EpochByEpoch(AsDone):
    """As they are done, where several threads keep epochs apart.

    The place of an item in the outlet is the number of its epoch, and what comes too early for that
    waits there. Whoever settles the last item of an epoch (passed on, dropped or failed; the mark
    is one of them) ends it by putting the mark. So nobody else waits for an item that is late.
    """

    def __init__(self, inlet: StatsQueue, outlet: StatsQueue) -> None:
        super().__init__(inlet, outlet)
        # The inlet knows the number of a mark before anybody takes a later item.
        self._marks = inlet.mark_numbers
        self._lock = RLock()  # never held in a wait
        self._num_settled: Counter[int] = Counter()  # of the epochs that have not ended

    def emit(self, number: int, result: Any, *, last: bool = True) -> int:
        output = self._outlet.put_at(self._epoch_of(number), result, last=False)
        if last:
            self.skip(number)
        return output

    def skip(self, number: int) -> None:
        marks, epoch = self._marks, self._epoch_of(number)
        with self._lock:
            self._num_settled[epoch] += 1
            if epoch == len(marks):  # the mark has not come
                return
            begin = marks[epoch - 1] + 1 if epoch else 0
            if self._num_settled[epoch] <= marks[epoch] - begin:
                return
            del self._num_settled[epoch]
        self._outlet.put_at(epoch, EPOCH_END)

    def end_epoch(self, number: int) -> None:
        self.skip(number)

    def is_turn(self, number: int) -> bool:
        return self._epoch_of(number) == self._outlet.turn

    def _epoch_of(self, number: int) -> int:
        """Return the epoch of an item, or of the mark at its end."""
        return bisect_left(self._marks, number)
