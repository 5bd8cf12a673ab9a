"""Read what the worker processes send, and put their results in order.

Nothing comes by itself: whoever waits for a batch reads, without a thread that would want the GIL
of the loop's. What a process did meanwhile, it says with its own clock, so the figures are true
however late they are read.
"""

from __future__ import annotations

import select
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic, perf_counter_ns
from typing import TYPE_CHECKING, Any

from ....engine.channel import ChannelClosed, WaitIsOver, WaitTime
from ....engine.counters import QueueCounters
from ...error_notes import add_thread_note, is_users
from ..jobs import NO_BATCHES, Exhausted, Failed, Loaded, recorded
from .error_pickle import unpack_error, with_errors
from .pickling import unpack
from .wire import socket_pair

if TYPE_CHECKING:
    from ....engine.recorder import FlightRecorder
    from ..jobs import Result
    from .worker_process import WorkerProcess

_MOST_UNPACKING_NS = 500_000
"""A longer time for a batch would delay a loop that only waits for its device."""
_ENOUGH_BATCHES = 8

_LOOK_SECONDS = 0.5
"""The longest wait on the main thread: a signal that another thread got does not end it."""

_LONG_SECONDS = 3600.0  # a wait without a limit looks so often

_Heard = tuple["WorkerProcess | None", "Result", int]

_NOTHING: _Heard = None, Exhausted(-1), 0

_IN, _OUT = int(select.POLLIN), int(select.POLLOUT)


class Unpacking:
    """What a loader knows of the time that its batches take to be unpacked."""

    def __init__(self) -> None:
        self.is_long = False
        """Whether the loop should not do it."""
        self._total_ns = self._num_batches = 0

    def took(self, duration_ns: int) -> None:
        """Note the time of a batch."""
        self._total_ns += duration_ns
        self._num_batches += 1
        if self._num_batches >= _ENOUGH_BATCHES:
            self.is_long = self._total_ns > _MOST_UNPACKING_NS * self._num_batches
            self._total_ns = self._num_batches = 0


class Hearing:
    """The processes of a loader as one reader hears them: the loop's thread, or one that passes
    the batches on. Others may ask it to look again with ``wake``."""

    def __init__(self, finalize: Callable[[Any], Any] | None, unpacking: Unpacking) -> None:
        """``finalize``: what batches go through. ``unpacking``: told how long each takes."""
        self.finalize = finalize
        self.unpacking = unpacking
        self.is_the_loops = True
        """Whether the loop's thread reads; it alone writes."""
        self.children: Mapping[int, WorkerProcess] = {}
        """The processes by number. Replaced and never changed, so any thread may go through it."""
        self.results: deque[_Heard] = deque()
        """Where results of the running epoch go: by whom, what, and when it was sent."""
        self.news: deque[WorkerProcess] = deque()
        """Those that have ended unasked, or have been started by another thread: the loop's thread
        looks after them."""
        self.is_read = False
        """Whether what is there was read since this was last set to False."""
        self._polled: Mapping[int, WorkerProcess] = {}
        self._by_descriptor: dict[int, WorkerProcess] = {}
        self._waker, self._woken = socket_pair()
        self._poll = self._new_poll()

    def _new_poll(self) -> select.poll:
        poll = select.poll()
        poll.register(self._woken, _IN)
        self._polled, self._by_descriptor = self.children, {}
        for child in self._polled.values():
            for number in () if child.is_over else child.ends:
                self._by_descriptor[number] = child
                poll.register(number, _IN)
        return poll

    def read(self, seconds: float) -> None:
        """Read what has come; wait for something so long."""
        if self._polled is not self.children:
            self._poll = self._new_poll()
        if seconds and threading.current_thread() is threading.main_thread():
            seconds = min(seconds, _LOOK_SECONDS)
        # A wait may be for the rest of a job that is yet to be sent.
        children = self._polled.values() if seconds and self.is_the_loops else ()
        blocked = [each for each in children if each.wire.unsent and not each.is_over]
        for each in blocked:
            self._poll.modify(each.wire.socket, _IN | _OUT)
        self.is_read = True
        spoken: dict[WorkerProcess, bool] = {}
        for number, event in self._poll.poll(seconds * 1000):
            child = self._by_descriptor.get(number)
            if child is None:
                self._woken.recv(4096, socket.MSG_DONTWAIT)
                continue
            has_ended = number != child.wire.socket.fileno()
            spoken[child] = spoken.get(child, False) or has_ended
            if event & _OUT:
                child.wire.flush()
        for each in blocked:
            self._poll.modify(each.wire.socket, _IN)
        for each, has_ended in spoken.items():
            self._hear(each, has_ended)

    def _hear(self, child: WorkerProcess, has_ended: bool) -> None:
        for answer in child.heard(has_ended=has_ended):
            # In this order, as ``Processes`` begins an epoch: what is of the epoch before never
            # reaches the next one.
            results, result = self.results, answer.result
            job = child.jobs.pop(result.number, None) if answer.epoch == child.epoch else None
            if job is not None:
                child.num_answered += 1
                results.append((child, result, answer.done_ns))
            else:
                _give_back(child, result)
        if child.is_over:
            for number in [n for n, each in self._by_descriptor.items() if each is child]:
                self._poll.unregister(number)
                del self._by_descriptor[number]
            self.news.append(child)

    def tell(self, child: WorkerProcess) -> None:
        """Have the loop's thread look after a process that was started meanwhile."""
        self.news.append(child)
        self.wake()

    def wake(self) -> None:
        """End the wait of whoever reads. Never blocks; safe in a finalizer, on any thread."""
        try:
            self._waker.send(b".", socket.MSG_DONTWAIT)
        except OSError:
            pass  # enough of them are there


def _give_back(child: WorkerProcess | None, result: Result) -> None:
    """Free the memory of a result that nobody takes."""
    if child is not None and isinstance(result, Loaded) and result.batch.slab is not None:
        child.mappings.give_back(result.batch.slab)


class Incoming:
    """The results of one epoch, in order, as the thread that reads takes them: what a ``Channel``
    is between threads."""

    def __init__(self, hearing: Hearing, recorder: FlightRecorder, *, in_order: bool) -> None:
        self._hearing = hearing
        self._recorder = recorder
        self.closed = False
        self.heard: deque[_Heard] = deque()
        """What came and is not in order yet."""
        self._early: dict[int, _Heard] = {}
        self._ready: deque[_Heard] = deque()
        self._taken = _NOTHING
        self._in_order = in_order
        self._turn = 0
        self._wait_time = WaitTime()
        self._num_put = self._num_got = 0
        self._created_ns = self._empty_since_ns = perf_counter_ns()
        self._empty_ns = 0
        self._ended_ns: int | None = None

    def get(self, seconds: float | None = None) -> Result:
        """Take the next result; wait for it so long.

        Raises: WaitIsOver: none has come, or there is news of a process; ChannelClosed.
        """
        if not self.has_next:
            self._wait(None if seconds is None else monotonic() + seconds)
        self._taken = _, packed, _ = self._ready.popleft()
        if not self._ready:
            self._empty_since_ns = perf_counter_ns()
        self._num_got += type(packed) not in NO_BATCHES
        is_opened_later = self._hearing.is_the_loops and type(packed) is Loaded
        return packed if is_opened_later else self.opened()

    def opened(self) -> Result:
        """Return the result that was taken last, unpacked. The loop's thread calls it where that is
        a batch, once the next job is on its way."""
        child, packed, _ = self._taken
        self._taken = _NOTHING
        # No variable holds what is opened: an error's traceback leads here, and that was a cycle.
        if child is None:
            return recorded(self._recorder, packed)
        return recorded(self._recorder, self._unpacked(child, packed))

    def _wait(self, deadline: float | None) -> None:
        hearing, wait = self._hearing, self._wait_time
        began_ns = wait.begin()
        try:
            while not self.has_next:
                if self.closed:
                    raise ChannelClosed
                left = _LONG_SECONDS if deadline is None else deadline - monotonic()
                if left <= 0 or (hearing.is_the_loops and hearing.news):
                    raise WaitIsOver("no result has come in time.")
                hearing.read(left)
        finally:
            wait.end(began_ns)

    @property
    def has_next(self) -> bool:
        """Whether the next ``get`` does not wait."""
        if self.closed:
            return False
        while self.heard:
            self._came(self.heard.popleft())
        return bool(self._ready)

    def _came(self, heard: _Heard) -> None:
        early, since_ns = self._early, heard[2]
        early[heard[1].number if self._in_order else self._turn] = heard
        while (found := early.pop(self._turn, None)) is not None:
            self._turn += 1
            since_ns = max(since_ns, found[2])
            self._ready.append(found)
            if self._empty_since_ns:
                self._empty_ns += max(0, since_ns - self._empty_since_ns)
                self._empty_since_ns = 0
            self._num_put += type(found[1]) not in NO_BATCHES

    def _unpacked(self, child: WorkerProcess, packed: Result) -> Result:
        if not isinstance(packed, Loaded):
            return with_errors(packed, unpack_error)
        try:
            began_ns = perf_counter_ns()
            loaded = unpack(packed, child.mappings)
            self._hearing.unpacking.took(perf_counter_ns() - began_ns)
            if (finalize := self._hearing.finalize) is not None:
                loaded = loaded._replace(batch=finalize(loaded.batch))
            return with_errors(loaded, unpack_error)
        except BaseException as error:
            if self._hearing.is_the_loops and not is_users(error):
                raise  # Ctrl-C, which never comes on another thread
            where = "in receiving what a worker process has sent"
            add_thread_note(error, where, f"batch {packed.number}")
            rest = with_errors(packed, unpack_error)
            return Failed(packed.number, error, rest.progress, rest.tries)

    def __len__(self) -> int:
        return len(self._ready) + len(self._early) + len(self.heard)

    def counters(self) -> QueueCounters:
        """Return everything counted so far."""
        now = self._ended_ns or perf_counter_ns()
        open_empty = max(0, now - self._empty_since_ns) if self._empty_since_ns else 0
        return QueueCounters(
            elapsed_ns=now - self._created_ns,
            num_put=self._num_put,
            num_got=self._num_got,
            get_wait=self._wait_time.read(),
            empty_ns=self._empty_ns + open_empty,
        )

    def close(self) -> None:
        """End every wait; see ``Channel``."""
        self.closed = True
        self._ended_ns = self._ended_ns or perf_counter_ns()  # time passes no more
        self._hearing.wake()

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_exiting() or not hasattr(self, "_ended_ns"):  # Ctrl-C has cut off __init__
            return
        for child, result, _ in (*self.heard, *self._early.values(), *self._ready, self._taken):
            _give_back(child, result)
