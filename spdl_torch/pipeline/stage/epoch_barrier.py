"""The end of an epoch at a stage with several threads: it must overtake nobody.

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
from ..channel.waits import WaitClock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["AsyncTurnstile", "Turnstile"]


class _Turns:
    """The part that threads and coroutines share: who is *busy*, which is whoever took an item,
    until it takes the next one or leaves; and how long all of them have waited for their turn.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the two below; held for moments, never in a wait
        self._busy: set[object] = set()
        self._clock = WaitClock()

    def waited_ns(self) -> int:
        """Time that all together have waited for their turn."""
        with self._lock:
            return self._clock.read()[0]

    def _begin_wait(self) -> int:
        with self._lock:
            return self._clock.begin()

    def _end_wait(self, started_ns: int) -> None:
        with self._lock:
            self._clock.end(started_ns)


class Turnstile(_Turns):
    """Lets one thread at a time take an item.

    Who has the turn blocks in the channel's own get, so that closing the channel ends every wait:
    that one raises, and so does each who has the turn after it. A wait for busy threads ends
    without that, since an op always returns.
    """

    def __init__(
        self, take: Callable[[], tuple[int, Any]], pass_sentinel: Callable[[int, Sentinel], None]
    ) -> None:
        super().__init__()
        self._take = take
        self._pass_sentinel = pass_sentinel
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
                with self._idle:
                    self._idle.wait_for(self._is_idle)
                self._pass_sentinel(number, item)
                number, item = self._take()
            with self._lock:
                self._busy.add(threading.get_ident())
        return number, item

    def leave(self) -> None:
        """The calling thread has passed on what it had."""
        with self._idle:
            self._busy.discard(threading.get_ident())
            if not self._busy:
                self._idle.notify()

    def _is_idle(self) -> bool:
        return not self._busy


class AsyncTurnstile(_Turns):
    """The same for the coroutines of one event loop; a cancellation ends every wait."""

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
        """The running coroutine has passed on what it had."""
        self._busy.discard(asyncio.current_task())
        if not self._busy:
            self._idle.set()
