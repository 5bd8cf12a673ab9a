"""Merges by the user's own function, which takes from queues and fills another one.

Asynchronous, as SPDL's are: ``async def op(info, input_queues, output_queue)`` with ``await
queue.get()`` and ``await queue.put(item)``. A plain function has the same queues without ``await``.
A queue that has ended gives the end of the data (``is_eof``), again at every further ``get``.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

from ..channel.sentinels import END_OF_DATA, EPOCH_END
from ..channel.waits import ChannelClosed, EndOfChannel
from .merge import Merge

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..hooks.stats_queue import StatsQueue
    from ..recorder.rings import Ring


class OpMerge(Merge):
    """One thread, which runs the function to its end. If it returns early, the inlets close."""

    _op: Callable[..., Any]
    _is_continuous: bool
    _loop: asyncio.AbstractEventLoop | None = None
    _task: asyncio.Task[Any] | None = None

    def set_op(self, op: Callable[..., Any], *, is_continuous: bool) -> None:
        """Set the function to run, and whether it may put the ends of epochs."""
        self._op, self._is_continuous = op, is_continuous

    def merge(self, number: int, ring: Ring) -> None:
        """Run the function; items that it left in the queues are discarded."""
        ring.begin()
        make_input, make_output = (_AsyncInput, _AsyncOutput)
        if not is_async_op(self._op):
            make_input, make_output = _Input, _Output  # type: ignore[assignment]  # same methods
        inputs = [make_input(inlet) for inlet in self.inlets]
        output = make_output(self.outlet, self._is_continuous)
        made = self._op(self.info, inputs, output)
        if inspect.isawaitable(made):
            try:
                asyncio.run(self._await(made))
            except asyncio.CancelledError:
                raise ChannelClosed from None  # request_stop() cancelled it
        self.close_inlets(number)

    def request_stop(self) -> None:
        """Cancel the function, if it is asynchronous. Never blocks."""
        if self._loop is not None and self._task is not None:
            try:
                self._loop.call_soon_threadsafe(self._task.cancel)
            except RuntimeError:
                pass  # the loop is closed: the function has returned

    async def _await(self, made: Any) -> None:
        self._task = asyncio.ensure_future(made)
        self._loop = asyncio.get_running_loop()
        # The race with a stop, as in AsyncStage: the run closes the outlet before it calls
        # request_stop(). Either that sees task and loop, or the outlet is seen closed here.
        if self.outlet.closed:
            self._task.cancel()
        await self._task


def is_async_op(op: Callable[..., Any]) -> bool:
    """Return whether the function awaits the methods of its queues."""
    call = op if inspect.isroutine(op) else getattr(op, "func", type(op).__call__)
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(op)


class _View:
    """A queue, as the user's function sees it."""

    def __init__(self, queue: StatsQueue) -> None:
        self._queue = queue

    def qsize(self) -> int:
        """Return the number of items that wait."""
        return len(self._queue)

    def empty(self) -> bool:
        """Return whether no item waits."""
        return not len(self._queue)


class _Input(_View):
    def get(self, timeout: float | None = None) -> Any:
        """Return the next item, or the end of an epoch or of the data. Raises: TimeoutError."""
        try:
            return self._queue.get(timeout)
        except EndOfChannel:
            return END_OF_DATA

    def get_nowait(self) -> Any:
        """Return the same as ``get``, at once. Raises: asyncio.QueueEmpty: no item waits."""
        try:
            return self._queue.get(0)
        except EndOfChannel:
            return END_OF_DATA
        except TimeoutError:
            raise asyncio.QueueEmpty from None


class _AsyncInput(_Input):
    async def get(self) -> Any:  # type: ignore[override]  # as asyncio.Queue has it
        """Return the next item, or the end of an epoch or of the data."""
        try:
            return (await self._queue.aget_numbered())[1]
        except EndOfChannel:
            return END_OF_DATA
        except ChannelClosed:
            # The run stops: tasks of the function end without "exception never retrieved".
            raise asyncio.CancelledError from None


class _Output(_View):
    def __init__(self, queue: StatsQueue, is_continuous: bool) -> None:
        super().__init__(queue)
        self._is_continuous = is_continuous

    def full(self) -> bool:
        """Return whether a put would wait."""
        return len(self._queue) >= self._queue.capacity

    def put(self, item: Any) -> None:
        """Pass an item on, or the end of an epoch; blocks while there is no room."""
        self._queue.put(self._checked(item))

    def _checked(self, item: Any) -> Any:
        if item is END_OF_DATA or (item is EPOCH_END and not self._is_continuous):
            raise ValueError(
                f"a merge op must not put {item!r}: it ends the data by returning, and epochs only "
                "where the sources are continuous."
            )
        return item


class _AsyncOutput(_Output):
    async def put(self, item: Any) -> None:  # type: ignore[override]  # as asyncio.Queue has it
        """Pass an item on, or the end of an epoch; suspends while there is no room."""
        try:
            await self._queue.aput(self._checked(item))
        except ChannelClosed:
            raise asyncio.CancelledError from None
