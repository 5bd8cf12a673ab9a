"""A stage whose op is asynchronous: one event loop on one thread, `concurrency` coroutines."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, Any

from ..channel.sentinels import Sentinel
from ..channel.waits import ChannelClosed, EndOfChannel
from ..definition.ops import OpKind
from ..hooks.checks import bad_hook
from ..hooks.context_managers import NotAContextError
from ..recorder.moments import Outcome
from .epoch_barrier import AsyncTurnstile
from .stage import Stage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from ..hooks.task_hooks import TaskCell
    from ..recorder.rings import Ring
    from .stage_threads import Slot

    Take = Callable[[], Awaitable[tuple[int, Any]]]


class AsyncStage(Stage):
    """A stage of coroutines. A stop cancels the running ones at their next ``await``."""

    # Written by the loop's thread, and read by request_stop() on any other: the loop last, so that
    # whoever sees it sees the tasks.
    _loop: asyncio.AbstractEventLoop | None = None
    _tasks: tuple[asyncio.Task[None], ...] = ()
    _cancelled = False
    _slots: list[Slot]
    _turns: AsyncTurnstile | None = None

    def thread_targets(self) -> list[tuple[str, Callable[[], None]]]:
        """Return name and target of the loop's thread."""
        self._slots = self.threads.slots()
        return [(f"{self.spec.name}-loop", self._run_loop)]

    def request_stop(self) -> None:
        """Cancel the coroutines. Never blocks."""
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._cancel)
            except RuntimeError:
                pass  # the loop is closed: the stage has ended by itself

    def _cancel(self) -> None:
        self._cancelled = True
        for task in self._tasks:
            task.cancel()

    @property
    def turn_wait_ns(self) -> int:
        """The time that all coroutines waited for their turn to take an item."""
        return 0 if self._turns is None else self._turns.waited_ns()

    def _run_loop(self) -> None:
        try:
            asyncio.run(self._main())
        except (ChannelClosed, asyncio.CancelledError):
            self.cut_short = True
        except BaseException as error:
            self.fail(error)
        finally:
            self.leave(workers=self.spec.concurrency)

    async def _main(self) -> None:
        cell = self.new_cell()
        take: Take = self._atake_past_sentinels if self.has_sentinels else self.inlet.aget_numbered
        if self.turns is not None:
            self._turns = AsyncTurnstile(self.inlet.aget_numbered, self._apass_sentinel)
            take = self._turns.take
        self._tasks = tuple(
            asyncio.create_task(
                self._work(cell, slot.ring, take), name=f"{self.spec.name}-{slot.number}"
            )
            for slot in self._slots
        )
        self._loop = asyncio.get_running_loop()
        # The race with a stop: the run closes the outlet before it calls request_stop(). Either
        # that sees the loop, which is set above, or the outlet is seen closed here.
        if self.outlet.closed:
            self._cancel()
        try:
            await asyncio.gather(*self._tasks)
        except BaseException:
            self._cancel()
            raise

    async def _work(self, cell: TaskCell, ring: Ring, take: Take) -> None:
        since_ns = ring.begin()
        while True:
            try:
                number, item = await take()
            except EndOfChannel:
                return
            # Coroutines share their thread, so a task's CPU time is that of the loop since the last
            # task ended: right in sum and on average, not for a single task.
            started_ns, outcome = perf_counter_ns(), Outcome.PASSED
            try:
                result = await self._call(item, cell)
            except (Exception, asyncio.CancelledError) as error:
                # Cancelled by the run's stop; else what the op awaited was cancelled.
                if self._cancelled or self.ends_worker(error):
                    raise
                ended_ns, outcome = perf_counter_ns(), Outcome.FAILED
                cell.add_failure(ended_ns - started_ns, self._loop_cpu(cell))
                self.tally.count_failure(_as_exception(error), number, item)
                result = None
            else:
                ended_ns = perf_counter_ns()
                cell.add(ended_ns - started_ns, self._loop_cpu(cell))
                if result is None and self.spec.kind is OpKind.ASYNC_FUNCTION:
                    cell.num_dropped, outcome = cell.num_dropped + 1, Outcome.DROPPED
            output = await self._emit(number, result)
            item = result = None  # else they would stay alive while this coroutine waits
            done_ns = perf_counter_ns()
            if done_ns - since_ns >= ring.shortest_ns:
                ring.add(
                    since_ns,
                    started_ns,
                    ended_ns,
                    done_ns,
                    -1,
                    number,
                    output,
                    self.inlet,
                    self.outlet,
                    outcome,
                )
            since_ns = done_ns

    def _loop_cpu(self, cell: TaskCell) -> int:
        return thread_time_ns() - cell.cpu_ns

    async def _call(self, item: Any, cell: TaskCell) -> Any:
        async with AsyncExitStack() as stack:
            for hook in self.hooks.of_tasks:
                context = hook.task_hook(item)
                if isinstance(context, AbstractAsyncContextManager):
                    await stack.enter_async_context(context)
                elif isinstance(context, AbstractContextManager):
                    stack.enter_context(context)
                else:
                    raise bad_hook(hook, "task_hook", self.spec.name, NotAContextError.of(context))
            if self.spec.kind is OpKind.ASYNC_GENERATOR:
                await self._expand(self.spec.op(item), cell)
                return None
            return await self.spec.op(item)
        raise RuntimeError("a task hook must not swallow the exception of the op.")

    async def _expand(self, outputs: AsyncIterator[Any], cell: TaskCell) -> None:
        async for output in outputs:
            if output is None:
                cell.num_dropped += 1
                continue
            try:
                await self.outlet.aput(output)
            except ChannelClosed:  # no error of the op's: task hooks do not see it
                return
            output = None  # else it would stay alive while the generator waits

    async def _emit(self, number: int, result: Any) -> int:
        """Pass a result on; return its number in the outlet, -1 = unknown."""
        if result is None:
            if self.ordered:
                await self.outlet.askip(number)
            elif self.outlet.closed:
                raise ChannelClosed
        elif self.ordered:
            await self.outlet.aput_at(number, result)
        else:
            return await self.outlet.aput(result)
        return -1

    async def _atake_past_sentinels(self) -> tuple[int, Any]:
        number, item = await self.inlet.aget_numbered()
        while type(item) is Sentinel:
            await self._apass_sentinel(number, item)
            number, item = await self.inlet.aget_numbered()
        return number, item

    async def _apass_sentinel(self, number: int, sentinel: Sentinel) -> None:
        await self._aemit_sentinel(number, sentinel)

    async def _aemit_sentinel(self, number: int, sentinel: Sentinel) -> None:
        if self.ordered:
            await self.outlet.aput_at(number, sentinel)
        else:
            await self.outlet.aput(sentinel)


def _as_exception(error: BaseException) -> Exception:
    """Return ``error``, or an Exception around a CancelledError, which no group can hold."""
    if isinstance(error, Exception):
        return error
    wrapped = RuntimeError("the op awaited something that was cancelled")
    wrapped.__cause__ = error
    return wrapped
