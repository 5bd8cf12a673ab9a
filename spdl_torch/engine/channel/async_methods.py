"""The methods of a channel for coroutines, which suspend where those for threads block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from .sentinels import SKIPPED
from .waits import AsyncWaiter

if TYPE_CHECKING:
    import threading

    from .waits import Waiter


class AsyncMethods(ABC):
    """The waits of coroutines; inspecting the channel and waking others is left to the channel."""

    _lock: threading.RLock
    _num_put: int

    async def aput(self, item: Any) -> int:
        """``put`` for a coroutine: suspends instead of blocking."""
        return await self._put_suspending(None, item, advance=True)

    async def aput_at(self, seq: int, item: Any) -> None:
        """``put_at`` for a coroutine."""
        await self._put_suspending(seq, item, advance=True)

    async def askip(self, seq: int) -> None:
        """``skip`` for a coroutine."""
        await self._put_suspending(seq, SKIPPED, advance=True)

    async def aget_numbered(self) -> tuple[int, Any]:
        """``get_numbered`` for a coroutine."""
        started_ns = 0
        waiter = AsyncWaiter()
        try:
            while True:
                with self._lock:
                    taken, started_ns = self._try_get_waiting(waiter, started_ns)
                if taken is not None:
                    return taken
                await waiter.wait()  # without the lock
                waiter = AsyncWaiter()
        except BaseException:  # cancelled: a wake-up that came already is passed on
            self._abandon_get(started_ns, waiter)
            raise

    async def _put_suspending(self, seq: int | None, item: Any, *, advance: bool) -> int:
        started_ns = 0
        waiter = AsyncWaiter()
        try:
            while True:
                with self._lock:
                    done, started_ns = self._try_put_waiting(seq, item, advance, waiter, started_ns)
                    number = self._num_put - 1
                if done:
                    return number
                await waiter.wait()  # without the lock
                waiter = AsyncWaiter()
        except BaseException:  # cancelled: a wake-up that came already is passed on
            self._abandon_put(started_ns, (seq, advance, waiter))
            raise

    @abstractmethod
    def _try_get_waiting(
        self, waiter: Waiter, started_ns: int
    ) -> tuple[tuple[int, Any] | None, int]: ...

    @abstractmethod
    def _try_put_waiting(
        self, seq: int | None, item: Any, advance: bool, waiter: Waiter, started_ns: int
    ) -> tuple[bool, int]: ...

    @abstractmethod
    def _abandon_get(self, started_ns: int, waiter: Waiter) -> None: ...

    @abstractmethod
    def _abandon_put(self, started_ns: int, entry: tuple[int | None, bool, Waiter]) -> None: ...
