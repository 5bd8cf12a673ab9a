"""How a wait at a channel ends, and how its time is counted."""

from __future__ import annotations

import asyncio
import math
import threading
from time import perf_counter, perf_counter_ns
from typing import Protocol

from ..stats.histogram import Histogram

__all__ = [
    "AsyncWaiter",
    "ChannelClosed",
    "Dismissed",
    "EndOfChannel",
    "WaitClock",
    "Waiter",
    "wait_for",
]

_LOOK_SECONDS = 0.5


class EndOfChannel(Exception):
    """The channel was finished by its producer and is empty."""


class ChannelClosed(Exception):
    """The channel was closed by its owner (the run stops), or finished before this put."""


class Dismissed(Exception):
    """The getter is one too many and shall leave; no item was taken."""


class Waiter(Protocol):
    """Someone who waits; a locked ``threading.Lock`` is one."""

    def release(self) -> None:
        """End the wait; called from any thread."""
        ...


def wait_for(waiter: threading.Lock, seconds: float = -1) -> bool:
    """Until it is released; False if that takes longer (-1: for ever).

    Python runs signal handlers on the main thread. A signal that arrives just before that thread
    blocks, or on another one, does not wake it; so it looks now and then, for Ctrl-C to work.
    """
    if threading.current_thread() is not threading.main_thread():
        return waiter.acquire(timeout=seconds)
    end = math.inf if seconds < 0 else perf_counter() + seconds
    while (left := end - perf_counter()) > 0:
        if waiter.acquire(timeout=min(left, _LOOK_SECONDS)):
            return True
    return False


class WaitClock:
    """Sums the time that threads spent waiting, the waits that are still open included."""

    def __init__(self) -> None:
        self._closed_ns = 0
        self._num_open = 0
        self._open_starts_ns = 0
        self._histogram = Histogram()

    def begin(self) -> int:
        """A wait starts; returns its start, for ``end``."""
        now = perf_counter_ns()
        self._num_open += 1
        self._open_starts_ns += now
        return now

    def end(self, started_ns: int) -> None:
        """The wait that started then has ended."""
        waited = perf_counter_ns() - started_ns
        self._num_open -= 1
        self._open_starts_ns -= started_ns
        self._closed_ns += waited
        self._histogram.add(waited)

    def read(self) -> tuple[int, int, tuple[int, ...]]:
        """Total wait in ns, number of waits still open, histogram of the closed ones."""
        open_ns = self._num_open * perf_counter_ns() - self._open_starts_ns
        return self._closed_ns + open_ns, self._num_open, self._histogram.counts()


class AsyncWaiter:
    """The coroutine's end of a wait: ``release`` comes from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self._loop.create_future()

    def release(self) -> None:
        """End the wait; called from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._set)
        except RuntimeError:
            pass  # the loop ended in between; nobody waits any more

    def _set(self) -> None:
        if not self._future.done():
            self._future.set_result(None)

    async def wait(self) -> None:
        """Suspend until ``release``."""
        await self._future
