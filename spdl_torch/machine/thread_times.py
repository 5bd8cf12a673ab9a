"""The times of this process's threads: on a core, and ready to run without one (Linux).

Which thread works for whom is told by its name: ours begin with ``spdl-``, and a thread that an op
starts, such as a codec's, inherits the name of the one that starts it (FFmpeg then calls it ``av:``
and its codec). What the process computed beyond all the threads that were seen is of threads that
came and went between two readings: a codec's, too.
"""

from __future__ import annotations

import enum
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import cache
from time import clock_gettime_ns, perf_counter_ns, process_time_ns, thread_time_ns
from typing import NamedTuple, TypeVar

from ..handlers import started_ns, unless_of_handler
from ..locks import RLock

T = TypeVar("T")

_OURS = "spdl-"
_CODECS = "av:"
_TASKS = "/proc/self/task"
_LONGEST_NAME = 15  # as Linux has it

_WATCHERS = {
    name[:_LONGEST_NAME]
    for name in (
        "spdl-probe",
        "spdl-stats",
        "spdl-stats-recorder",
        "spdl-stats-writer",
        "spdl-collections",
        "spdl-flight-recorder",
    )
}
"""Of ours, those that watch the others, and work for nobody. A stage's end with a number."""
_SET_NAME = 15  # prctl(2): PR_SET_NAME

_BRIEF_NS = 20_000_000
"""A thread of ours that was without a core for no longer since it was read counts as one that
wanted none, until it is read again: asking the system lets go of the GIL, which all the threads
that begin or end with this one want as well. Pipelines that end at once gain a tenth."""


class _Kind(enum.Enum):
    WORKER = enum.auto()  # one of ours
    HELPER = enum.auto()  # started by an op
    OTHER = enum.auto()


class _Seen(NamedTuple):
    """A reading of a thread."""

    kind: _Kind
    cpu_ns: int
    delay_ns: int
    at_ns: int


class ThreadTimes:
    """Counters that only grow: a window is the difference of two readings."""

    def __init__(self) -> None:
        # Re-entrant: the garbage collector may run a finalizer, which reads, on a thread that
        # holds it.
        self._lock = RLock()
        self._seen: dict[int, _Seen] = {}
        # Of ours that have ended since the last reading, each with the one before: by themselves,
        # without the lock, for which many that end together would wait.
        self._ended: deque[tuple[int, _Seen, _Seen]] = deque()
        self._alone: int | None = None  # the number of the only thread of ours
        self._is_begun = False
        self._process_ns = self._known_ns = self._last_ns = 0
        self.run_delay_ns = 0
        """The time that our threads, and those that ops started, were ready without a core."""
        self.thread_ns = 0
        """The time that our threads were there, with that of the others on a core or ready."""
        self.helpers_ns = 0
        """The CPU time of threads that ops started."""

    def begin(self) -> None:
        """Count from now on."""
        with self._lock:
            self._seen, self._is_begun = {}, False
        self.read()

    def count_alone(self) -> None:
        """Count the calling thread as the only one of ours, and all others as started by its ops,
        as in a worker's process: that is quick.
        """
        with self._lock:
            self._alone = threading.get_native_id()
        self.begin()

    def read(self) -> None:
        """Bring the counters up to date."""
        # Before the lock: a finalizer that wants ours may run on a thread that holds Python's.
        threads = threading.enumerate() if self._alone is None else []
        with self._lock:
            now_ns, process_ns = perf_counter_ns(), process_time_ns()
            self._count_ended()
            before, self._seen = self._seen, {}
            self._read_all(threads, before, now_ns)
            if self._is_begun:
                self.helpers_ns += process_ns - self._process_ns - self._known_ns
            self._process_ns, self._known_ns, self._last_ns = process_ns, 0, now_ns
            self._is_begun = True

    def ends(self) -> None:
        """Count the calling thread, one of ours, for the last time."""
        number = threading.get_native_id()
        then = self._seen.get(number)
        if then is None:
            thread = threading.current_thread()
            then = self._born(self._kind_of(number, thread), thread)
        cpu_ns, now_ns = thread_time_ns(), perf_counter_ns()
        delay_ns = _delay_of(number, then, cpu_ns, now_ns)
        if delay_ns is not None:
            self._ended.append((number, then, _Seen(then.kind, cpu_ns, delay_ns, now_ns)))

    def _count_ended(self) -> None:
        """Count the threads that have ended. The lock is held."""
        while self._ended:
            number, then, now = self._ended.popleft()
            if self._is_begun and self._alone is None:
                self._add(number, now, self._seen.get(number, then))

    def _read_all(
        self, threads: list[threading.Thread], before: dict[int, _Seen], now_ns: int
    ) -> None:
        """Read every thread of the system's that counts. The lock is held."""
        pythons = {each.native_id: each for each in threads if each.native_id is not None}
        numbers = {self._alone} if self._alone is not None else _task_numbers()
        for number in numbers:
            then = before.get(number)
            thread = pythons.get(number)
            if then is None:
                kind = self._kind_of(number, thread)
                then = self._born(kind, thread) if self._is_begun else None
            else:
                kind = then.kind
            if (cpu_ns := _cpu_ns(number)) is None:
                continue
            delay_ns = _delay_of(number, then or _Seen(kind, 0, 0, 0), cpu_ns, now_ns)
            if delay_ns is not None:
                self._add(number, _Seen(kind, cpu_ns, delay_ns, now_ns), then)

    def _add(self, number: int, now: _Seen, then: _Seen | None) -> None:
        """Count a thread's time since a reading, if there was one. The lock is held."""
        self._seen[number] = now
        if then is None:
            return
        cpu_ns, delay_ns = now.cpu_ns - then.cpu_ns, max(0, now.delay_ns - then.delay_ns)
        if now.kind is _Kind.HELPER:
            self.thread_ns += max(0, cpu_ns) + delay_ns
        else:
            self._known_ns += cpu_ns
        if now.kind is _Kind.WORKER:
            self.thread_ns += now.at_ns - then.at_ns
        self.run_delay_ns += delay_ns

    def _born(self, kind: _Kind, thread: threading.Thread | None) -> _Seen:
        """Return the reading of a thread at its begin, since we last looked."""
        return _Seen(kind, 0, 0, max(self._last_ns, started_ns(thread) if thread else 0))

    def _kind_of(self, number: int, thread: threading.Thread | None) -> _Kind:
        if number == self._alone:
            return _Kind.WORKER
        if thread is not None:
            name = thread.name[:_LONGEST_NAME]
            is_ours = name.startswith(_OURS) and name not in _WATCHERS
            return _Kind.WORKER if is_ours else _Kind.OTHER
        name = _name_of(number)
        # Watchers start no thread; one that ends may have left Python's list already.
        is_started = name.startswith((_OURS, _CODECS)) and name not in _WATCHERS
        return _Kind.HELPER if is_started else _Kind.OTHER


class OwnRunDelay:
    """The time that the calling thread was ready to run without a core; 0 where it is unknown.

    The file is opened for the first reading and stays open: opening one releases the GIL, and the
    wait to get it back would be subtracted from the wait that is measured. (Measured with two
    threads in pure Python: the median wait for the GIL came out as 0.0 to 0.2 ms, although it is
    5 ms and more.)
    """

    def __init__(self) -> None:
        self._file: int | None = None

    def __call__(self) -> int:
        try:
            if self._file is None:
                name = f"{_TASKS}/{threading.get_native_id()}/schedstat"
                self._file = os.open(name, os.O_RDONLY)
            return int(os.pread(self._file, 64, 0).split()[1])
        except unless_of_handler(OSError, IndexError, ValueError):
            return 0

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)


def call_itself(name: str) -> None:
    """Tell the system the name of the calling thread, which threads that it starts inherit."""
    prctl = _prctl()
    if prctl is not None:
        prctl(_SET_NAME, name.encode()[:_LONGEST_NAME])


@cache
def _prctl() -> Callable[[int, bytes], int] | None:
    """Return the system's function; None = this is not Linux.

    It is called with the GIL held. A file in which the name could be written as well takes three
    calls that let go of it, for which threads that begin together then wait in turn.
    """
    if not sys.platform.startswith("linux"):
        return None
    import ctypes  # torch has imported it

    prctl = ctypes.PyDLL(None).prctl
    prctl.argtypes = ctypes.c_int, ctypes.c_char_p
    return prctl


def _delay_of(number: int, then: _Seen, cpu_ns: int, now_ns: int) -> int | None:
    """Return how long a thread was ready to run without a core, as far as it counts; None =
    unknown. ``then``: the reading of it before."""
    if then.kind is _Kind.OTHER:
        return 0
    without_core_ns = now_ns - then.at_ns - (cpu_ns - then.cpu_ns)
    if then.kind is _Kind.WORKER and without_core_ns <= _BRIEF_NS:
        return then.delay_ns
    return run_delay_ns(number)


def run_delay_ns(native_id: int) -> int | None:
    """Return how long a thread was ready to run without a core; None = unknown."""
    return _told(lambda: int(_read(native_id, "schedstat").split()[1]), None)


def _task_numbers() -> set[int]:
    return _told(lambda: set(map(int, os.listdir(_TASKS))), set())


def _cpu_ns(number: int) -> int | None:
    """Return a thread's CPU time, by Linux's clock of it; None = it has ended."""
    return _told(lambda: clock_gettime_ns(~number << 3 | 6), None)


def _name_of(number: int) -> str:
    return _told(lambda: _read(number, "comm").decode(errors="replace").strip(), "")


def _told(ask: Callable[[], T], otherwise: T) -> T:
    """Return what the system says of a thread; ``otherwise`` if that has ended, or there is no
    file for it."""
    try:
        return ask()
    except unless_of_handler(OSError, IndexError, ValueError):
        return otherwise


def _read(number: int, name: str) -> bytes:
    """Return what the system tells of a thread."""
    # A file object: Ctrl-C, wherever it comes, leaves no descriptor open.
    with open(f"{_TASKS}/{number}/{name}", "rb", buffering=0) as file:
        return file.read()
