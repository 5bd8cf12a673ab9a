"""The rings of the flight recorder: the last turns of each thread, written without a lock.

Only the thread itself writes its ring; when it is full, the oldest records are overwritten, and
counted. Anyone may read at any time.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sized
from time import perf_counter_ns
from typing import NamedTuple

from .timeline import Outcome, Part, Role, Row, Turn

_FIRST_CAPACITY = 64  # then doubled: most rings never fill, and to clear a whole one takes 0.3 ms

_RECORD = struct.Struct("10q")
_pack_into, _SIZE = _RECORD.pack_into, _RECORD.size
_EPOCH, _THREAD, _ADDED = range(3)  # places in the head of a ring, of 8 bytes each in a shared one
_HEAD_SIZE = 3 * 8

_TURN_KINDS = len(Outcome)  # lower kinds are the outcome of a turn, higher ones the name of a part


class Ring:
    """The last turns of one thread. Only that thread writes."""

    def __init__(self, capacity: int, shortest_ns: int) -> None:
        self.shortest_ns = shortest_ns
        """Turns and parts shorter than this are not added."""
        self._head: list[int] | memoryview = [0, 0, 0]
        self._capacity = capacity
        self._buffer: bytearray | memoryview = bytearray(min(capacity, _FIRST_CAPACITY) * _SIZE)
        self._part_names: list[str] = []

    @property
    def thread_id(self) -> int:
        """The thread that writes; 0 = it has not begun."""
        return self._head[_THREAD]

    def begin(self) -> int:
        """Note the calling thread, before its first turn; return the time."""
        self._head[_THREAD] = threading.get_native_id()
        return perf_counter_ns()

    def add(
        self,
        times: tuple[int, int, int, int, int],
        number: int,
        output: int,
        before: Sized | None,
        after: Sized | None,
        kind: int = Outcome.PASSED,
    ) -> None:
        """Record a turn: the fields of :class:`Turn`, the first five as ``times``, and the queues
        before and after the stage.

        The caller has compared its length with ``shortest_ns``: it does so for every item, and a
        call for that would cost more than all the rest.
        """
        added = self._head[_ADDED]
        place = added % self._capacity * _SIZE
        if place == len(self._buffer):
            # A new one: a reader of the old one at this moment keeps it from growing.
            more = bytes(min(place, self._capacity * _SIZE - place))
            self._buffer = bytearray(self._buffer) + more
        num_before = -1 if before is None else len(before)
        num_after = -1 if after is None else len(after)
        _pack_into(self._buffer, place, *times, number, output, num_before, num_after, kind)
        self._head[_ADDED] = added + 1  # last: whoever reads this count finds the record in place

    def add_part(self, name: str, started_ns: int, ended_ns: int, cpu_ns: int) -> None:
        """Record a named part of the current turn."""
        if name not in self._part_names:
            self._part_names.append(name)
        kind = _TURN_KINDS + self._part_names.index(name)
        times = started_ns, started_ns, ended_ns, ended_ns, cpu_ns
        self.add(times, -1, -1, None, None, kind)

    def copied(self) -> RingCopy:
        """Return what it holds now. Any thread may call this."""
        # No lock: the thread writes on. The count is read first, then the buffer is copied. What
        # the thread wrote in between, while it was copied as well, and the record it may be writing
        # now, replaced the oldest ones, which are left out.
        added = self._head[_ADDED]
        content = bytes(memoryview(self._buffer)[: added * _SIZE])
        unsafe = self._head[_ADDED] + 1 - self._capacity
        first = max(0, added - self._capacity, unsafe)
        names = tuple(self._part_names)
        return RingCopy(self.thread_id, self._capacity, first, added, content, names)

    def read(self) -> tuple[list[Turn], list[Part], int]:
        """Return turns, parts, and how many of them were overwritten. Any thread may call this."""
        return self.copied().read()


class SharedRing(Ring):
    """A ring in memory that two processes have: one writes it, and the other one reads."""

    def __init__(self, memory: memoryview, part_names: tuple[str, ...]) -> None:
        """``part_names``: of all the parts that will be recorded."""
        self.shortest_ns = 0
        self._head, self._buffer = memory[:_HEAD_SIZE].cast("q"), memory[_HEAD_SIZE:]
        self._capacity = len(self._buffer) // _SIZE
        self._part_names = list(part_names)

    @staticmethod
    def num_bytes(capacity: int) -> int:
        """Return the size of the memory for so many records."""
        return _HEAD_SIZE + capacity * _SIZE

    def clear(self, epoch: int, shortest_ns: int) -> None:
        """Begin anew: what is written from now on belongs to that epoch."""
        self.shortest_ns = shortest_ns
        # The epoch last: its reader does not take what is left of the one before for it.
        self._head[_ADDED] = self._head[_THREAD] = 0
        self._head[_EPOCH] = epoch

    @property
    def epoch(self) -> int:
        """The number of the epoch that it is about."""
        return self._head[_EPOCH]


class RingCopy(NamedTuple):
    """What a ring held at one moment: quick to send to another process, and read when somebody
    asks."""

    thread_id: int
    capacity: int
    first: int
    """The number of the first record that it holds; those before were overwritten."""
    end: int
    content: bytes
    part_names: tuple[str, ...]

    def read(self) -> tuple[list[Turn], list[Part], int]:
        """Return turns, parts, and how many of them were overwritten."""
        turns: list[Turn] = []
        parts: list[Part] = []
        for place in range(self.first, self.end):
            *fields, kind = _RECORD.unpack_from(self.content, place % self.capacity * _SIZE)
            if kind < _TURN_KINDS:
                turns.append(Turn(*fields))
                if kind != Outcome.PASSED:
                    turns[-1] = turns[-1]._replace(outcome=Outcome(kind))
            else:
                name = self.part_names[kind - _TURN_KINDS]
                parts.append(Part(name, fields[0], fields[2], fields[4]))
        return turns, parts, self.first


def read_row(stage: str, stage_number: int, replica: int, role: Role, ring: Ring | RingCopy) -> Row:
    """Return a row of a timeline, whose ring is read now."""
    turns, parts, num_lost = ring.read()
    return Row(
        stage, stage_number, replica, role, ring.thread_id, tuple(turns), tuple(parts), num_lost
    )


class ConsumerRing(Ring):
    """The turns of the consumer: waiting for an item, then working with it."""

    def __init__(self, capacity: int, shortest_ns: int) -> None:
        super().__init__(capacity, shortest_ns)
        self._asked_ns = self._got_ns = 0
        # The time of all waits that have ended, and when the present one began; 0 = there is none.
        # One object: whoever reads meanwhile must not miss a wait, or count it twice.
        self._waits = (0, 0)
        self._number = -1
        self.num_got = 0
        """The number of items that came."""

    def ask(self, before: Sized) -> None:
        """Note that the consumer asks for an item of ``before``: its last step has ended."""
        now = perf_counter_ns()
        if self._got_ns:
            self._end_turn(now, before)
        elif self._asked_ns:
            return  # asked before, and timed out
        else:
            self._head[_THREAD] = threading.get_native_id()
        self._asked_ns = now
        self._waits = self._waits[0], now

    def got(self, number: int) -> None:
        """Note that the item came."""
        self._number = number
        self.num_got += 1
        self._got_ns = now = perf_counter_ns()
        self._waits = self._waits[0] + now - self._asked_ns, 0

    def end(self) -> None:
        """Note that no more items will come."""
        now = perf_counter_ns()
        if self._got_ns:
            self._end_turn(now, None)
        elif self._asked_ns:
            self._waits = self._waits[0] + now - self._asked_ns, 0
        self._asked_ns = 0

    def _end_turn(self, now: int, before: Sized | None) -> None:
        if now - self._asked_ns >= self.shortest_ns:
            times = self._asked_ns, self._got_ns, now, now, -1
            self.add(times, self._number, -1, before, None)
        self._got_ns = 0

    @property
    def waited_ns(self) -> int:
        """The time for which the consumer has waited, up to now. Any thread may ask."""
        waited_ns, since_ns = self._waits
        return waited_ns + (perf_counter_ns() - since_ns if since_ns else 0)

    @property
    def waiting_since_ns(self) -> int | None:
        """The time at which the current wait began; None = nobody waits."""
        return self._waits[1] or None

    def read(self) -> tuple[list[Turn], list[Part], int]:
        """Return the same as a ring, with the unfinished turn up to now."""
        turns, parts, num_lost = super().read()
        asked_ns, got_ns, now = self._asked_ns, self._got_ns, perf_counter_ns()
        if asked_ns and (not turns or turns[-1].since_ns < asked_ns):
            started = got_ns or now
            number = self._number if got_ns else -1
            turns.append(Turn(asked_ns, started, now, now, -1, number, -1, -1, -1))
        return turns, parts, num_lost
