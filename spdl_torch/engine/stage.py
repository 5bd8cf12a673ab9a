"""One running stage: workers that take an item, call the op and pass the result on.

The kind of the op decides three things, each in one place: what a worker takes (``_take``: an item,
a list for an aggregate), what a call is (``_call_of``: on the thread, on the user's executor, a
generator that passes its own outputs on), and what its result becomes (``_emit``). A stage of
coroutines has the same parts, and two threads in their place: :mod:`.async_stage`.

A stage numbers items in the order in which it takes them. An ordered stage puts each result with
its number, and the outlet restores the order: that costs neither a thread nor a second buffer.
"""

from __future__ import annotations

import functools
import logging
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError
from contextlib import closing
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from ..locks import RLock
from .channel import EPOCH_END, ChannelClosed, EndOfChannel, Mark
from .counters import LONG_NS, TaskCell, ThreadCount
from .failures import FailureBudget, as_exception, attach_note, describe, renew_note
from .hooks import TaskStatsHook
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
from .shared import LiveObjects
from .stage_hooks import StageHooks
from .statistics import StageStats
from .timeline import Outcome

if TYPE_CHECKING:
    from .definition import Aggregator
    from .hooks import StageInfo, TaskHook
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
        """Whether it ends because there are too many: another one may have its number."""
        # Of a generator: the time inside it, and the number of its last output.
        self.wall_ns = self.cpu_ns = 0
        self.output = -1
        # Of a coroutine.
        self.task: Any = None
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

    def __init__(self, run: Run, number: int, info: StageInfo, hooks: list[TaskHook]) -> None:
        """``number``: of the stage; 0 is the source."""
        self.spec = spec = run.spec.pipes[number - 1]
        self.info = info
        self.inlet, self.outlet = inlet, outlet = run.queues[number - 1 : number + 1]
        self.hooks = StageHooks(hooks, run.loop)
        limit = run.options.max_failures if spec.max_failures is None else spec.max_failures
        self.budget = FailureBudget(spec.name, limit)
        self.cut_short = False  # set by any thread, read by the last one to leave
        self._run = run
        self._number = number
        self._op = self._accumulate if spec.kind is OpKind.AGGREGATOR else spec.op
        self._measure = measure if run.recorder.enabled else unmeasured
        self._task_limit = run.task_limit if spec.executor is None else None
        self._calls = ExecutorCalls(lambda: outlet.closed)
        # One thread keeps the order by itself, as long as it stays the only one.
        is_adjustable = run.is_adjustable and spec.is_adjustable
        has_peers = spec.concurrency > 1 or is_adjustable
        self.ordered = spec.output_order == "input" and has_peers
        self._epochs: EpochEnds | None = None
        if run.spec.src.continuous and has_peers and not self.ordered:
            self._epochs = EpochEnds(inlet, outlet)
        self.concurrency = spec.concurrency
        """How many workers are to work: those with a number below it. Others leave."""
        self.thread_count = ThreadCount(spec.concurrency)
        # Guards the workers, and their number: they leave while the run adds some. Never held in a
        # wait.
        self._lock = RLock()
        self._num_present = 0
        self._workers: list[Worker] = []  # the last one of each number

    # Called by the run:

    def claim(self) -> None:
        """Have a user's aggregator for this run, once those that stop have left it. Raises:
        RuntimeError: another one uses it."""
        if self.spec.kind is not OpKind.AGGREGATOR:
            return
        mine = self._aggregator
        runs = {stage._run for stage in _aggregating.now() if stage._aggregator is mine}
        if [run for run in runs - {self._run} if run.goes_on()]:
            raise RuntimeError(
                f"stage {self.spec.name!r}: its {type(mine).__name__} is in use by another run, "
                "whose items it holds. Let that one end first, or define each pipeline with an "
                "aggregator of its own."
            )
        _aggregating.add(self)

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
        recorder = next(iter(self.hooks.recorders), None) or TaskStatsHook(self.info)
        tasks = recorder.counters()
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
        if number < len(self._workers):  # in the place of one that leaves
            before = self._workers[number]
            worker = self._workers[number] = Worker(number, before.ring, before.cell)
            return worker
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
        self.thread_count.end()
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
            self._run.part_has_ended()

    def _overdraw(self) -> None:
        self._run.fail(self.budget.message(self.num_tasks), self.budget.errors)

    def _work(self, worker: Worker) -> None:
        """Take items, call the op, pass results on, until the data ends."""
        with closing(LazyRunner()) as runner:
            try:
                self._work_on_items(worker, self._call_of(worker, runner))
            except BaseException:
                self._empty_aggregator()
                raise

    def _work_on_items(self, worker: Worker, call: Callable[[Any], Measured] | None) -> None:
        inlet, outlet, ring, cell = self.inlet, self.outlet, worker.ring, worker.cell
        take, put, op, clock = self._take(worker), outlet.put, self._op, cell.clock
        is_plain = not self.ordered and self._epochs is None
        expands = self.spec.kind is OpKind.GENERATOR
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
                    worker.taken = number
                    result, wall_ns, cpu_ns = call(item)
                    # The work of a generator and its waits for room alternate; the turn shows all
                    # of the work first.
                    ended_ns = started_ns + wall_ns if expands else perf_counter_ns()
            except BaseException as error:
                if not isinstance(error, Exception) or self.ends_worker(error):
                    self._emit_nothing(number)  # later items in the order must not wait for it
                    raise
                ended_ns, outcome = perf_counter_ns(), _FAILED
                if expands:
                    ended_ns, cpu_ns = started_ns + worker.wall_ns, worker.cpu_ns
                cell.add_failure(ended_ns - started_ns, cpu_ns)
                self._count_failure(error, number, item)
                self._emit_nothing(number)
            else:
                cell.add(wall_ns, cpu_ns)
                if result is None:
                    if expands:
                        output = worker.output
                    elif self.spec.kind is OpKind.FUNCTION:
                        outcome = _DROPPED
                        cell.num_dropped += 1
                    self._emit_nothing(number)
                elif is_plain:
                    output = put(result)
                else:
                    output = self._emit(number, result)
            if expands and outlet.closed:
                raise ChannelClosed
            item = result = None  # else they would stay alive while this thread waits
            done_ns = perf_counter_ns()
            if done_ns - since_ns >= ring.shortest_ns:
                times = since_ns, started_ns, ended_ns, done_ns, cpu_ns
                ring.add(times, number, output, inlet, outlet, outcome)
            since_ns = done_ns

    def _count_failure(self, error: Exception, number: int, item: Any) -> None:
        """Note a failing item on the user's exception and charge the budget."""
        if self.spec.kind is OpKind.AGGREGATE:
            number = self.num_tasks - 1  # of the list
        what = f"item {number}: {describe(item)}"
        if type(item) is Mark:  # the end, for an aggregator
            what = "in flush()"
        where = f"in stage {self.spec.name!r}"
        renew_note(error, where, f"{where} ({threading.current_thread().name}), {what}")
        self._run.recorder.failed(self.spec.name, number, error)
        num_tasks = self.num_tasks
        if not self.spec.is_grouping:  # those before it, which other threads may be at work on
            num_marks = bisect_left(self.inlet.mark_numbers, number)
            num_tasks = max(num_tasks, number + 1 - num_marks)
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
        if self.spec.kind is OpKind.AGGREGATE:
            return self._lists(worker).__next__
        if self.spec.kind is OpKind.AGGREGATOR:
            return self._items(worker, with_ends=True).__next__
        if self._run.spec.src.continuous or self._run.is_adjustable:
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
                self._pass_mark(number)
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

    def _lists(self, worker: Worker) -> Iterator[tuple[int, list[Any]]]:
        """Yield lists of ``batch_size`` items; a shorter one at the end of an epoch."""
        size = self.spec.batch_size
        group: list[Any] = []
        for number, item in self._items(worker, with_ends=True):
            is_end = type(item) is Mark
            if not is_end:
                group.append(item)
            elif self.spec.drop_last:
                worker.cell.num_dropped += len(group)
                group = []
            item = None  # else it would stay alive while this thread waits
            if group and (is_end or len(group) == size):
                yield number, group
                group = []

    def _pass_mark(self, number: int) -> None:
        """Pass the end of an epoch on, behind all of its items."""
        if self._epochs is None:
            self._emit(number, EPOCH_END)
        else:
            self._epochs.settle(number)

    # What a call is:

    def _call_of(self, worker: Worker, runner: LazyRunner) -> Callable[[Any], Measured] | None:
        """Return the op as a call inside of the task hooks that returns its times too, measured
        where the op runs; None: the op is called as it is, and nothing around it."""
        op, executor, expands = self._op, self.spec.executor, self.spec.kind is OpKind.GENERATOR
        is_plain = executor is None and not expands and self._measure is measure
        if is_plain and self._task_limit is None and not self.hooks.of_tasks:
            return None
        kind = measure_list if executor is not None and expands else self._measure
        call: Callable[[Any], Measured] = functools.partial(kind, op)
        if executor is not None:
            call = functools.partial(self._calls.make, executor, call)
        call = self._limited(call)
        if expands:
            step = self._limited(functools.partial(self._measure, next_of))
            call = functools.partial(self._expand, worker, call, step)
        return self.hooks.around(call, runner)

    @property
    def _aggregator(self) -> Aggregator:
        """The object whose method is the op."""
        aggregator: Aggregator = self.spec.op.__self__  # type: ignore[attr-defined]
        return aggregator

    def _accumulate(self, item: Any) -> Any:
        """Have a user's aggregator take an item; a mark means that it is flushed."""
        if type(item) is not Mark:
            return self._aggregator.accumulate(item)
        rest = self._aggregator.flush()
        return None if self.spec.drop_last else rest

    def _empty_aggregator(self) -> None:
        """Drop what a user's aggregator holds, where the loop was left or the run has failed. The
        object outlives this run: the next one would pass on what this one left in it."""
        if self.spec.kind is not OpKind.AGGREGATOR:
            return
        try:
            self._aggregator.flush()
        except Exception:  # the run has ended, whatever the user's method raises now
            _logger.exception(
                "Pipeline: an aggregator could not be emptied after a run that was left"
            )

    def _limited(self, call: Callable[[Any], Measured]) -> Callable[[Any], Measured]:
        """Return ``call`` under the limit on tasks of all stages, if there is one."""
        task_limit = self._task_limit
        if task_limit is None:
            return call

        def call_limited(item: Any) -> Measured:
            task_limit.get()
            try:
                return call(item)
            finally:
                task_limit.put(None)

        return call_limited

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
        worker.output, worker.wall_ns, worker.cpu_ns = -1, 0, 0
        outputs, worker.wall_ns, worker.cpu_ns = call(item)
        if self.spec.executor is not None:  # it ran to its end there
            outputs = iter(outputs)
        while True:
            output, wall_ns, cpu_ns = step(outputs)
            worker.wall_ns += wall_ns
            worker.cpu_ns += cpu_ns
            if output is EXHAUSTED:
                break
            try:
                if output is None:
                    worker.cell.num_dropped += 1
                else:
                    worker.output = self._emit(worker.taken, output, last=False)
            except ChannelClosed:
                break
            output = None  # else it would stay alive while the generator waits
        return None, worker.wall_ns, worker.cpu_ns

    # What a result becomes:

    def _emit(self, number: int, result: Any, *, last: bool = True) -> int:
        """Pass a result of that item on; return its number in the outlet, -1 = unknown."""
        if self.ordered:
            return self.outlet.put_at(number, result, last=last)
        if self._epochs is None:
            return self.outlet.put(result)
        output = self.outlet.put_at(self._epochs.epoch_of(number), result, last=False)
        if last:
            self._epochs.settle(number)
        return output

    def _emit_nothing(self, number: int) -> None:
        """Note that the item of that number has no result, or no further one."""
        if self.ordered:
            self.outlet.skip(number)
        elif self._epochs is not None:
            self._epochs.settle(number)


_aggregating: LiveObjects[Stage] = LiveObjects()
"""The stages that have users' aggregators, once their runs have begun."""


class EpochEnds:
    """Keeps epochs apart where several threads pass items on as they finish.

    The place of an item in the outlet is the number of its epoch, and what comes too early for that
    waits there. Whoever settles the last item of an epoch (passed on, dropped or failed; the mark
    is one of them) ends it by putting the mark. So nobody else waits for an item that is late.
    """

    def __init__(self, inlet: StatsQueue, outlet: StatsQueue) -> None:
        # The inlet knows the number of a mark before anybody takes a later item.
        self._marks = inlet.mark_numbers
        self._outlet = outlet
        self._lock = RLock()  # never held in a wait
        self._num_settled: Counter[int] = Counter()  # of the epochs that have not ended

    def epoch_of(self, number: int) -> int:
        """Return the epoch of an item, or of the mark at its end."""
        return bisect_left(self._marks, number)

    def settle(self, number: int) -> None:
        """Note that an item has no further result, or that the mark was taken."""
        marks, epoch = self._marks, self.epoch_of(number)
        with self._lock:
            self._num_settled[epoch] += 1
            if epoch == len(marks):  # the mark has not come
                return
            begin = marks[epoch - 1] + 1 if epoch else 0
            if self._num_settled[epoch] <= marks[epoch] - begin:
                return
            del self._num_settled[epoch]
        self._outlet.put_at(epoch, EPOCH_END)
