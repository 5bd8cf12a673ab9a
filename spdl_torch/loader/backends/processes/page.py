"""What a worker process does and has done, in memory that the trainer shares from the start.

The process writes without being asked, and the trainer reads when somebody wants to know: so it is
true however long the loop has been away, and of a process that hangs or was killed as well. For one
thing alone the trainer asks, what is at work in it: a thread that otherwise sleeps writes that.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import threading
import zlib
from array import array
from collections.abc import Iterator, Sequence
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
# Of fetching and of collating: what a cell has counted, and its histogram.
_NUM_CELLS, _HISTOGRAM_BYTES = len(PARTS), 8 * len(NO_COUNTS)
_tasks = struct.Struct(f"qq{_NUM_CELLS * 8}q")  # epoch, time, numbers of the cells
_MOST_LOOKS = 1000  # for a moment in which they are not written

# The sizes and places of what is longer. Of all that, only what is written takes memory.
_MOST_BYTES = 64 * 1024
_RECORD_BYTES = 2 * _MOST_BYTES
_RING = 6 * _RECORD_BYTES
_BYTES = _RING + SharedRing.num_bytes(CAPACITY)


class _Word:
    """A number in the memory."""

    def __init__(self, place: int) -> None:
        self._place = 8 * place

    def __get__(self, page: Page, _: object) -> int:
        return int(_word.unpack_from(page._memory, self._place)[0])

    def __set__(self, page: Page, value: int) -> None:
        _word.pack_into(page._memory, self._place, value)


class _Record:
    """Bytes in the memory that are written whole, again and again, and read meanwhile: in two
    places in turn, as the process may be killed while it writes one."""

    def __init__(self, memory: mmap.mmap, place: int) -> None:
        """``place``: of the number of its turn, and of its own, among those of records."""
        self._memory = memory
        self._place = 8 * place
        self._start = place * _RECORD_BYTES

    @property
    def turn(self) -> int:
        """How often it was written."""
        return int(_word.unpack_from(self._memory, self._place)[0])

    def write(self, content: bytes) -> None:
        """Write it, unless it is too long."""
        turn = self.turn + 1
        start = self._start + turn % 2 * _MOST_BYTES
        if (size := len(content)) + _word.size <= _MOST_BYTES:
            self._memory[start : start + _word.size + size] = _word.pack(size) + content
            _word.pack_into(self._memory, self._place, turn)  # last: now it can be read

    def read(self) -> bytes:
        """Return what was written last."""
        for _ in range(_MOST_LOOKS):
            turn = self.turn
            start = self._start + turn % 2 * _MOST_BYTES
            (size,) = _word.unpack_from(self._memory, start)
            start += _word.size
            content = self._memory[start : start + size]
            if self.turn == turn:  # else the other place may be this one by now
                break
        return content


class Page:
    """The memory, on either side. The trainer makes it."""

    is_up = _Word(0)
    """Whether the process has begun: signals to the trainer's group no longer end it."""
    idle_since_ns = _Word(1)
    """Since when the process has had no job, by ``perf_counter_ns``; 0 = it has one."""

    def __init__(self, file: File) -> None:
        self._file: File | None = file
        self._memory = mmap.mmap(file, _BYTES)
        self._counts, self.said = _Record(self._memory, 2), _Record(self._memory, 3)
        self._tasks_before, self._tasks = _Record(self._memory, 4), _Record(self._memory, 5)
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

    def count(self, epoch: int, num_batches: int, counts: Any) -> None:
        """Write what has been counted, in so many batches. What does not fit is left out."""
        content = pickle.dumps((epoch, num_batches, counts), 5)
        self._counts.write(_word.pack(zlib.crc32(content)) + content)

    def counts(self, epoch: int) -> tuple[int, Any]:
        """Return in how many batches of that epoch something was written last, and what; None =
        nothing."""
        content = self._counts.read()
        # On some machines another core may see the number before the bytes.
        if content and _word.unpack_from(content)[0] == zlib.crc32(content[_word.size :]):
            of_epoch, num_batches, counts = pickle.loads(content[_word.size :])
            if of_epoch == epoch:
                return num_batches, counts
        return 0, None

    def begin_tasks(self, epoch: int, cells: Sequence[TaskCell]) -> None:
        """Write what the cells have at the begin of an epoch."""
        self.note_tasks(epoch, cells)
        self._tasks_before.write(self._tasks.read())

    def note_tasks(self, epoch: int, cells: Sequence[TaskCell]) -> None:
        """Write what the cells have now: cheap enough to be done before each batch is sent, so that
        who has the batch finds it counted."""
        fetch, collate = cells
        numbers = _tasks.pack(epoch, perf_counter_ns(), *fetch.numbers(), *collate.numbers())
        self._tasks.write(numbers + b"".join(cell.histogram.buckets for cell in cells))

    def tasks(self, epoch: int) -> tuple[TaskCounters, TaskCounters] | None:
        """Return what was counted in that epoch, of fetching and of collating; None = nothing."""
        before, now = self._tasks_before.read(), self._tasks.read()
        if not before or {_tasks.unpack_from(each)[0] for each in (before, now)} != {epoch}:
            return None
        pairs = zip(_counters_in(now), _counters_in(before), strict=True)
        fetch, collate = (each.since(its) for each, its in pairs)
        return fetch, collate


def _counters_in(content: bytes) -> Iterator[TaskCounters]:
    """Yield what each cell had counted."""
    _, time_ns, *numbers = _tasks.unpack_from(content)
    for cell in range(_NUM_CELLS):
        start = _tasks.size + cell * _HISTOGRAM_BYTES
        histogram = array("q", content[start : start + _HISTOGRAM_BYTES])
        yield TaskCounters._make((time_ns, *numbers[8 * cell : 8 * cell + 8], tuple(histogram)))


def _arrived(duplicate: Any) -> Page:
    page = Page(File(duplicate.detach()))
    page.has_arrived()
    return page


_MOST_TEXT = 60_000  # bytes of what is at work
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
                page.said.write(_at_work(activity).encode(errors="replace")[:_MOST_TEXT])
    # The main thread finds the wire closed as well, and ends the process after its sample. If that
    # does not return, the process ends here.
    sleep(_FINISH_SECONDS)
    os._exit(0)


def _at_work(activity: Activity) -> str:
    if activity.job is None and not activity.beginning:
        return "None of its threads is at work."  # it waits for a job, in our own code
    return describe_activities([activity], [threading.main_thread()], None)
