"""A bounded queue between threads: the only place where the engine waits.

Guarantees
- At most ``capacity`` items wait in a channel, whichever order they arrive in; where
  ``allow_bursts`` was called, more while they pass quickly.
- What is put is got once, or is still counted by ``len`` when the channel is closed over it.
- Every wait ends by notification: an item, room, ``finish()`` or ``close()``; none polls, except
  that a ``get`` on the main thread looks for signals (:func:`~.waits.wait_for`).

Three words end a channel, and they differ in who ends it:
*finish* (the producer: no more items, what is inside is still delivered), *close* (the owner:
the run stops, what is inside is discarded), *end* (what a consumer sees once a finished channel
is empty: :class:`EndOfChannel`).

Why not ``queue.Queue``: it wakes every waiter in Python code, and can neither be finished nor
report its open waits. ``python examples/bench engine`` measures it on trivial items.
"""

from __future__ import annotations

import threading
from collections import deque
from time import perf_counter, perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from ...scopes import scope
from .async_methods import AsyncMethods
from .capacity import Capacity, Occupancy
from .sentinels import SKIPPED, Sentinel, SentinelNumbers
from .waits import ChannelClosed, EndOfChannel, Waiter, WaitIsOver, wait_for

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from ..stats.counters import QueueCounters

T = TypeVar("T")

_MARKS: Final = frozenset({Sentinel})
_NOTHING: Final = object()  # "would block": never an item, so that None can be one


def _release(waiter: Waiter) -> None:
    try:
        waiter.release()
    except RuntimeError:
        pass  # it was released already, by a call that Ctrl-C or a finalizer's close() cut short


class Channel(AsyncMethods, Generic[T]):
    """A first-in first-out queue of at most ``capacity`` items, with its own statistics.

    With ``put_at`` the items leave in the order of their sequence numbers instead of the order
    of their arrival. A channel is used with ``put`` or with ``put_at``, not with both.

    The lock is re-entrant because ``close()`` may be called by a finalizer that the garbage
    collector runs on a thread which is inside one of these methods. Each method is therefore
    written so that a ``close()`` between any two of its statements is harmless.

    Ctrl-C may cut off a method between any two statements as well, and others may wait for what it
    did not get to do. A method that is cut off therefore wakes everybody, still under the lock.
    """

    def __init__(self, capacity: int, *, marks: Collection[type] = _MARKS) -> None:
        """``marks``: the types of what passes among the items and is none: it takes room, and no
        statistic counts it.
        """
        self._capacity = Capacity(capacity)
        self._marks = marks
        self._lock = threading.RLock()
        self._items: deque[Any] = deque()
        self._early: dict[int, Any] = {}  # ordered use: came before their turn
        self._turn = 0  # ordered use: the sequence number that is next to become an item
        self._finished = False
        self._closed = False
        self._getters: deque[Waiter] = deque()
        self._putters: deque[tuple[int | None, bool, Waiter]] = deque()
        # One woken thread at a time: it wakes the next one if there is still something for it.
        # Waking a thread for each item would, on cheap ops, wake most of them for nothing.
        self._getter_woken = False
        self._putter_woken = False
        self._num_put = 0  # sentinels included, as in num_got: they are numbered like items
        self.num_got = 0
        """The number of items taken, including by a get that Ctrl-C then cut off."""
        self._sentinels = SentinelNumbers()
        self._occupancy = Occupancy()

    def put(self, item: T) -> int:
        """Append ``item``; blocks while the channel is full. Returns the item's number, which
        ``get_numbered`` will give with it.

        Raises: ChannelClosed: the channel was closed or finished; the item was not taken.
        """
        with self._lock:  # the common case, without the generality of ordered puts
            if len(self._items) < self._capacity.now and not (self._closed or self._finished):
                try:
                    self._append(item)
                    if self._putters and not self._putter_woken:
                        self._wake_putter()
                    return self._num_put - 1
                except BaseException:
                    self._wake_everyone()
                    raise
        return self._put_blocking(None, item, advance=True)

    def put_at(self, seq: int, item: T, *, last: bool = True) -> None:
        """Put the item whose place in the order is ``seq``; blocks while it does not fit.

        ``last=False``: more items of the same ``seq`` follow; ``skip(seq)`` ends them.
        """
        self._put_blocking(seq, item, advance=last)

    def skip(self, seq: int) -> None:
        """Declare that no further item comes for ``seq``; blocks like ``put_at``."""
        self._put_blocking(seq, SKIPPED, advance=True)

    def finish(self) -> None:
        """Accept no more items: getters drain the rest, further puts raise ChannelClosed."""
        with self._lock, self._all_awake_if_cut_off():
            self._finished = True
            if not self._items:
                self._occupancy.end()
            self._wake_everyone()

    def get(self, timeout: float | None = None) -> T:
        """Take the oldest item; blocks while there is none, for at most ``timeout`` seconds.

        Raises: EndOfChannel, ChannelClosed, TimeoutError.
        """
        return self.get_numbered(timeout)[1]

    def get_numbered(self, timeout: float | None = None) -> tuple[int, T]:
        """Do the same as ``get``, with the item's number: 0 for the first that was ever taken."""
        with self._lock:
            items = self._items
            if items and not self._closed:
                try:
                    number = self.num_got
                    self.num_got = number + 1
                    item = items.popleft()
                    if not items:
                        self._occupancy.empty_since_ns = perf_counter_ns()
                        if self._finished:
                            self._occupancy.end()
                            self._wake_everyone()
                    elif self._getters and not self._getter_woken:
                        self._wake_getter()
                    if (
                        self._putters
                        and not self._putter_woken
                        and len(items) <= self._capacity.low_water
                    ):
                        self._wake_putter()
                    return number, item
                except BaseException:
                    self._wake_everyone()
                    raise
        return self._get_slowly(timeout)

    @property
    def capacity(self) -> int:
        """The number of items that may wait, bursts aside."""
        return self._capacity.capacity

    def allow_bursts(self, capacity: int) -> None:
        """Let up to ``capacity`` items wait while more than 10,000 a second are taken."""
        self._capacity.allow_bursts(capacity)

    def grow(self, capacity: int) -> None:
        """Let ``capacity`` items wait, if that is more than now. Never blocks.

        It never shrinks: an ordered channel may hold more items that came before their turn.
        """
        with self._lock, self._all_awake_if_cut_off():
            self._capacity.grow(capacity)
            if not self._putter_woken:
                self._wake_putter()

    def close(self) -> None:
        """Stop: every waiting and every later call raises ChannelClosed. Never blocks."""
        with self._lock, self._all_awake_if_cut_off():
            self._closed = True
            self._occupancy.end()
            self._wake_everyone()

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return self._closed

    def __len__(self) -> int:
        """Return the number of items that wait, those before their turn included."""
        if not self._early and not self._sentinels:
            return len(self._items)
        early = sum(type(item) not in self._marks for item in self._early.copy().values())
        with self._lock:
            return len(self._items) - self._sentinels.count_waiting(self.num_got) + early

    @property
    def has_next(self) -> bool:
        """Whether the next ``get`` finds an item whose turn it is."""
        return bool(self._items)

    def progress(self) -> tuple[int, int]:
        """Return how many places of an ordered channel are settled, and with how many items."""
        with self._lock:
            return self._turn, self._num_put

    def counters(self) -> QueueCounters:
        """Return everything counted so far, open waits and open empty time included."""
        with self._lock:
            waiting_sentinels = self._sentinels.count_waiting(self.num_got)
            return self._occupancy.counters(
                num_put=self._num_put - self._sentinels.num_got - waiting_sentinels,
                num_got=self.num_got - self._sentinels.num_got,
            )

    def _put_blocking(self, seq: int | None, item: Any, *, advance: bool) -> int:
        """Wait for room, then put. Returns the item's number, unless ``seq`` is given."""
        started_ns = 0
        # A lock of this put alone: to acquire it a second time is to wait until another thread,
        # which found room for this put, releases it.
        waiter = threading.Lock()
        waiter.acquire()
        try:
            while True:
                with self._lock:
                    done, started_ns = self._try_put_waiting(seq, item, advance, waiter, started_ns)
                    number = self._num_put - 1
                if done:
                    return number
                waiter.acquire()  # without the channel's lock
        except BaseException:
            self._abandon_put(started_ns, (seq, advance, waiter))
            raise

    def _try_put_waiting(
        self, seq: int | None, item: Any, advance: bool, waiter: Waiter, started_ns: int
    ) -> tuple[bool, int]:
        """Try to put; the put has waited since ``started_ns`` (0: not yet). The lock is held."""
        if started_ns:
            self._putter_woken = False  # this one is awake now, and wakes the next one itself
        try:
            if not self._try_put(seq, item, advance, waiter):
                return False, started_ns or self._occupancy.put_wait.begin()
        except ChannelClosed:
            raise
        except BaseException:
            self._wake_everyone()
            raise
        if started_ns:
            self._occupancy.put_wait.end(started_ns)
        return True, started_ns

    def _try_put(
        self, seq: int | None, item: Any, advance: bool, waiter: Waiter | None = None
    ) -> bool:
        """Put if there is room, else enlist ``waiter``. The lock is held."""
        if self.has_room(seq, advance) or (
            self._capacity.may_burst(self.num_got) and self.has_room(seq, advance)
        ):
            if self._closed or self._finished:
                raise ChannelClosed
            self._place(seq, item, advance)
            if self._putters and not self._putter_woken:
                self._wake_putter()
            return True
        if waiter is not None:
            # The race with a close() by a finalizer on this thread, which the lock does not keep
            # out: enlist first, look second. Then close() either finds the waiter or is seen here.
            self._putters.append((seq, advance, waiter))
        if self._closed or self._finished:
            raise ChannelClosed
        return False

    def has_room(self, seq: int | None, advance: bool) -> bool:
        """Whether a put goes on at once, without a burst. The lock is held, or nobody else puts."""
        waiting = len(self._items)
        if seq is None:
            return waiting < self._capacity.now
        # Room is kept for the numbers between the turn and `seq` that have not come yet. So the
        # item whose turn it is never finds the channel full of later ones: a deadlock.
        if seq != self._turn and not (advance and seq - self._turn + waiting < self._capacity.now):
            return False
        return waiting + len(self._early) < self._capacity.most

    def _place(self, seq: int | None, item: Any, advance: bool) -> None:
        if seq is None or seq == self._turn:
            self._append(item)
            if seq is not None and advance:
                self._turn += 1
                while (
                    self._early and (item := self._early.pop(self._turn, _NOTHING)) is not _NOTHING
                ):
                    self._turn += 1
                    self._append(item)
        else:
            self._early[seq] = item
            waiting = len(self._items) + len(self._early)
            self._occupancy.peak = max(self._occupancy.peak, waiting)

    def _append(self, item: Any) -> None:
        if type(item) in self._marks:
            if item is SKIPPED:
                return
            self._sentinels.append(self._num_put)
        items, occupancy = self._items, self._occupancy
        if not items:
            occupancy.empty_ns += perf_counter_ns() - occupancy.empty_since_ns
            occupancy.empty_since_ns = 0
        items.append(item)
        self._num_put += 1
        if len(items) > occupancy.peak:
            occupancy.peak = len(items)
        if self._getters and not self._getter_woken:
            self._wake_getter()

    def _get_slowly(self, timeout: float | None) -> tuple[int, T]:
        deadline = None if timeout is None else perf_counter() + timeout
        started_ns = 0
        waiter = threading.Lock()
        waiter.acquire()
        try:
            while True:
                with self._lock:
                    taken, started_ns = self._try_get_waiting(waiter, started_ns)
                if taken is not None:
                    return taken
                if deadline is None:
                    wait_for(waiter)
                else:
                    left = min(deadline - perf_counter(), threading.TIMEOUT_MAX)
                    if left <= 0 or not wait_for(waiter, left):
                        raise WaitIsOver(f"no item came within {timeout} seconds.")
        except BaseException:
            self._abandon_get(started_ns, waiter)
            raise

    def _try_get_waiting(self, waiter: Waiter, started_ns: int) -> tuple[tuple[int, T] | None, int]:
        """Try to get; the get has waited since ``started_ns`` (0: not yet). The lock is held."""
        if started_ns:
            self._getter_woken = False  # this one is awake now, and wakes the next one itself
        try:
            taken = self._try_get(waiter)
        except (ChannelClosed, EndOfChannel):
            raise
        except BaseException:
            self._wake_everyone()
            raise
        if taken is None:
            return None, started_ns or self._occupancy.get_wait.begin()
        if started_ns:
            self._occupancy.get_wait.end(started_ns)
        return taken, started_ns

    def _try_get(self, waiter: Waiter | None = None) -> tuple[int, T] | None:
        """Take an item if there is one, else enlist ``waiter``. The lock is held."""
        if self._closed:
            raise ChannelClosed
        if self._items:
            return self.get_numbered()  # which does not wait now
        if self._finished:
            raise EndOfChannel
        if waiter is not None:
            self._getters.append(waiter)
            if self._closed:  # perhaps just now: enlist first, look second, as in _try_put
                raise ChannelClosed
        return None

    # The lock is held in all of these. An empty deque is not an error, though: a close() by
    # a finalizer on this very thread may have woken everyone just before. A waiter is released
    # first and struck off second: one that Ctrl-C left between the two is on its way all the same.

    def _wake_getter(self) -> None:
        try:
            _release(self._getters[0])
            self._getter_woken = True
            self._getters.popleft()
        except IndexError:
            return

    def _wake_putter(self) -> None:
        """Wake the first put that fits; ordered ones are each for a place of their own."""
        for entry in tuple(self._putters):
            if self.has_room(entry[0], entry[1]):
                _release(entry[2])
                self._putter_woken = True
                try:
                    self._putters.remove(entry)
                except ValueError:
                    pass
                return

    def _wake_everyone(self) -> None:
        """Wake all that wait, to look for themselves; those that find nothing wait again."""
        while self._getters:
            self._wake_getter()
        while self._putters:
            try:
                _release(self._putters[0][2])
                self._putters.popleft()
            except IndexError:
                break
        # Perhaps nobody waited: then nobody is on the way to wake the next one.
        self._getter_woken = self._putter_woken = False

    @scope
    def _all_awake_if_cut_off(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._wake_everyone()
            raise

    # A wait may end by Ctrl-C, a timeout, a cancellation or the channel's own end. If its waiter is
    # still enlisted, it is struck off, so that no wake-up is lost on it. If it is not, it was woken
    # just before, and passes that wake-up on.

    def _abandon_put(self, started_ns: int, entry: tuple[int | None, bool, Waiter]) -> None:
        with self._lock:
            if started_ns:
                self._occupancy.put_wait.end(started_ns)
            if entry in self._putters:
                self._putters.remove(entry)
            else:
                self._putter_woken = False
                self._wake_putter()

    def _abandon_get(self, started_ns: int, waiter: Waiter) -> None:
        with self._lock:
            if started_ns:
                self._occupancy.get_wait.end(started_ns)
            if waiter in self._getters:
                self._getters.remove(waiter)
            else:
                self._getter_woken = False
                if self._items and self._getters:
                    self._wake_getter()
