"""A running source: a thread that iterates over the user's iterable, once or epoch after epoch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterable, Callable
from contextlib import closing, suppress
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from .channel import EPOCH_END, ChannelClosed
from .failures import as_exception, attach_note
from .loop import LazyRunner
from .stage_hooks import StageHooks

if TYPE_CHECKING:
    from .run import Run
    from .stage_hooks import StatsQueue


class Source:
    """The running :class:`SourceSpec` of a run.

    An asynchronous iterable has a loop of its own on this thread, for all its epochs, and one task
    in each, which pauses while an item waits for room: user code that blocks there keeps no op
    waiting.

    Stop: a put that waits for room ends at once, and so does an ``await``; the user's own
    ``next()`` cannot be interrupted, and nobody waits for it: its thread ends when that returns.
    """

    def __init__(self, run: Run) -> None:
        self.spec = run.spec.src
        self.outlet = run.queues[0]
        self.threads: list[threading.Thread] = []
        """Its one thread, set by the run, which does not wait for it when it stops."""
        self._run = run
        self._ring = run.recorder.new_ring(self.spec.name, 0, role="source")
        self.hooks = StageHooks([], run.loop)
        self._cancel: Callable[[], object] | None = None  # of an asynchronous pass

    def enter(self, *queues: StatsQueue) -> None:
        """Enter the hooks of its queues, before the thread starts."""
        self.hooks.enter(queues)

    def request_stop(self) -> None:
        """End an ``await`` of an asynchronous source. Never blocks."""
        if self._cancel is not None:
            with suppress(RuntimeError):  # its loop has ended
                self._cancel()

    def iterate(self) -> None:
        """Iterate to the end. The target of the source's thread."""
        queue = self.outlet
        try:
            with closing(LazyRunner()) as runner:
                self._pass_on(runner)
        except ChannelClosed:  # the run stops or has failed: nobody takes any more
            pass
        except BaseException as error:
            if not (isinstance(error, asyncio.CancelledError) and queue.closed):
                num_items = queue.counters().num_put
                attach_note(error, f"in the source {self.spec}, after {num_items} items")
                self._run.fail("the source raised", [as_exception(error)])
        finally:
            # Before the queue ends: a hook that raises has to fail the run while the consumer can
            # still learn of it.
            try:
                self.hooks.leave()
            except Exception as error:
                self._run.fail("a queue's stage_hook raised", [error])
            queue.finish()
            self._run.source_has_ended()
            self._run.loop.leave()

    def _pass_on(self, runner: LazyRunner) -> None:
        source, epoch = self.spec.source, _epoch_of(self.spec.source)
        self._since_ns = self._ring.begin()
        while True:
            if isinstance(source, AsyncIterable):
                runner.run(self._iterate_async(source))
            else:
                for item in source:
                    self._put(item)
                    item = None  # else it would stay alive while the source waits for the next one
            if not self.spec.continuous:
                return
            self.outlet.put(EPOCH_END)
            epoch += 1
            # Only this thread knows when its epoch ends: the consumer still takes items of earlier
            # ones.
            if hasattr(source, "set_epoch"):
                source.set_epoch(epoch)

    async def _iterate_async(self, source: AsyncIterable[Any]) -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None, "this runs in one"
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        if self.outlet.closed:  # a stop that came just before did not see it
            raise ChannelClosed
        async for item in source:
            self._put(item)
            item = None  # else it would stay alive while the source waits for the next one

    def _put(self, item: Any) -> None:
        ended_ns = perf_counter_ns()
        output = self.outlet.put(item)
        since_ns, self._since_ns = self._since_ns, perf_counter_ns()
        if self._since_ns - since_ns >= self._ring.shortest_ns:
            times = since_ns, since_ns, ended_ns, self._since_ns, -1
            self._ring.add(times, -1, output, None, self.outlet)


def _epoch_of(iterable: Any) -> int:
    """Return the epoch of a sampler, which torch's and ours keep in ``epoch``."""
    epoch = getattr(iterable, "epoch", 0)
    return epoch if isinstance(epoch, int) else 0
