"""A running source: a thread that iterates over the user's iterable, once or epoch after epoch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Iterator
from contextlib import ExitStack
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ..channel.sentinels import EPOCH_END
from ..channel.waits import ChannelClosed
from ..failures import attach_note
from ..hooks.checks import enter_queue_hook

if TYPE_CHECKING:
    import threading

    from ..definition.specs import SourceSpec
    from ..hooks.stats_queue import StatsQueue
    from ..recorder.rings import Ring
    from ..run.run import Run


class Source:
    """A running :class:`SourceSpec`.

    Stop: a put that waits for room ends at once; the user's own ``next()`` cannot be interrupted,
    and nobody waits for it: its thread ends when that call returns.
    """

    def __init__(self, spec: SourceSpec, outlet: StatsQueue, ring: Ring, owner: Run) -> None:
        self.name = spec.name
        self.outlet = outlet
        self.thread: threading.Thread | None = None
        """Set by the run, which does not wait for it when it stops."""
        self.spec = spec
        self._ring = ring
        self._owner = owner
        self._hooks = ExitStack()

    def enter(self) -> None:
        """Enter the hook of the queue, before the thread starts."""
        enter_queue_hook(self._hooks, self.outlet)

    def run(self) -> None:
        """Iterate to the end. The target of the source's thread."""
        queue = self.outlet
        try:
            self._pass_on(queue)
        except ChannelClosed:  # the run stops or has failed: nobody takes any more
            pass
        except BaseException as error:
            num_items = queue.counters().num_put
            attach_note(error, f"in the source {self.spec}, after {num_items} items")
            self._owner.fail("the source raised", [as_exception(error)])
        finally:
            # Before the queue ends: a hook that raises has to fail the run while the consumer can
            # still learn of it.
            self._leave()
            queue.finish()
            self._owner.source_has_ended()

    def _pass_on(self, queue: StatsQueue) -> None:
        ring, spec = self._ring, self.spec
        since_ns, epoch = ring.begin(), _epoch_of(spec.source)
        while True:
            for item in iterate(spec):
                ended_ns = perf_counter_ns()
                output = queue.put(item)
                item = None  # else it would stay alive while the source waits for the next one
                done_ns = perf_counter_ns()
                if done_ns - since_ns >= ring.shortest_ns:
                    ring.add(since_ns, since_ns, ended_ns, done_ns, -1, -1, output, None, queue)
                since_ns = done_ns
            if not spec.continuous:
                return
            queue.put(EPOCH_END)
            epoch += 1
            # Only this thread knows when its epoch ends: the consumer still takes items of earlier
            # ones.
            if hasattr(spec.source, "set_epoch"):
                spec.source.set_epoch(epoch)

    def _leave(self) -> None:
        try:
            self._hooks.close()
        except Exception as error:
            self._owner.fail("a queue's stage_hook raised", [error])


def _epoch_of(iterable: Any) -> int:
    """Return the epoch of a sampler, which torch's and ours keep in ``epoch``."""
    epoch = getattr(iterable, "epoch", 0)
    return epoch if isinstance(epoch, int) else 0


def as_exception(error: BaseException) -> Exception:
    """Return ``error``, or an Exception around what cannot be a member of an ExceptionGroup."""
    if isinstance(error, Exception):
        return error
    wrapped = RuntimeError(f"{type(error).__name__} in a thread of the pipeline")
    wrapped.__cause__ = error
    return wrapped


def iterate(source: SourceSpec) -> Iterator[Any]:
    """Return an iterator over a plain or an asynchronous source."""
    if isinstance(source.source, AsyncIterable):
        return _iterate_async(source.source)
    return iter(source.source)


def _iterate_async(iterable: AsyncIterable[Any]) -> Iterator[Any]:
    """Iterate over an async source by a loop of its own, which pauses between items."""
    iterator = aiter(iterable)

    async def advance() -> Any:
        return await anext(iterator)

    with asyncio.Runner() as runner:
        while True:
            try:
                item = runner.run(advance())
            except StopAsyncIteration:
                return
            yield item
            del item
