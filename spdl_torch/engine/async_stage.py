"""A stage whose op is asynchronous: one coroutine for each item, on the event loop of the run.

Two threads serve any number of coroutines. The *feeder* takes an item when one more may be in work,
and begins its coroutine: the hooks and the op, or the whole generator, are one task. The *emitter*
passes on what coroutines have for the queue after the stage, in the order of the items where that
is asked for. These two wait at queues; the loop never does.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
from collections import deque
from contextlib import AbstractContextManager, AsyncExitStack, aclosing
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from .channel import Channel, ChannelClosed, EndOfChannel, Mark
from .failures import as_exception
from .ops import OpKind
from .stage import Stage, Times, Worker
from .timeline import Outcome

if TYPE_CHECKING:
    from .threads import Target


class Output(NamedTuple):
    """What a coroutine has for the emitter. They sort by their items, the end of each last: a hook
    may end a generator while its output waits for its turn."""

    number: int
    is_end: bool
    """Of the item; else it is an output of a generator, which may have more."""
    worker: Worker
    result: Any
    outcome: Outcome | None
    """None: ``result`` is an error that ends the stage."""
    again: asyncio.Future[bool] | None = None
    """Of a generator, which waits until its output was passed on: whether it goes on."""


class AsyncStage(Stage):
    """A stage of coroutines. A stop cancels the running ones at their next ``await``."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        count = self.spec.concurrency
        self._free = Channel[Worker](count)
        # Room for an output and the end of each coroutine, and the feeder's: the loop never waits.
        self._outputs = Channel[Output | int](2 * count + 1)
        # The loop alone changes these; of the first, the feeder adds to it.
        self._to_begin: deque[tuple[Worker, Any]] = deque()
        self._is_stopped = self._is_called = False
        # The emitter's:
        self._held: list[Output] = []  # a heap: those whose turn has not come

    def targets(self) -> list[Target]:
        """Return name and target of the feeder and the emitter."""
        for number in range(self.spec.concurrency):
            worker = self._new_worker(number)
            worker.times = Times(since_ns=perf_counter_ns())
            self._free.put(worker)
        self._num_present = 2
        both = ("feeder", self._feed), ("emitter", self._pass_on)
        return [(f"{self.spec.name}-{n}", functools.partial(self._live, w)) for n, w in both]

    def request_stop(self) -> None:
        """Cancel the coroutines; the feeder ends with the inlet. Never blocks."""
        self._run.loop.call(self._cancel)

    def in_work(self) -> list[str]:
        """Return the names of the coroutines that are under way."""
        tasks = [worker.task for worker in self._workers.copy()]
        return [task.get_name() for task in tasks if task is not None]

    def _waits_ns(self) -> tuple[int, int]:
        """Return how long the coroutines waited for items, and for room, open waits included."""
        now = self.thread_count.watch.now_ns()
        waits = [worker.times.waits_ns(now) for worker in self._workers]
        return sum(in_ns for in_ns, _ in waits), sum(out_ns for _, out_ns in waits)

    def _cancel(self) -> None:
        if self._is_stopped:  # a second time would end what a ``finally`` awaits
            return
        self._is_stopped = True
        for worker in self._workers:
            if worker.task is not None:
                worker.task.cancel()

    # The feeder:

    def _feed(self) -> None:
        num_begun = 0
        try:
            while True:
                worker = self._free.get()
                try:
                    worker.taken, item = self.inlet.get_numbered()
                except EndOfChannel:
                    return
                if type(item) is Mark:
                    self._outputs.put(Output(worker.taken, True, worker, item, Outcome.PASSED))
                else:
                    self._to_begin.append((worker, item))
                    if not self._is_called:
                        self._is_called = True
                        self._run.loop.call(self._begin)
                num_begun += 1
                item = None  # else it would stay alive while this thread waits
        finally:
            self._outputs.put(num_begun)

    # On the loop:

    def _begin(self) -> None:
        self._is_called = False
        while self._to_begin:
            worker, item = self._to_begin.popleft()
            name = f"{self.spec.name}-{worker.number}"
            asyncio.create_task(self._do(worker, item), name=name)  # noqa: RUF006  # it keeps itself

    async def _do(self, worker: Worker, item: Any) -> None:
        """Make the call of an item; whatever becomes of it, the emitter is told."""
        outcome: Outcome | None = None
        # Only now: one that is cancelled before would not begin.
        worker.task = asyncio.current_task()
        try:
            result, outcome = await self._outcome_of(worker, item)
        except BaseException as error:
            result = error
        worker.task = None
        self._outputs.put(Output(worker.taken, True, worker, result, outcome))

    async def _outcome_of(self, worker: Worker, item: Any) -> tuple[Any, Outcome]:
        """Make the call and count it. Raises: what ends the stage."""
        cell, loop = worker.cell, self._run.loop
        worker.ring.begin()
        worker.times = worker.times._replace(started_ns=perf_counter_ns())
        # Coroutines share their thread, so a task's CPU time is that of the loop since the last
        # task ended: right in sum and on average, not for a single task.
        try:
            if self._is_stopped or self.outlet.closed:
                raise ChannelClosed
            result = await self._call(worker, item)
        except (Exception, asyncio.CancelledError) as error:
            took_ns = self._end_turn(worker)
            if self._is_stopped or self.ends_worker(error):
                raise
            cell.add_failure(took_ns, loop.cpu_ns())
            self._count_failure(as_exception(error), worker.taken, item)
            return None, Outcome.FAILED
        cell.add(self._end_turn(worker), loop.cpu_ns())
        if result is None and self.spec.kind is OpKind.ASYNC_FUNCTION:
            cell.num_dropped += 1
            return None, Outcome.DROPPED
        return result, Outcome.PASSED

    @staticmethod
    def _end_turn(worker: Worker) -> int:
        """Note that the call has ended; return how long it took."""
        ended_ns = perf_counter_ns()
        worker.times = worker.times._replace(ended_ns=ended_ns)
        return ended_ns - worker.times.started_ns

    async def _call(self, worker: Worker, item: Any) -> Any:
        async with AsyncExitStack() as stack:
            for hook in self.hooks.of_tasks:
                context = hook.task_hook(item)
                if isinstance(context, AbstractContextManager):
                    stack.enter_context(context)
                else:
                    await stack.enter_async_context(context)
            if self.spec.kind is OpKind.ASYNC_FUNCTION:
                return await self.spec.op(item)
            async with aclosing(self.spec.op(item)) as outputs:
                async for output in outputs:
                    if output is None:
                        worker.cell.num_dropped += 1
                        continue
                    number, again = worker.taken, asyncio.get_running_loop().create_future()
                    self._outputs.put(Output(number, False, worker, output, Outcome.PASSED, again))
                    output = None  # else it would stay alive while the generator waits
                    if not await again:  # nobody takes any more: no error of the op's
                        return None
            return None
        raise RuntimeError("a task hook must not swallow the exception of the op.")

    # The emitter:

    def _pass_on(self) -> None:
        """Pass on outputs until every coroutine that was begun has ended, also where the stage has
        broken or the run stops: its hooks are left before those of the stage."""
        error: BaseException | None = None
        num_begun, num_ended = -1, 0
        while num_begun != num_ended:
            output = self._outputs.get()
            if isinstance(output, int):
                num_begun = output
                continue
            num_ended += output.is_end
            try:
                if error is None and output.outcome is None:
                    raise output.result
                if error is None:
                    heapq.heappush(self._held, output)
                    self._pass_on_held()
                elif output.again is not None:
                    self._run.loop.call(_resume, output.again, False)
            except BaseException as raised:
                error = raised
                self.inlet.close()
                self._free.close()
                self._run.loop.call(self._cancel)
            del output  # else its result would stay alive while this thread waits
        if error is not None:
            raise error

    def _pass_on_held(self) -> None:
        while self._held and self._passing.is_turn(self._held[0].number):
            number, is_end, worker, result, outcome, again = heapq.heappop(self._held)
            place = -1
            if type(result) is Mark:
                self._passing.end_epoch(number)
                self._free.put(worker)
                continue
            if result is None:
                self._passing.skip(number)
            else:
                place = self._passing.emit(number, result, last=is_end)
            if again is not None:
                self._run.loop.call(_resume, again, True)
                continue
            self._record(worker, place, outcome)
            self._free.put(worker)

    def _record(self, worker: Worker, output: int, outcome: Outcome | None) -> None:
        """Record a worker's turn, which has ended: now it waits for an item."""
        _, _, since_ns, started_ns, ended_ns = worker.times
        done_ns = perf_counter_ns()
        worker.times = Times(*worker.times.waits_ns(done_ns), done_ns)
        if done_ns - since_ns >= worker.ring.shortest_ns:
            times, kind = (since_ns, started_ns, ended_ns, done_ns, -1), outcome or Outcome.PASSED
            worker.ring.add(times, worker.taken, output, self.inlet, self.outlet, kind)


def _resume(again: asyncio.Future[bool], goes_on: bool) -> None:
    if not again.done():  # else it was cancelled meanwhile
        again.set_result(goes_on)
