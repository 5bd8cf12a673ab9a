"""Event loops: the one of a run, for its asynchronous ops and the asynchronous hooks of its stages;
and the small ones of threads around whose plain ops users enter asynchronous hooks.

Whatever is entered is left in the same task: ``asyncio.timeout``, the tokens of context variables
and the scopes of anyio ask for that.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, suppress
from time import thread_time_ns
from typing import TYPE_CHECKING, Any, TypeVar

from ..scopes import scope

if TYPE_CHECKING:
    from .threads import ThreadGroup

T = TypeVar("T")

LOOP_NAME = "loop"

AnyContext = AbstractContextManager[Any] | AbstractAsyncContextManager[Any]


async def _live(context: AbstractAsyncContextManager[Any], entered: Any, leave: Any) -> Any:
    """Enter a context, and leave it in the same task.

    entered: the future that is told that it was, or its error.
    leave: gives what ``__aexit__`` is called with. The result is what that returns.
    """
    try:
        async with AsyncExitStack() as stack:
            entered.set_result(await stack.enter_async_context(context))
            details = await asyncio.wrap_future(leave)
            return await stack.pop_all().__aexit__(*details)
    except BaseException as error:
        if entered.done():
            raise
        entered.set_exception(error)
    return False


_NO_ERROR = None, None, None


class LoopThread:
    """The thread of a run whose event loop serves asynchronous ops, and hooks of stages and queues.
    It begins before the first of these, and ends when the source and all stages have ended.
    """

    def __init__(self, threads: ThreadGroup, *, num_users: int) -> None:
        """``num_users``: how many parts of the run leave it."""
        self._threads = threads
        self._users = deque(range(num_users))  # as many; popped in one step by any thread
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        self._end = asyncio.Event()  # set on the loop alone
        self._cpu_ns = 0
        self._has_begun = self._is_over = False

    def begin(self) -> None:
        """Have it run, unless it does. The thread that starts the run calls this."""
        if not self._has_begun:
            self._has_begun = True
            self._threads.spawn(LOOP_NAME, self._run)
        self._loop.result()

    def leave(self) -> None:
        """Note that a part of the run needs it no longer; the last one ends it. Never blocks."""
        self._users.pop()
        if not self._users:
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
            self._loop.set_exception(error)  # no files for a loop: who waits is told

    async def _serve(self) -> None:
        self._loop.set_result(asyncio.get_running_loop())
        if not self._is_over:
            await self._end.wait()

    def call(self, function: Any, *args: Any) -> None:
        """Call a function there, soon, if there is a loop. Never blocks."""
        if self._loop.done():
            with suppress(RuntimeError, OSError):  # it has ended, or never began
                self._loop.result().call_soon_threadsafe(function, *args)

    def cpu_ns(self) -> int:
        """Return the CPU time of the thread, which calls this, since it did so before."""
        before, self._cpu_ns = self._cpu_ns, thread_time_ns()
        return self._cpu_ns - before

    @scope
    def entered(self, context: AbstractAsyncContextManager[Any]) -> Iterator[None]:
        """Enter an asynchronous context there, from any thread, and leave it in the same task."""
        entered: Future[None] = Future()
        leave: Future[Any] = Future()
        self.begin()
        alive = _live(context, entered, leave)
        left = asyncio.run_coroutine_threadsafe(alive, self._loop.result())
        entered.result()
        try:
            yield
        finally:
            leave.set_result(_NO_ERROR)
            left.result()


class LazyRunner:
    """An event loop for one thread, created only if an asynchronous context is entered. It runs
    while a context is entered or left, and not while the thread works: an op may run a loop.
    """

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def close(self) -> None:
        """Close the loop, if there is one."""
        if self._runner is not None:
            self._runner.close()

    def blocking(self, context: AnyContext) -> AbstractContextManager[Any]:
        """Return ``context`` as a plain context manager."""
        return context if isinstance(context, AbstractContextManager) else self._entered(context)

    @scope
    def _entered(self, context: AbstractAsyncContextManager[Any]) -> Iterator[Any]:
        loop = self._begun().get_loop()
        entered, leave = loop.create_future(), loop.create_future()
        task = loop.create_task(_live(context, entered, leave))
        value = loop.run_until_complete(entered)
        try:
            yield value
        except BaseException as error:
            leave.set_result((type(error), error, error.__traceback__))
            if not loop.run_until_complete(task):
                raise
        else:
            leave.set_result(_NO_ERROR)
            loop.run_until_complete(task)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end on this thread's loop."""
        return self._begun().run(coroutine)

    def _begun(self) -> asyncio.Runner:
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner
