"""One running stage: workers that take an item, call the op and pass the result on.

Three things differ, each in one place: what a worker takes (``_take``: more than an item where one
is made of several, :mod:`.grouping`), what a call is (``_call_of``: on the thread, on the user's
executor, a generator that passes its own outputs on), and how a result is passed on
(:mod:`.passing`). A stage of coroutines has the same parts, and two threads in their place:
:mod:`.async_stage`.
"""

from __future__ import annotations

import functools
import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError
from contextlib import closing
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from ..locks import RLock
from .channel import EPOCH_END, ChannelClosed, EndOfChannel, Mark
from .counters import LONG_NS, TaskCell, TaskCounters, ThreadCount
from .failures import FailureBudget, as_exception, attach_note, describe, renew_note
from .loop import LazyRunner
from .ops import (
    EXHAUSTED,
    ExecutorCalls,
    Measured,
    OpKind,
    fork_processes,
    measure,
    measure_list,
    next_of,
    unmeasured,
)
from .passing import AsDone, EpochByEpoch, InOrder
from .stage_hooks import StageHooks
from .statistics import StageStats
from .timeline import Outcome

if TYPE_CHECKING:
    import asyncio

    from .channel import Channel
    from .hooks import TaskHook
    from .rings import Ring
    from .run import Run
    from .stage_hooks import StatsQueue
    from .threads import Target

_logger = logging.getLogger("spdl_torch.pipeline")

_PASSED, _DROPPED, _FAILED = map(int, (Outcome.PASSED, Outcome.DROPPED, Outcome.FAILED))


class Worker:
    """What belongs to one thread of a stage, or to one coroutine."""

    def __init__(self, number: int, ring: Ring, cell: TaskCell) -> None:
        self.number = number
        self.ring = ring
        self.cell = cell
        self.taken = -1
        """The number of the item in its hands."""
        self.is_leaving = False
        """Whether its thread ends because there are too many: another one may have it."""
        # Of a generator: how long it waited while outputs were passed on; the number of the last.
        self.waited_ns, self.output = 0, -1
        # Of a coroutine.
        self.task: asyncio.Task[Any] | None = None
        """The one under way."""
        self.times = Times()


class Times(NamedTuple):
    """What a coroutine has waited, and its turn. One object: no reader sees half of a change."""

    in_ns: int = 0
    """The waits for items in the turns that have ended."""
    out_ns: int = 0
    """Those for room."""
    since_ns: int = 0
    """The end of the turn before."""
    started_ns: int = 0
    """0 = not yet, as below."""
    ended_ns: int = 0

    def waits_ns(self, now_ns: int) -> tuple[int, int]:
        """Return both waits, open ones included."""
        in_ns = self.in_ns + (self.started_ns or now_ns) - self.since_ns
        return in_ns, self.out_ns + (now_ns - self.ended_ns if self.ended_ns else 0)


class Stage:
    """A running :class:`StageSpec`; the run starts its threads and joins them.

    Stop: closing the channels ends every wait; an op that is running finishes first, and a call
    that an executor has not begun is withdrawn.
    """

    def __init__(self, run: Run, number: int, hooks: list[TaskHook]) -> None:
        """``number``: of the stage; 0 is the source."""
        self.spec = spec = run.spec.pipes[number - 1]
        self.inlet, self.outlet = inlet, outlet = run.queues[number - 1 : number + 1]
        self.hooks = StageHooks(hooks, run.loop)
        limit = run.options.max_failures if spec.max_failures is None else spec.max_failures
        self.budget = FailureBudget(spec.name, limit)
        self.cut_short = False  # set by any thread, read by the last one to leave
        self._run = run
        self._number = number
        self._op = spec.op
        self._calls = ExecutorCalls(lambda: outlet.closed)
        # One thread keeps the order by itself, as long as it stays the only one.
        is_tuned = run.options.tuner is not None and spec.is_adjustable
        has_peers = spec.concurrency > 1 or is_tuned
        kind = AsDone
        if has_peers and spec.output_order == "input":
            kind = InOrder
        elif has_peers and run.spec.src.continuous:
            kind = EpochByEpoch
        self._passing = kind(inlet, outlet)
        self.concurrency = spec.concurrency
        """How many workers are to work: those with a number below it. Others leave."""
        self.thread_count = ThreadCount(spec.concurrency)
        # Guards the workers, and their number: they leave while the run adds some. Never held in a
        # wait.
        self._lock = RLock()
        self._num_present = 0
        self._workers: list[Worker] = []

    # Called by the run:

    def claim(self) -> None:
        """Have for this run what only one run at a time may use. Raises: RuntimeError: another one
        has it."""

    def enter(self, *queues: StatsQueue) -> None:
        """Enter the hooks of its queues and of the stage, before any thread of it starts."""
        fork_processes(self.spec.executor)
        self.hooks.enter(queues)

    def targets(self) -> list[Target]:
        """Return name and target of each thread that the stage begins with."""
        self.thread_count, self._num_present = ThreadCount(self.concurrency), self.concurrency
        return [self._target(self._new_worker(number)) for number in range(self.concurrency)]

    def resize(self, count: int, spawn: Callable[..., object]) -> None:
        """Work on ``count`` threads from now on; ``spawn`` starts those that are missing. A surplus
        one leaves when it has passed its item on.

        Raises: RuntimeError: the system has no more threads; the others go on.
        """
        self.concurrency = count
        for number in range(count):
            with self._lock:
                if self.cut_short or not self._num_present:  # the last one ends the stage
                    return
                if number < len(self._workers) and not self._workers[number].is_leaving:
                    continue
                worker = self._new_worker(number)
                self._num_present += 1
                self.thread_count.change(self.thread_count.count + 1)
            try:
                spawn(*self._target(worker))
            except RuntimeError:
                self._dismiss(worker)
                self._leave()
                raise

    def request_stop(self) -> None:
        """Cancel calls that no executor has begun; the run closes the channels. Never blocks."""
        self._calls.cancel()

    @property
    def num_tasks(self) -> int:
        """The number of tasks that ended, failures included."""
        # One cell for each thread, which alone writes it. Whoever adds them up needs no lock: sums
        # may lack what is being counted, and are exact once the threads ended.
        return sum(worker.cell.num_tasks for worker in self._workers)

    @property
    def num_dropped(self) -> int:
        """The number of tasks whose op returned None."""
        return sum(worker.cell.num_dropped for worker in self._workers)

    def stats(self) -> StageStats:
        """Return the statistics since the start, open waits included."""
        recorders = self.hooks.recorders
        tasks = recorders[0].counters() if recorders else TaskCounters()
        in_ns, out_ns = self._waits_ns()
        return StageStats.of(
            self.spec.name,
            self.concurrency,
            tasks,
            self.outlet.counters(),
            num_dropped=self.num_dropped,
            thread_ns=max(1, self.thread_count.thread_ns(tasks.elapsed_ns)),
            wait_in_ns=in_ns,
            wait_out_ns=out_ns,
        )

    def _waits_ns(self) -> tuple[int, int]:
        """Return how long the workers waited for items, and for room, open waits included."""
        return self.inlet.counters().get_wait[0], self.outlet.counters().put_wait[0]

    # The life of a worker:

    def _target(self, worker: Worker) -> Target:
        target = functools.partial(self._live, self._work, worker)
        return f"{self.spec.name}-{worker.number}", target

    def _new_worker(self, number: int) -> Worker:
        if number < len(self._workers):  # of one that leaves, which uses nothing of it any more
            self._workers[number].is_leaving = False
            return self._workers[number]
        cell = TaskCell()
        self.hooks.share(cell)
        ring = self._run.recorder.new_ring(self.spec.name, self._number, number)
        self._workers.append(Worker(number, ring, cell))
        return self._workers[-1]

    def _live(self, work: Callable[..., None], *args: Any) -> None:
        """Do one thread's part of the stage's work; the last one to leave ends the stage."""
        try:
            work(*args)
        except (ChannelClosed, CancelledError):
            self.cut_short = True
        except BaseException as error:
            self.fail(error)
        finally:
            self._leave()

    def fail(self, error: BaseException) -> None:
        """End the run, because the stage itself broke: a dead executor, a hook, SystemExit."""
        self.cut_short = True
        error = as_exception(error)
        attach_note(error, f"in stage {self.spec.name!r} ({threading.current_thread().name})")
        self._run.fail(f"stage {self.spec.name!r} broke", [error])

    def _leave(self) -> None:
        """Count one that ends; the last one ends the stage."""
        with self._lock:
            self._num_present -= 1
            is_last = not self._num_present
        if not is_last:
            return
        self.thread_count.watch.stop()
        try:
            if self.budget.overdrawn_at_end(self.num_tasks):
                self._overdraw()
            self.hooks.leave()
        except Exception as error:
            self.fail(error)
        finally:
            if self.cut_short:  # nobody takes any more: no thread before it may wait for room
                self.inlet.close()
            self.outlet.finish()
            self._run.loop.leave()

    def _overdraw(self) -> None:
        self._run.fail(self.budget.message(self.num_tasks), self.budget.errors)

    def _work(self, worker: Worker) -> None:
        """Take items, call the op, pass results on, until the data ends."""
        with closing(LazyRunner()) as runner:
            self._work_on_items(worker, self._call_of(worker, runner))

    def _work_on_items(self, worker: Worker, call: Callable[[Any], Measured] | None) -> None:
        inlet, outlet, ring, cell = self.inlet, self.outlet, worker.ring, worker.cell
        take, put, op, clock = self._take(worker), outlet.put, self._op, cell.clock
        emit, skip, is_plain = self._passing.emit, self._passing.skip, type(self._passing) is AsDone
        is_function = self.spec.kind is OpKind.FUNCTION
        since_ns = ring.begin()
        while True:
            try:
                number, item = take()
            except (EndOfChannel, StopIteration):
                return
            output, outcome, cpu_ns, started_ns = -1, _PASSED, -1, perf_counter_ns()
            if call is None and (clock.num_unclocked < 1 or started_ns >= clock.due_ns):
                started_ns = clock.read()
            try:
                if call is None:  # most ops: the turn's clock is that of the op
                    result = op(item)
                    ended_ns = perf_counter_ns()
                    wall_ns = ended_ns - started_ns
                    if wall_ns < LONG_NS and clock.num_unclocked:
                        clock.num_unclocked -= 1
                    else:
                        cpu_ns = clock.cpu_of(started_ns, ended_ns)
                else:
                    worker.taken, worker.waited_ns = number, 0  # a hook may raise before the op
                    result, wall_ns, cpu_ns = call(item)
                    # The work of a generator and its waits for room alternate; the turn shows all
                    # of the work first.
                    ended_ns = perf_counter_ns() - worker.waited_ns
            except BaseException as error:
                if not isinstance(error, Exception) or self.ends_worker(error):
                    skip(number)  # later items in the order must not wait for it
                    raise
                ended_ns, outcome = perf_counter_ns() - worker.waited_ns, _FAILED
                cell.add_failure(ended_ns - started_ns, cpu_ns)
                self._count_failure(error, number, item)
                skip(number)
            else:
                cell.add(wall_ns, cpu_ns)
                if result is None:
                    if is_function:
                        outcome = _DROPPED
                        cell.num_dropped += 1
                    output = worker.output
                    skip(number)
                    if outlet.closed:  # a generator went on to its next output for nothing
                        raise ChannelClosed
                else:
                    output = put(result) if is_plain else emit(number, result)
            item = result = None  # else they would stay alive while this thread waits
            done_ns = perf_counter_ns()
            if done_ns - since_ns >= ring.shortest_ns:
                times = since_ns, started_ns, ended_ns, done_ns, cpu_ns
                ring.add(times, number, output, inlet, outlet, outcome)
            since_ns = done_ns

    def _count_failure(self, error: Exception, number: int, item: Any) -> None:
        """Note a failing item on the user's exception and charge the budget."""
        # Other threads may be at work on items before it.
        num_before = number - bisect_left(self.inlet.mark_numbers, number)
        what = f"item {number}: {describe(item)}"
        self._charge(error, number, what, max(self.num_tasks, num_before + 1))

    def _charge(self, error: Exception, number: int, what: str, num_tasks: int) -> None:
        where = f"in stage {self.spec.name!r}"
        renew_note(error, where, f"{where} ({threading.current_thread().name}), {what}")
        self._run.recorder.failed(self.spec.name, number, error)
        if self.budget.spend(error, num_tasks):
            self._overdraw()

    def ends_worker(self, error: BaseException) -> bool:
        """Return whether the item is not to blame for ``error``: the run stops, or a dead executor
        would fail every item."""
        if isinstance(error, ChannelClosed | CancelledError):
            return self.outlet.closed  # else the op raised it, e.g. for a future of its own
        broke = self.spec.executor is not None and isinstance(error, BrokenExecutor)
        return broke or self._calls.are_refused

    # What a worker takes:

    def _take(self, worker: Worker) -> Callable[[], tuple[int, Any]]:
        """Return the call that takes an item, with its number. Raises: EndOfChannel, StopIteration:
        the worker ends."""
        if self._run.spec.src.continuous or self._run.options.tuner is not None:
            return self._items(worker).__next__
        return self.inlet.get_numbered

    def _items(self, worker: Worker, *, with_ends: bool = False) -> Iterator[tuple[int, Any]]:
        """Yield items while the worker is wanted, and pass the ends of epochs on. ``with_ends``:
        yield a mark at these, and at the end of the data."""
        get, number = self.inlet.get_numbered, 0
        while True:
            if worker.number >= self.concurrency and self._may_leave(worker):
                return
            try:
                number, item = get()
            except EndOfChannel:
                if with_ends:
                    yield number, EPOCH_END
                return
            is_end = type(item) is Mark
            if with_ends or not is_end:
                yield number, item
            if is_end:
                self._passing.end_epoch(number)
            item = None  # else it would stay alive while this thread waits

    def _may_leave(self, worker: Worker) -> bool:
        """Return whether there are too many workers still. This one is then on its way out."""
        with self._lock:
            if worker.number >= self.concurrency:
                self._dismiss(worker)
            return worker.is_leaving

    def _dismiss(self, worker: Worker) -> None:
        with self._lock:
            worker.is_leaving = True
            self.thread_count.change(self.thread_count.count - 1)

    # What a call is:

    def _call_of(self, worker: Worker, runner: LazyRunner) -> Callable[[Any], Measured] | None:
        """Return the op as a call inside of the task hooks that returns its times too, measured
        where the op runs; None: the op is called as it is, and nothing around it."""
        executor, expands = self.spec.executor, self.spec.kind is OpKind.GENERATOR
        measured: Callable[..., Measured] = measure if self._run.recorder.enabled else unmeasured
        if executor is None and self._run.task_limit is not None:
            measured = functools.partial(_limited, self._run.task_limit, measured)
        is_plain = executor is None and not expands and measured is measure
        if is_plain and not self.hooks.of_tasks:
            return None
        kind = measure_list if executor is not None and expands else measured
        call = functools.partial(kind, self._op)
        if executor is not None:
            call = functools.partial(self._calls.make, executor, call)
        if expands:
            step = functools.partial(measured, next_of)
            call = functools.partial(self._expand, worker, call, step)
        return self.hooks.around(call, runner)

    def _expand(
        self,
        worker: Worker,
        call: Callable[[Any], Measured],
        step: Callable[[Any], Measured],
        item: Any,
    ) -> Measured:
        """Call a generator and pass its outputs on, each as soon as it comes. The times are those
        inside of it.

        Task hooks are around all of this. That the outlet has closed is no error of the op's, so
        they do not see it.
        """
        worker.output, wall_ns, began_ns = -1, 0, perf_counter_ns()
        try:
            outputs, wall_ns, cpu_ns = call(item)
            if self.spec.executor is not None:  # it ran to its end there
                outputs = iter(outputs)
            while True:
                output, step_ns, step_cpu_ns = step(outputs)
                wall_ns += step_ns
                cpu_ns += step_cpu_ns
                if output is EXHAUSTED:
                    break
                try:
                    if output is None:
                        worker.cell.num_dropped += 1
                    else:
                        worker.output = self._passing.emit(worker.taken, output, last=False)
                except ChannelClosed:
                    break
                output = None  # else it would stay alive while the generator waits
            return None, wall_ns, cpu_ns
        finally:
            worker.waited_ns = perf_counter_ns() - began_ns - wall_ns


def _limited(
    task_limit: Channel[None],
    measured: Callable[..., Measured],
    op: Callable[[Any], Any],
    item: Any,
) -> Measured:
    """Make a call under the limit on tasks of all stages."""
    task_limit.get()
    try:
        return measured(op, item)
    finally:
        task_limit.put(None)
