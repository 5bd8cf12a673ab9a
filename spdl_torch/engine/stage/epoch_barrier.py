"""The end of an epoch at a stage with several threads, which must not overtake any item.

With a continuous source a sentinel stands in each channel between two epochs. A stage with one
thread, or one that keeps the order, simply passes it on. Where several threads pass on items as
they finish, one may still work on an item of the old epoch when another puts the sentinel, or an
item of the new epoch, into the queue. So there the threads take items one at a time, and the one
that takes the sentinel keeps the others from taking until all have passed on what they had.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from ..channel.sentinels import Sentinel
from ..channel.waits import WaitTime

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class _Busy:
    """The part that threads and coroutines share: which of them are *busy*, from the item that they
    took until they take the next one or leave; and how long all have waited for their turn.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the two below; held for moments, never in a wait
        self._busy: set[object] = set()
        self._waits = WaitTime()

    def waited_ns(self) -> int:
        """Return the time that all together have waited for their turn."""
        with self._lock:
            return self._waits.read()[0]

    def _begin_wait(self) -> int:
        with self._lock:
            return self._waits.begin()

    def _end_wait(self, started_ns: int) -> None:
        with self._lock:
            self._waits.end(started_ns)


class Turnstile(_Busy):
    """Lets one thread at a time take an item.

    The thread that has the turn blocks in the channel's own get, so that closing the channel ends
    every wait: that get raises, and so does the get of each thread that has the turn after it. The
    wait for busy threads ends by itself, since an op always returns.
    """

    def __init__(
        self, take: Callable[[], tuple[int, Any]], pass_sentinel: Callable[[int, Sentinel], None]
    ) -> None:
        super().__init__()
        self._take = take
        self._pass_sentinel = pass_sentinel
        # Held by the thread that takes, also while it waits for an item or for busy threads. The
        # other lock is taken inside it, never the other way round, so leave() never waits for it.
        self._turn = threading.Lock()
        self._idle = threading.Condition(self._lock)

    def take(self) -> tuple[int, Any]:
        """Return the next item with its number; sentinels before it are passed on."""
        self.leave()
        started_ns = self._begin_wait()
        with self._turn:
            self._end_wait(started_ns)
            number, item = self._take()
            while type(item) is Sentinel:
                # Nobody can become busy meanwhile: that needs the turn, which this thread has.
                with self._idle:
                    self._idle.wait_for(self._is_idle)
                self._pass_sentinel(number, item)
                number, item = self._take()
            with self._lock:
                self._busy.add(threading.get_ident())
        return number, item

    def leave(self) -> None:
        """Note that the calling thread has passed its item on."""
        with self._idle:
            self._busy.discard(threading.get_ident())
            if not self._busy:
                self._idle.notify()

    def _is_idle(self) -> bool:
        return not self._busy


class AsyncTurnstile(_Busy):
    """A turnstile for the coroutines of one event loop; a cancellation ends every wait."""

    # Coroutines change places at an await alone, so nothing guards _busy. The lock of the base
    # class is for the clock, which other threads read.

    def __init__(
        self,
        take: Callable[[], Awaitable[tuple[int, Any]]],
        pass_sentinel: Callable[[int, Sentinel], Awaitable[None]],
    ) -> None:
        super().__init__()
        self._take = take
        self._pass_sentinel = pass_sentinel
        self._turn = asyncio.Lock()
        self._idle = asyncio.Event()

    async def take(self) -> tuple[int, Any]:
        """Return the next item with its number; sentinels before it are passed on."""
        self.leave()
        started_ns = self._begin_wait()
        async with self._turn:
            self._end_wait(started_ns)
            number, item = await self._take()
            while type(item) is Sentinel:
                await self._idle.wait()
                await self._pass_sentinel(number, item)
                number, item = await self._take()
            self._busy.add(asyncio.current_task())
            self._idle.clear()
        return number, item

    def leave(self) -> None:
        """Note that the running coroutine has passed its item on."""
        self._busy.discard(asyncio.current_task())
        if not self._busy:
            self._idle.set()
