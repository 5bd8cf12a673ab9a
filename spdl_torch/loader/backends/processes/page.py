"""What a worker process does and has done, in memory that the trainer shares from the start.

The process writes without being asked, and the trainer reads when somebody wants to know: so it is
true however long the loop has been away, and of a process that hangs or was killed as well. For one
thing alone the trainer asks, what is at work in it: a thread that otherwise sleeps writes that.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import zlib
from array import array
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import reduction
from time import perf_counter_ns, sleep
from typing import TYPE_CHECKING, Any

from ....engine.counters import TaskCounters
from ....engine.recorder import CAPACITY
from ....engine.rings import SharedRing
from ....machine.histogram import NO_COUNTS
from ..activity import Activity, describe_activities
from .wire import File, anonymous_file

if TYPE_CHECKING:
    from ....engine.counters import TaskCell
    from .wire import OwnedSocket

PARTS = ("fetch", "collate")
"""What the ring's turns consist of."""

_word = struct.Struct("q")  # aligned, and so written and read as one
_slot = struct.Struct("IIqqq")  # checksum, bytes, epoch, number of batches, turn
# Of fetching and of collating: what a cell has counted, and its histogram.
_NUM_CELLS, _HISTOGRAM_BYTES = len(PARTS), 8 * len(NO_COUNTS)
_tasks = struct.Struct(f"qq{_NUM_CELLS * 8}q")  # epoch, time, numbers of the cells
_TASKS_BYTES = _tasks.size + _NUM_CELLS * _HISTOGRAM_BYTES
_MOST_LOOKS = 1000  # for a moment in which they are not written

# The places and sizes of what is longer. Of all that, only what is written takes memory.
_SLOTS, _SLOT_BYTES = 64, 32 * 1024
_TEXT, _TEXT_BYTES = _SLOTS + 2 * _SLOT_BYTES, 64 * 1024
_BEGUN = _TEXT + _TEXT_BYTES
_NOW = _BEGUN + _TASKS_BYTES
_RING = _NOW + _TASKS_BYTES
_BYTES = _RING + SharedRing.num_bytes(CAPACITY)


class _Word:
    """A number in the memory."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __get__(self, page: Page, _: object) -> int:
        return int(_word.unpack_from(page._memory, self._place)[0])

    def __set__(self, page: Page, value: int) -> None:
        _word.pack_into(page._memory, self._place, value)


class Page:
    """The memory, on either side. The trainer makes it."""

    is_up = _Word(0)
    """Whether the process has begun: signals to the trainer's group no longer end it."""
    idle_since_ns = _Word(8)
    """Since when the process has had no job, by ``perf_counter_ns``; 0 = it has one."""
    num_said = _Word(16)
    """How often the process has said what is at work in it."""
    _num_bytes_said = _Word(_TEXT)
    _num_changes = _Word(24)  # of the tasks; odd = one is under way

    def __init__(self, file: File) -> None:
        self._file: File | None = file
        self._memory = mmap.mmap(file, _BYTES)
        self._turn = 0
        self.ring = SharedRing(memoryview(self._memory)[_RING:], PARTS)
        """The turns of the process's worker."""

    @classmethod
    def new(cls) -> Page:
        """Return an empty page."""
        return cls(anonymous_file("spdl-torch-page", _BYTES))

    def __reduce__(self) -> Any:
        assert self._file is not None, "guaranteed by its owner: it is pickled to start a process"
        return _arrived, (reduction.DupFd(int(self._file)),)

    def has_arrived(self) -> None:
        """Let go of the file: the other process has the memory as well."""
        self._file = None

    def count(self, epoch: int, num_batches: int, counts: bytes) -> None:
        """Write the pickle of what has been counted, in so many batches. What does not fit is left
        out.

        There are two slots, written in turn, as the process may be killed while it writes one.
        """
        size, start = len(counts), _SLOTS + self._turn % 2 * _SLOT_BYTES
        if _slot.size + size > _SLOT_BYTES:
            return
        self._turn += 1
        head = zlib.crc32(counts), size, epoch, num_batches, self._turn
        _slot.pack_into(self._memory, start, *head)
        self._memory[start + _slot.size : start + _slot.size + size] = counts

    def counts(self, epoch: int) -> tuple[int, bytes]:
        """Return what was written last in that epoch, and of how many batches; empty = nothing."""
        found = [(0, 0, b"")]
        for start in (_SLOTS, _SLOTS + _SLOT_BYTES):
            checksum, size, of_epoch, number, turn = _slot.unpack_from(self._memory, start)
            content = self._memory[start + _slot.size : start + _slot.size + size]
            if size and of_epoch == epoch and zlib.crc32(content) == checksum:
                found.append((turn, number, content))
        return max(found)[1:]

    def begin_tasks(self, epoch: int, cells: Sequence[TaskCell]) -> None:
        """Write what the cells have at the begin of an epoch."""
        self._write_tasks(_BEGUN, epoch, cells)
        self.note_tasks(epoch, cells)

    def note_tasks(self, epoch: int, cells: Sequence[TaskCell]) -> None:
        """Write what the cells have now: cheap enough to be done before each batch is sent, so that
        who has the batch finds it counted."""
        self._num_changes += 1
        self._write_tasks(_NOW, epoch, cells)
        self._num_changes += 1

    def _write_tasks(self, start: int, epoch: int, cells: Sequence[TaskCell]) -> None:
        fetch, collate = cells
        numbers = *fetch.numbers(), *collate.numbers()
        _tasks.pack_into(self._memory, start, epoch, perf_counter_ns(), *numbers)
        start += _tasks.size
        for cell in cells:
            self._memory[start : start + _HISTOGRAM_BYTES] = cell.histogram.buckets
            start += _HISTOGRAM_BYTES

    def tasks(self, epoch: int) -> tuple[TaskCounters, TaskCounters] | None:
        """Return what was counted in that epoch, of fetching and of collating; None = nothing."""
        for _ in range(_MOST_LOOKS):  # the process may have been killed while it wrote
            number = self._num_changes
            content = self._memory[_BEGUN : _NOW + _TASKS_BYTES]
            if number == self._num_changes and not number % 2:
                break
        of_epoch, now = _counters_in(content, _TASKS_BYTES)
        if of_epoch != epoch or not now[0].elapsed_ns:
            return None
        before = _counters_in(content)[1]
        return now[0].since(before[0]), now[1].since(before[1])

    def say(self, text: str) -> None:
        """Write what is at work."""
        content = text.encode(errors="replace")[: _TEXT_BYTES - _word.size]
        self._num_bytes_said = len(content)
        start = _TEXT + _word.size
        self._memory[start : start + len(content)] = content
        self.num_said += 1  # last: whoever sees it finds the text

    @property
    def said(self) -> str:
        """What the process has said last."""
        start = _TEXT + _word.size
        return self._memory[start : start + self._num_bytes_said].decode(errors="replace")


def _counters_in(content: bytes, start: int = 0) -> tuple[int, list[TaskCounters]]:
    """Return the epoch, and what the cells had counted."""
    epoch, time_ns, *numbers = _tasks.unpack_from(content, start)
    found, start = [], start + _tasks.size
    for cell in range(_NUM_CELLS):
        histogram = array("q", content[start : start + _HISTOGRAM_BYTES])
        of_cell = numbers[8 * cell : 8 * cell + 8]
        found.append(TaskCounters._make((time_ns, *of_cell, tuple(histogram))))
        start += _HISTOGRAM_BYTES
    return epoch, found


def _arrived(duplicate: Any) -> Page:
    page = Page(File(duplicate.detach()))
    page.has_arrived()
    return page


_FINISH_SECONDS = 5.0  # for the sample that is being fetched when the trainer is gone


def start_guard(end: OwnedSocket, page: Page) -> Activity:
    """Start the thread in a worker process that writes what is at work when the trainer asks, with
    any byte, and ends the process when that is gone. It keeps nothing of the user's: the dataset
    ends with its worker. Return what the worker, on the main thread, writes.
    """
    activity = Activity()
    run = partial(_guard, end, page, activity)
    threading.Thread(target=run, name="spdl-guard", daemon=True).start()
    return activity


def _guard(end: OwnedSocket, page: Page, activity: Activity) -> None:
    with suppress(OSError):
        while end.recv(64):
            with suppress(Exception):
                page.say(_at_work(activity))
    # The main thread finds the wire closed as well, and ends the process after its sample. If that
    # does not return, the process ends here.
    sleep(_FINISH_SECONDS)
    os._exit(0)


def _at_work(activity: Activity) -> str:
    if activity.job is None and not activity.beginning:
        return "None of its threads is at work."  # it waits for a job, in our own code
    return describe_activities([activity], [threading.main_thread()], None)
