"""A bounded queue between threads: the only place where the engine waits.

Guarantees
- At most ``capacity`` items wait in a channel, whichever order they arrive in; where
  ``allow_bursts`` was called, more while they pass quickly.
- What is put is got once, or is still counted by ``len`` when the channel is closed over it.
- Every wait ends by notification: an item, room, ``finish()`` or ``close()``; none polls, except
  that a wait on the main thread looks for signals (:func:`wait_for`).

Three words end a channel, and they differ in who ends it:
*finish* (the producer: no more items, what is inside is still delivered), *close* (the owner:
the run stops, what is inside is discarded), *end* (what a consumer sees once a finished channel
is empty: :class:`EndOfChannel`).

Why not ``queue.Queue``: it wakes every waiter in Python code, and can neither be finished nor
report its open waits. ``python examples/bench engine`` measures it on trivial items.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection
from time import perf_counter, perf_counter_ns
from typing import Any, Final, Generic, TypeVar

from ..checks import whole
from ..locks import RLock
from ..machine.histogram import Histogram
from .counters import QueueCounters, Stopwatch

T = TypeVar("T")
Waiter = tuple[int | None, bool, threading.Lock]
"""What a put waits for, as ``has_room`` takes it, and the lock that is released to wake it."""


class EndOfChannel(Exception):
    """Raised where the producer has finished the channel, and it is empty."""


class ChannelClosed(Exception):
    """Raised where the owner has closed the channel (the run stops), or it was finished before this
    put.
    """


class WaitIsOver(TimeoutError):
    """Raised where a wait has taken too long. A class of its own: the handler of a signal may raise
    TimeoutError in the middle of a wait, and that ends more than the wait."""


class Mark:
    """What passes among the items and is none: no op is called with it and no statistic counts it;
    it takes room."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name}>"


EPOCH_END: Final = Mark("end of the epoch")
"""Stands in a channel between two epochs of a continuous source."""

_SKIPPED: Final = Mark("skipped")  # in the place of an item that was dropped; never comes out
_MARKS: Final = frozenset({Mark})
_NOTHING: Final = object()  # "would block": never an item, so that None can be one

_LOOK_SECONDS: Final = 0.5
_QUICK_NS: Final = 100_000  # between two items taken, on average: quicker ones may come in bursts


def wait_for(waiter: threading.Lock, seconds: float = -1) -> bool:
    """Wait until it is released; False if that takes longer than ``seconds`` (-1: for ever).

    Python runs signal handlers on the main thread. A signal that arrives just before that thread
    blocks, or on another thread, does not wake it. So the main thread wakes twice a second, for
    Ctrl-C to work.
    """
    if threading.current_thread() is not threading.main_thread():
        return waiter.acquire(timeout=seconds)
    end = math.inf if seconds < 0 else perf_counter() + seconds
    while (left := end - perf_counter()) > 0:
        if waiter.acquire(timeout=min(left, _LOOK_SECONDS)):
            return True
    return False


def _release(waiter: threading.Lock) -> None:
    try:
        waiter.release()
    except RuntimeError:
        pass  # it was released already, by a call that Ctrl-C or a finalizer's close() cut short


class WaitTime:
    """The time that threads spent waiting, open waits included. The owner's lock is held."""

    def __init__(self) -> None:
        self.closed_ns = 0
        # Of the open waits only their number and the sum of their starts are kept, not each one.
        self._num_open = 0
        self._open_starts_ns = 0
        self._histogram = Histogram()

    def begin(self) -> int:
        """Begin a wait; return its start, for ``end``."""
        now = perf_counter_ns()
        self._num_open += 1
        self._open_starts_ns += now
        return now

    def end(self, started_ns: int) -> None:
        """End the wait that started then."""
        waited = perf_counter_ns() - started_ns
        self._num_open -= 1
        self._open_starts_ns -= started_ns
        self.closed_ns += waited
        self._histogram.add(waited)

    def read(self) -> tuple[int, int, tuple[int, ...]]:
        """Return the total wait in ns, the number of open waits, the histogram of closed ones."""
        open_ns = self._num_open * perf_counter_ns() - self._open_starts_ns
        return self.closed_ns + open_ns, self._num_open, self._histogram.counts()


class Side(WaitTime):
    """Those who wait at a channel to do one thing. The channel's lock is held."""

    def __init__(self) -> None:
        super().__init__()
        self.waiters: deque[Waiter] = deque()
        self.is_woken = False
        """One woken thread at a time: it wakes the next one if there is still something for it.
        Waking a thread for each item would, on cheap ops, wake most of them for nothing."""

    def wake_all(self) -> None:
        """Wake all, to look for themselves; those that find nothing wait again."""
        while self.waiters:
            try:
                _release(self.waiters[0][2])
                self.waiters.popleft()
            except IndexError:
                break
        self.is_woken = False  # perhaps nobody waited: then nobody is on the way to wake the next


class Channel(Generic[T]):
    """A first-in first-out queue of at most ``capacity`` items, with its own statistics.

    With ``put_at`` the items leave in the order of their sequence numbers instead of the order
    of their arrival. A channel is used with ``put`` or with ``put_at``, not with both.

    The lock is re-entrant because ``close()`` may be called by a finalizer that the garbage
    collector runs on a thread which is inside one of these methods. Each method is therefore
    written so that a ``close()`` between any two of its statements is harmless. Ctrl-C between two
    of them may leave others waiting for what it cut off, until ``close()`` ends their waits.
    """

    def __init__(self, capacity: int, *, marks: Collection[type] = _MARKS) -> None:
        """``marks``: the types of what passes among the items and is none: it takes room, and no
        statistic counts it.
        """
        self.capacity = capacity = whole("Channel", "capacity", capacity)
        """The number of items that may wait, bursts aside."""
        self._most = self._room = capacity  # with bursts: ever, and now
        self._last_full = (perf_counter_ns(), 0)  # when it was found full, items taken till then
        self._marks = marks
        self._lock = RLock()
        self._items: deque[Any] = deque()
        self._early: dict[int, Any] = {}  # ordered use: came before their turn
        self.turn = 0
        """Of an ordered channel: the place in the order that is next to become an item."""
        self._finished = False
        self.closed = False
        """Whether ``close()`` was called."""
        self._puts, self._gets = Side(), Side()
        self._num_put = 0  # marks included, as in num_got: they are numbered like items
        self.num_got = 0
        """The number of items taken, including by a get that Ctrl-C then cut off."""
        self.mark_numbers: list[int] = []
        """The numbers of the marks that were put: as many as there were epochs."""
        # Statistics. A call for each item would cost as much as all the rest, so they are written
        # where items come and go.
        self._watch = Stopwatch()
        self._empty_ns = 0
        self.start_clock()

    def start_clock(self) -> None:
        """Count time from now on; before anybody uses the channel."""
        self._empty_since_ns = self._watch.start().started_ns

    def put(self, item: T) -> int:
        """Append ``item``; blocks while the channel is full. Returns the item's number, which
        ``get_numbered`` will give with it.

        Raises: ChannelClosed: the channel was closed or finished; the item was not taken.
        """
        with self._lock:  # the common case, without the generality of ordered puts
            if len(self._items) < self._room and not (self.closed or self._finished):
                self._append(item)
                if self._puts.waiters and not self._puts.is_woken:
                    self._wake(self._puts)
                return self._num_put - 1
        return self._put_slowly(None, item, True)

    def put_at(self, seq: int, item: T, *, last: bool = True) -> int:
        """Put the item whose place in the order is ``seq``; blocks while it does not fit. Returns
        the item's number, -1 where it came before its turn.

        ``last=False``: more items of the same ``seq`` follow; ``skip(seq)`` ends them.
        """
        with self._lock:  # the common case: it fits
            if self.has_room(seq, last) and not (self.closed or self._finished):
                return self._place(seq, item, last)
        return self._put_slowly(seq, item, last)

    def skip(self, seq: int) -> None:
        """Declare that no further item comes for ``seq``; blocks like ``put_at``."""
        self.put_at(seq, _SKIPPED)  # type: ignore[arg-type]  # a mark

    def finish(self) -> None:
        """Accept no more items: getters drain the rest, further puts raise ChannelClosed."""
        with self._lock:
            self._finished = True
            if not self._items:
                self._watch.stop()
            self._wake_everyone()

    def get(self, timeout: float | None = None) -> T:
        """Take the oldest item; blocks while there is none, for at most ``timeout`` seconds.

        Raises: EndOfChannel, ChannelClosed, WaitIsOver.
        """
        return self.get_numbered(timeout)[1]

    def get_numbered(self, timeout: float | None = None) -> tuple[int, T]:
        """Do the same as ``get``, with the item's number: 0 for the first that was ever taken."""
        with self._lock:
            items = self._items
            if items and not self.closed:
                number = self.num_got
                self.num_got = number + 1
                item = items.popleft()
                if not items:
                    self._empty_since_ns = perf_counter_ns()
                    if self._finished:
                        self._watch.stop()
                        self._wake_everyone()
                elif self._gets.waiters and not self._gets.is_woken:
                    self._wake(self._gets)
                # A producer that found the channel full is woken when it is half empty, and
                # then brings several items. Small channels, whose items are few and large, are
                # refilled at once.
                puts = self._puts
                is_wanted = puts.waiters and not puts.is_woken
                if is_wanted and (2 * len(items) <= self._room or self._room < 8):
                    self._wake(puts)
                return number, item
        return self._get_slowly(timeout)

    def allow_bursts(self, capacity: int) -> None:
        """Let up to ``capacity`` items wait while more than 10,000 a second are taken.

        Quick items are small: nothing large is produced ten thousand times a second. Passing them
        on one by one would cost a thread switch each (10 µs on a virtual machine with idle cores),
        many times the work on them.
        """
        self._most = max(capacity, self.capacity)

    def grow(self, capacity: int) -> None:
        """Let ``capacity`` items wait, if that is more than now. Never blocks.

        It never shrinks: an ordered channel may hold more items that came before their turn.
        """
        with self._lock:
            self.capacity = max(self.capacity, capacity)
            self._room, self._most = max(self._room, capacity), max(self._most, capacity)
            if not self._puts.is_woken:
                self._wake(self._puts)

    def close(self) -> None:
        """Stop: every waiting and every later call raises ChannelClosed. Never blocks."""
        with self._lock:
            self.closed = True
            self._watch.stop()
            self._wake_everyone()

    def __len__(self) -> int:
        """Return the number of items that wait, those before their turn included."""
        if not self._early and not self.mark_numbers:
            return len(self._items)
        with self._lock:
            early = sum(type(item) not in self._marks for item in self._early.values())
            waiting_marks = len(self.mark_numbers) - self._num_marks_got()
            return len(self._items) - waiting_marks + early

    @property
    def has_next(self) -> bool:
        """Whether the next ``get`` finds an item whose turn it is."""
        return bool(self._items)

    def counters(self) -> QueueCounters:
        """Return everything counted so far, open waits and open empty time included."""
        with self._lock:
            now = self._watch.now_ns()
            open_empty = now - self._empty_since_ns if self._empty_since_ns else 0
            return QueueCounters(
                elapsed_ns=now - self._watch.started_ns,
                num_put=self._num_put - len(self.mark_numbers),
                num_got=self.num_got - self._num_marks_got(),
                put_wait=self._puts.read(),
                get_wait=self._gets.read(),
                empty_ns=self._empty_ns + max(0, open_empty),
            )

    def _num_marks_got(self) -> int:
        return bisect_left(self.mark_numbers, self.num_got)

    # How to wait:

    def _put_slowly(self, seq: int | None, item: Any, last: bool) -> int:
        """Wait for room, then put. Returns the item's number, as ``put_at``."""

        def put() -> Any:
            if self.closed or self._finished:
                raise ChannelClosed
            if self.has_room(seq, last) or (self._may_burst() and self.has_room(seq, last)):
                return self._place(seq, item, last)
            return _NOTHING

        number: int = self._wait(self._puts, put, seq, last)
        return number

    def _get_slowly(self, timeout: float | None) -> tuple[int, T]:
        def get() -> Any:
            if self.closed:
                raise ChannelClosed
            if self._items:
                return self.get_numbered()  # which does not wait now
            if self._finished:
                raise EndOfChannel
            return _NOTHING

        numbered: tuple[int, T] = self._wait(self._gets, get, timeout=timeout)
        return numbered

    def _wait(
        self,
        side: Side,
        attempt: Callable[[], Any],
        seq: int | None = None,
        last: bool = True,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Wait until the attempt, which is made under the lock, gives more than ``_NOTHING``."""
        deadline = None if timeout is None else perf_counter() + timeout
        started_ns = 0
        # A lock of this wait alone: to acquire it a second time is to wait until another thread,
        # which found something for this one, releases it.
        waiter = seq, last, threading.Lock()
        waiter[2].acquire()
        try:
            while True:
                with self._lock:
                    if started_ns:
                        side.is_woken = False  # this one is awake, and wakes the next itself
                    result = attempt()
                    if result is not _NOTHING:
                        if started_ns:
                            side.end(started_ns)
                        return result
                    # The race with a close() by a finalizer on this thread, which the lock does not
                    # keep out: enlist first, look second. Then close() either finds the waiter or
                    # is seen here.
                    side.waiters.append(waiter)
                    if self.closed:
                        raise ChannelClosed
                    # Woken for room that a smaller burst has taken back: another put may fit.
                    if started_ns and side is self._puts:
                        self._wake(side)
                    started_ns = started_ns or side.begin()
                if deadline is None:
                    wait_for(waiter[2])
                else:
                    left = min(deadline - perf_counter(), threading.TIMEOUT_MAX)
                    if left <= 0 or not wait_for(waiter[2], left):
                        raise WaitIsOver(f"no item came within {timeout} seconds.")
        except BaseException:
            self._abandon(side, waiter, started_ns)
            raise

    def _abandon(self, side: Side, waiter: Waiter, started_ns: int) -> None:
        """End a wait by Ctrl-C, a timeout or the channel's own end. If its waiter is still
        enlisted, it is struck off, so that no wake-up is lost on it. If it is not, it was woken
        just before, and passes that wake-up on.
        """
        with self._lock:
            if started_ns:
                side.end(started_ns)
            if waiter in side.waiters:
                side.waiters.remove(waiter)
            else:
                side.is_woken = False
                if side is self._puts or self._items:
                    self._wake(side)

    # How items come and go:

    def has_room(self, seq: int | None, last: bool) -> bool:
        """Whether a put goes on at once, without a burst. The lock is held, or nobody else puts."""
        waiting = len(self._items)
        if seq is None:
            return waiting < self._room
        # Room is kept for the numbers between the turn and `seq` that have not come yet. So the
        # item whose turn it is never finds the channel full of later ones: a deadlock.
        if seq != self.turn and not (last and seq - self.turn + waiting < self._room):
            return False
        return waiting < self._room and waiting + len(self._early) < self._most

    def _may_burst(self) -> bool:
        """Double the room of a full channel if items were taken quickly, else go back to
        ``capacity``. True if there is more room now. The lock is held."""
        full_ns, taken_before = self._last_full
        taken = self.num_got - taken_before
        if self._most == self.capacity or taken < self.capacity:
            return False  # too few to judge: the takers may be busy with their first items
        now_ns, before = perf_counter_ns(), self._room
        self._last_full = now_ns, self.num_got
        quick = now_ns - full_ns < _QUICK_NS * taken
        self._room = min(2 * before, self._most) if quick else self.capacity
        return self._room > before

    def _place(self, seq: int | None, item: Any, last: bool) -> int:
        """Put what there is room for; return its number, as ``put_at``. The lock is held."""
        number = -1
        if seq is not None and seq != self.turn:
            self._early[seq] = item
        else:
            number = self._num_put
            self._append(item)
            if seq is not None and last:
                self.turn += 1
                while (
                    self._early and (item := self._early.pop(self.turn, _NOTHING)) is not _NOTHING
                ):
                    self.turn += 1
                    self._append(item)
        if self._puts.waiters and not self._puts.is_woken:
            self._wake(self._puts)
        return number

    def _append(self, item: Any) -> None:
        if type(item) in self._marks:
            if item is _SKIPPED:
                return
            self.mark_numbers.append(self._num_put)
        items = self._items
        if not items:
            self._empty_ns += perf_counter_ns() - self._empty_since_ns
            self._empty_since_ns = 0
        items.append(item)
        self._num_put += 1
        if self._gets.waiters and not self._gets.is_woken:
            self._wake(self._gets)

    # The lock is held. An empty deque is not an error, though: a close() by a finalizer on this
    # very thread may have woken everyone just before. A waiter is released first and struck off
    # second: one that Ctrl-C left between the two is on its way all the same.

    def _wake(self, side: Side) -> None:
        """Wake the first one that can go on; ordered puts are each for a place of their own."""
        waiters = side.waiters
        try:
            for place in range(len(waiters)):
                seq, last, lock = waiters[place]
                if side is not self._puts or self.has_room(seq, last):
                    _release(lock)
                    side.is_woken = True
                    del waiters[place]
                    return
        except IndexError:
            return

    def _wake_everyone(self) -> None:
        self._gets.wake_all()
        self._puts.wake_all()


STALL_SECONDS = 60.0
"""The wait after which the first report comes; the next ones each time the wait has doubled."""


def warn_when_stalled(get: Callable[[float], T], warn: Callable[[float], None]) -> T:
    """Call ``get(seconds)`` until it does not raise WaitIsOver; call ``warn(seconds waited)`` each
    time."""
    waited, wait = 0.0, STALL_SECONDS
    while True:
        try:
            return get(wait)
        except WaitIsOver:
            waited += wait
            wait = waited
        warn(waited)
