"""Event loops: the one of a run, for its asynchronous ops and the asynchronous hooks of its stages;
and the small ones of threads around whose plain ops users enter asynchronous hooks.

Whatever is entered is left in the same task: ``asyncio.timeout``, the tokens of context variables
and the scopes of anyio ask for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from time import thread_time_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ..locks import RLock
from ..scopes import scope

if TYPE_CHECKING:
    from .threads import ThreadGroup

T = TypeVar("T")

LOOP_NAME = "loop"

AnyContext = AbstractContextManager[Any] | AbstractAsyncContextManager[Any]


class NotAContextError(TypeError):
    """Raised for an object that neither ``with`` nor ``async with`` can enter."""

    @classmethod
    def of(cls, given: Any) -> Self:
        """Return the error for an object that is not a context manager."""
        if hasattr(given, "close"):
            given.close()  # a coroutine: no warning that it was never awaited
        return cls(f"must return a context manager, got {type(given).__name__}")


class LoopThread:
    """The thread of a run whose event loop serves asynchronous ops, and hooks of stages and queues.
    It begins with the first ``hold``, and ends when all users, the run
    that starts among them, have called ``release``.
    """

    def __init__(self, threads: ThreadGroup) -> None:
        self._threads = threads
        self._lock = RLock()  # guards the number of users; never held in a wait
        self._num_users = 1  # the run, as long as it starts
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        self._end = asyncio.Event()  # set on the loop alone, as the next one
        self._cpu_ns = 0
        self._has_begun = self._is_over = False

    def hold(self) -> None:
        """Have it run until ``release`` was called as often."""
        with self._lock:
            self._num_users += 1
            if not self._has_begun:
                self._has_begun = True
                self._threads.spawn(LOOP_NAME, self._run)
        self._loop.result()

    def release(self) -> None:
        """Need it no longer. Never blocks."""
        with self._lock:
            self._num_users -= 1
            is_over = self._num_users == 0
        if is_over:
            self.end()

    def end(self) -> None:
        """End: nobody needs it any more. Never blocks."""
        self._is_over = True  # the loop looks for it once it can be called
        self.call(self._end.set)

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._serve())
        except BaseException as error:
            if self._loop.done():
                raise
            self._loop.set_exception(error)  # there are no files for a loop: who holds it is told

    async def _serve(self) -> None:
        self._loop.set_result(asyncio.get_running_loop())
        if not self._is_over:
            await self._end.wait()

    def call(self, function: Any, *args: Any) -> None:
        """Call a function there, soon, if somebody holds the loop. Never blocks."""
        if self._loop.done():
            with suppress(RuntimeError, OSError):  # it has ended, or never began
                self._loop.result().call_soon_threadsafe(function, *args)

    def cpu_ns(self) -> int:
        """Return the CPU time of the thread, which calls this, since it did so before."""
        before, self._cpu_ns = self._cpu_ns, thread_time_ns()
        return self._cpu_ns - before

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine there, as a task of its own."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop.result())

    @scope
    def entered(self, context: AbstractAsyncContextManager[Any]) -> Iterator[None]:
        """Enter an asynchronous context there, from any thread, and leave it in the same task."""
        entered: Future[None] = Future()
        leave = asyncio.Event()

        async def live() -> None:
            try:
                async with context:
                    entered.set_result(None)
                    await leave.wait()
            except BaseException as error:
                if entered.done():
                    raise
                entered.set_exception(error)

        self.hold()
        try:
            left = self.submit(live())
            entered.result()
            try:
                yield
            finally:
                self.call(leave.set)
                left.result()
        finally:
            self.release()


class LazyRunner:
    """An event loop for one thread, created only if an asynchronous context is entered. It runs
    while a context is entered or left, and not while the thread works: an op may run a loop.
    """

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._runner is not None:
            self._runner.close()

    def blocking(self, context: AnyContext) -> AbstractContextManager[Any]:
        """Return ``context`` as a plain context manager."""
        if isinstance(context, AbstractContextManager):
            return context
        if isinstance(context, AbstractAsyncContextManager):
            return _Blocking(context, self._begun().get_loop())
        raise NotAContextError.of(context)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end on this thread's loop."""
        return self._begun().run(coroutine)

    def _begun(self) -> asyncio.Runner:
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner


class _Blocking(AbstractContextManager[Any]):
    """An asynchronous context on a thread's own loop. One task enters it and leaves it."""

    def __init__(
        self, context: AbstractAsyncContextManager[Any], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._context, self._loop = context, loop
        self._leave: asyncio.Future[tuple[Any, Any, Any]] = loop.create_future()

    async def _live(self, entered: asyncio.Future[Any]) -> bool | None:
        try:
            value = await self._context.__aenter__()
        except BaseException as error:
            entered.set_exception(error)
            return None
        entered.set_result(value)
        return await self._context.__aexit__(*await self._leave)

    def __enter__(self) -> Any:
        entered: asyncio.Future[Any] = self._loop.create_future()
        self._task = self._loop.create_task(self._live(entered))
        return self._loop.run_until_complete(entered)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        self._leave.set_result((kind, error, traceback))
        return self._loop.run_until_complete(self._task)
