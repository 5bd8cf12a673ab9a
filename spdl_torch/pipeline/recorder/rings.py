"""The rings of the flight recorder: the last turns of each thread, written without a lock.

Only the thread itself writes its ring; what is older than the ring is long is overwritten and
counted. Anyone may read at any time.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import replace
from time import perf_counter_ns
from typing import TYPE_CHECKING

from .timeline import Outcome, Part, Turn

if TYPE_CHECKING:
    import weakref
    from collections.abc import Sized

__all__ = ["ConsumerRing", "Ring"]

_FIRST_CAPACITY = 64  # then doubled: most rings do not fill, and clearing a whole one takes 0.3 ms


_RECORD = struct.Struct("10q")


_pack_into, _SIZE = _RECORD.pack_into, _RECORD.size


_TURN_KINDS = len(Outcome)  # kinds below are a turn's outcome, those from here on name a part


class Ring:
    """The last turns of one thread. Only that thread writes."""

    def __init__(self, capacity: int, shortest_ns: int) -> None:
        self.shortest_ns = shortest_ns
        """Turns and parts that take less than this are not to be added."""
        self.thread_id = 0
        self._capacity = capacity
        self._buffer = bytearray(min(capacity, _FIRST_CAPACITY) * _SIZE)
        self._num_added = 0
        self._part_names: list[str] = []

    def begin(self) -> int:
        """Called by the thread itself before its first turn; returns the time."""
        self.thread_id = threading.get_native_id()
        return perf_counter_ns()

    def add(
        self,
        since_ns: int,
        started_ns: int,
        ended_ns: int,
        done_ns: int,
        cpu_ns: int,
        number: int,
        output: int,
        before: Sized | None,
        behind: Sized | None,
        kind: int = Outcome.PASSED,
    ) -> None:
        """Keep a turn; the arguments are the fields of :class:`Turn`, and the queues before and
        behind. Those who call it have looked at ``shortest_ns``: that is done for every item, and
        a call costs more than the rest of it.
        """
        added = self._num_added
        place = added % self._capacity * _SIZE
        if place == len(self._buffer):
            self._buffer += bytes(min(place, self._capacity * _SIZE - place))
        _pack_into(
            self._buffer,
            place,
            *(since_ns, started_ns, ended_ns, done_ns, cpu_ns, number, output),
            *(-1 if before is None else len(before), -1 if behind is None else len(behind), kind),
        )
        self._num_added = added + 1

    def add_part(self, name: str, started_ns: int, ended_ns: int, cpu_ns: int) -> None:
        """Keep a named part of the turn that goes on."""
        if name not in self._part_names:
            self._part_names.append(name)
        kind = _TURN_KINDS + self._part_names.index(name)
        self.add(started_ns, started_ns, ended_ns, ended_ns, cpu_ns, -1, -1, None, None, kind)

    def read(self) -> tuple[list[Turn], list[Part], int]:
        """Turns, parts, and how many of them were overwritten."""
        added, copy = self._num_added, bytes(self._buffer)
        # What the thread wrote meanwhile, and may be writing now, replaced the oldest.
        unsafe = self._num_added + 1 - self._capacity
        first = max(0, added - self._capacity, unsafe)
        turns: list[Turn] = []
        parts: list[Part] = []
        for place in range(first, added):
            *fields, kind = _RECORD.unpack_from(copy, place % self._capacity * _SIZE)
            if kind < _TURN_KINDS:
                turns.append(Turn(*fields))
                if kind != Outcome.PASSED:
                    turns[-1] = replace(turns[-1], outcome=Outcome(kind))
            else:
                name = self._part_names[kind - _TURN_KINDS]
                parts.append(Part(name, fields[0], fields[2], fields[4]))
        return turns, parts, max(first, 0)


class ConsumerRing(Ring):
    """The turns of whoever takes the items: waiting for one, then working with it."""

    def __init__(self, capacity: int, shortest_ns: int) -> None:
        super().__init__(capacity, shortest_ns)
        self._asked_ns = self._got_ns = 0
        self._number = -1
        self.queue: weakref.ref[Sized] | None = None
        """Where the items come from."""

    def ask(self, before: Sized) -> None:
        """An item of the queue ``before`` is asked for: the work with the last one has ended."""
        now = perf_counter_ns()
        if self._got_ns:
            if now - self._asked_ns >= self.shortest_ns:
                self._add_open(now, before)
            self._got_ns = 0
        elif self._asked_ns:
            return  # asked before, and timed out
        else:
            self.thread_id = threading.get_native_id()
        self._asked_ns = now

    def got(self, number: int) -> None:
        """The item came."""
        self._number = number
        self._got_ns = perf_counter_ns()

    def end(self) -> None:
        """No item will come any more."""
        now = perf_counter_ns()
        if self._got_ns and now - self._asked_ns >= self.shortest_ns:
            self._add_open(now, None)
        self._asked_ns = self._got_ns = 0

    @property
    def waiting_since_ns(self) -> int | None:
        """When the wait began that still goes on; None = nobody waits."""
        return self._asked_ns if self._asked_ns and not self._got_ns else None

    @property
    def busy_since_ns(self) -> int | None:
        """When the item came with which the consumer still works, while others wait for it; None =
        it does not, or none does.
        """
        queue = None if self.queue is None else self.queue()
        return self._got_ns or None if queue is not None and len(queue) else None

    def read(self) -> tuple[list[Turn], list[Part], int]:
        """The turn that still goes on is included, up to now."""
        turns, parts, num_lost = super().read()
        asked_ns, got_ns, now = self._asked_ns, self._got_ns, perf_counter_ns()
        if asked_ns and (not turns or turns[-1].since_ns < asked_ns):
            started = got_ns or now
            number = self._number if got_ns else -1
            turns.append(Turn(asked_ns, started, now, now, -1, number, -1, -1, -1))
        return turns, parts, num_lost

    def _add_open(self, now: int, before: Sized | None) -> None:
        self.add(self._asked_ns, self._got_ns, now, now, -1, self._number, -1, before, None)
