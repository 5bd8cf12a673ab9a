"""Locked memory that is read when nothing views it any more: who reads it, and when that is over.

A GPU copies from locked memory some time, when the thread that began the copy has long gone on and
let go of what it copied. torch waits for such copies before it uses its own pinned memory again; of
memory that is lent here it knows nothing. There are two kinds of copies:

- The transfer's own, from tensors that leave nothing behind in host memory. It keeps these until
  the event after the copies, so whatever has had no other reader is free when nothing views it.
- Those of everyone else: of objects that move themselves, at the hand-over or whenever their ``to``
  does it, and of the loop, which finds arrays in its batches, and objects of unknown classes. They
  run on streams to which batches are handed over. So where a batch may leave views of the memory to
  anyone, it is free when nothing views it and, after that, the streams have passed a *mark*.

Marks are made at hand-overs, on the thread that trains: from any other one they would become a part
of the graph that the stream might be capturing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ...locks import Loans, RLock
from .tree import is_leaf, is_plain

if TYPE_CHECKING:
    from .cuda import CudaBackend, Event
    from .region import Region

_LAST_HAND_OVERS = 8
"""A stream counts as long as it had one of so many hand-overs: a loop may use several in turn."""


class _Loan:
    """Memory that is lent until nothing views it and nothing reads it."""

    __slots__ = ("_end", "_start", "give_back", "is_moved", "is_shown", "region")

    def __init__(self, owner: np.ndarray[Any, Any], region: Region, give_back: Any) -> None:
        self._start = int(owner.ctypes.data)
        self._end = self._start + owner.nbytes
        self.region = region  # stays locked until the loan is over
        self.give_back: Callable[[], object] = give_back
        self.is_moved = False
        """Whether a transfer has moved what lies there, all of it."""
        self.is_shown = False
        """Whether a batch since then may have left views of it to anyone."""

    def has(self, address: int) -> bool:
        return self._start <= address < self._end


class Readers:
    """What is lent of a device's locked memory, and the streams that may read it."""

    def __init__(self) -> None:
        self._lock = RLock()  # guards the streams and the marks
        self._loans: Loans[_Loan] = Loans()
        self._ended: deque[tuple[int, _Loan]] = deque()  # with the number of the mark before
        self._streams: dict[Any, int] = {}  # with the number of their last hand-over
        self._num_marks = 0
        self._marks: deque[tuple[int, Sequence[Event]]] = deque()  # not known to have passed
        self._num_passed = 0

    def lend(
        self, owner: np.ndarray[Any, Any], region: Region, give_back: Callable[[], object]
    ) -> None:
        """Lend the memory of ``owner``, the base of all its views. ``give_back`` is called, by
        whoever looks, when it may be written again.
        """
        self._loans.lend(owner, _Loan(owner, region, give_back))

    def _end_loans(self) -> None:
        for loan in self._loans.take_back():
            if loan.is_moved and not loan.is_shown:
                loan.give_back()
            else:
                self._ended.append((self._num_marks, loan))

    def staged(self, batch: Any, plain: Iterable[Tensor]) -> None:
        """Note that a transfer moves ``batch``, of which it keeps the ``plain`` tensors itself."""
        loans = self._loans.lent()
        if not loans:
            return
        if _is_moved_whole(batch, lambda address: any(loan.has(address) for loan in loans)):
            for address in (tensor.data_ptr() for tensor in plain):
                for loan in loans:
                    loan.is_moved |= loan.has(address)
        else:  # nobody can say of which
            for loan in loans:
                loan.is_shown = True

    def handed_over(self, device: CudaBackend) -> None:
        """Note that the current stream has a batch from now on, and mark the streams. Called on the
        thread that receives it.
        """
        with self._lock:
            self._end_loans()
            # Before the events: what ends from here on waits for the next mark.
            number = self._num_marks = self._num_marks + 1
            self._streams[device.current_stream()] = number
            if len(self._streams) > 1:
                oldest = number - _LAST_HAND_OVERS
                self._streams = {s: last for s, last in self._streams.items() if last > oldest}
            if not self._ended:
                return
            events = [device.mark(stream) for stream in self._streams]
            if None not in events:
                self._marks.append((number, [event for event in events if event is not None]))
        self.look()

    def look(self) -> None:
        """Give back what nothing reads any more. Never waits for the device; any thread may call
        it.
        """
        if not (self._ended or self._loans):
            return
        with self._lock:
            self._end_loans()
            try:
                while self._marks and all(event.query() for event in self._marks[0][1]):
                    self._num_passed = self._marks.popleft()[0]
            except RuntimeError:
                return  # the device has failed: whoever asks it next gets the error
            while self._ended and self._ended[0][0] < self._num_passed:
                self._ended.popleft()[1].give_back()


def _is_moved_whole(batch: Any, is_lent: Callable[[int], bool]) -> bool:
    """Return whether nobody keeps a view of lent memory when a transfer has moved a batch.

    False where that is unknown: objects move themselves as they like.
    """
    if is_leaf(batch):
        return isinstance(batch, Tensor) and (is_plain(batch) or batch.device.type != "cpu")
    if batch is None or isinstance(batch, str | bytes | int | float | complex | np.generic):
        return True
    if isinstance(batch, np.ndarray):
        return not (batch.dtype.hasobject or is_lent(int(batch.ctypes.data)))
    members: Iterable[Any]
    if isinstance(batch, Mapping):
        members = batch.values()
    elif isinstance(batch, list | tuple):
        members = batch
    elif is_dataclass(batch) and not isinstance(batch, type):
        members = (getattr(batch, f.name, None) for f in fields(batch))
    else:
        return False
    members = (*members, *getattr(batch, "__dict__", {}).values())
    return all(_is_moved_whole(each, is_lent) for each in members)
