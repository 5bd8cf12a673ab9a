"""Waits at a channel: how they end, and how their time is counted."""

from __future__ import annotations

import asyncio
import math
import threading
from time import perf_counter, perf_counter_ns
from typing import Protocol

from ...machine.histogram import Histogram

_LOOK_SECONDS = 0.5


class EndOfChannel(Exception):
    """Raised where the producer has finished the channel, and it is empty."""


class ChannelClosed(Exception):
    """Raised where the owner has closed the channel (the run stops), or it was finished before this
    put.
    """


class WaitIsOver(TimeoutError):
    """Raised where a wait has taken too long. A class of its own: the handler of a signal may raise
    TimeoutError in the middle of a wait, and that ends more than the wait."""


class Waiter(Protocol):
    """The handle by which a waiting thread or coroutine is woken, such as a locked ``Lock``."""

    def release(self) -> None:
        """End the wait; called from any thread."""
        ...


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


class WaitTime:
    """The time that threads spent waiting, open waits included. The owner's lock is held."""

    def __init__(self) -> None:
        self._closed_ns = 0
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
        self._closed_ns += waited
        self._histogram.add(waited)

    def read(self) -> tuple[int, int, tuple[int, ...]]:
        """Return the total wait in ns, the number of open waits, the histogram of closed ones."""
        open_ns = self._num_open * perf_counter_ns() - self._open_starts_ns
        return self._closed_ns + open_ns, self._num_open, self._histogram.counts()


class AsyncWaiter:
    """The waiter of a coroutine. Any thread may call ``release``."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self._loop.create_future()

    def release(self) -> None:
        """End the wait; called from any thread."""
        # A future belongs to its loop's thread: no other thread may set it.
        try:
            self._loop.call_soon_threadsafe(self._set)
        except RuntimeError:
            pass  # the loop has ended meanwhile: nobody waits any more

    def _set(self) -> None:
        if not self._future.done():  # else the wait was cancelled meanwhile
            self._future.set_result(None)

    async def wait(self) -> None:
        """Suspend until ``release``."""
        await self._future
