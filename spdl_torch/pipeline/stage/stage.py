"""One running stage: threads that take an item, call the op and pass the result on.

:class:`Stage` is the one for plain functions; :mod:`.generator_stage`, :mod:`.aggregate_stage` and
:mod:`.async_stage` have those for generators, aggregates and asynchronous ops.

A stage numbers items in the order in which it takes them. An ordered stage puts each result with
its number, and the outlet restores the order: that costs neither a thread nor a second buffer.
"""

from __future__ import annotations

import functools
import threading
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from contextlib import ExitStack
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, TypeVar

from ..channel.sentinels import ABSENT, EPOCH_END, Sentinel
from ..channel.waits import ChannelClosed, Dismissed, EndOfChannel
from ..definition.ops import OpKind
from ..failures import FailureBudget, add_note, attach_note
from ..hooks.checks import BadHookError, bad_hook, checked_hooks, enter_queue_hook, enter_stage_hook
from ..hooks.context_managers import LazyRunner, NotAContextError
from ..hooks.task_hooks import TaskCell, TaskHook, TaskStatsHook
from ..recorder.moments import Outcome
from .epoch_barrier import Turnstile
from .forked_executor import fork_processes
from .op_timing import Measured, measure, measure_list, metered, unmeasured
from .stage_threads import Slot, StageThreads

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..channel.channel import Channel
    from ..definition.specs import StageSpec
    from ..hooks.stage_info import StageInfo
    from ..hooks.stats_queue import StatsQueue
    from ..recorder.flight_recorder import FlightRecorder
    from ..recorder.rings import Ring

_PASSED, _DROPPED, _FAILED = map(int, (Outcome.PASSED, Outcome.DROPPED, Outcome.FAILED))

R = TypeVar("R")


class StageOwner(Protocol):
    """The run that owns a stage, as the stage needs it."""

    def fail(self, message: str, errors: list[Exception]) -> None:
        """Take no new items; raise once the good ones are delivered. Never blocks."""


class Stage:
    """A running :class:`StageSpec`; the run starts its threads and joins them.

    Stop: closing the channels ends every wait; an op that is running finishes first, and a call
    that an executor has not begun is withdrawn.
    """

    def __init__(
        self,
        spec: StageSpec,
        info: StageInfo,
        *,
        inlet: StatsQueue,
        outlet: StatsQueue,
        hooks: list[TaskHook],
        task_limit: Channel[None] | None,
        budget: FailureBudget,
        owner: StageOwner,
        recorder: FlightRecorder,
        stage_number: int,
        adjustable: bool = False,
        has_sentinels: bool = False,
        keeps_places: bool = False,
    ) -> None:
        self.spec = spec
        self.info = info
        self.inlet = inlet
        self.outlet = outlet
        self.hooks = hooks = checked_hooks(hooks, spec.name)
        # One thread keeps the order by itself, as long as it stays the only one.
        self.ordered = spec.output_order == "input" and (spec.concurrency > 1 or adjustable)
        # Hooks without code of the user's are not entered: where task_hook is not overridden,
        # workers write into the recorder's cells directly.
        self._recorders = [h for h in hooks if _is_plain_recorder(h)]
        self.task_hooks = [h for h in hooks if not _is_plain_recorder(h)]
        # One for each thread, which alone writes it; the list only grows. Whoever adds them up
        # needs no lock: sums may lack what is being counted, and are exact once the threads ended.
        self._cells: list[TaskCell] = []
        self._recorder = recorder
        new_ring = functools.partial(recorder.new_ring, spec.name, stage_number)
        self.threads = StageThreads(spec.concurrency, new_ring)
        if self.ordered:
            recorder.restores_order(stage_number, outlet.progress)
        self.measure = measure if recorder.enabled else unmeasured
        self._task_limit = task_limit if spec.executor is None else None
        self._budget = budget
        self._owner = owner
        self.cut_short = False  # set by any thread, read by the last one to leave
        self._stage_hooks = ExitStack()
        self._executor_refuses = False
        # Workers add and discard; request_stop(), on any thread, cancels those in a copy of it.
        self._submitted: set[Future[Measured]] = set()
        self._keeps_places = keeps_places  # a dropped item leaves ABSENT in its place
        self.has_sentinels = has_sentinels
        # A sentinel overtakes no item where one thread works, or the outlet restores the order.
        self.needs_turns = (
            has_sentinels and not self.ordered and (spec.concurrency > 1 or adjustable)
        )
        self.turns = self._make_turns() if self.needs_turns else None
        self.take: Callable[[], tuple[int, Any]] = inlet.get_numbered
        if has_sentinels:
            self.take = self._take_past_sentinels if self.turns is None else self.turns.take

    def _make_turns(self) -> Turnstile:
        return Turnstile(self.inlet.get_numbered, self.pass_sentinel)

    def thread_targets(self) -> list[tuple[str, Callable[[], None]]]:
        """Return name and target of each thread that the stage begins with."""
        return self._targets_of(self.threads.slots())

    def resize(self, count: int) -> list[tuple[str, Callable[[], None]]]:
        """Work on ``count`` threads from now on; return name and target of those to be started.

        Surplus threads leave before they take another item. Never blocks.
        """
        more = count - self.threads.thread_count.count
        # Called with the run's lock held, so one resize at a time; a worker may end meanwhile.
        self.threads.thread_count.change(count)
        if more < 0:
            self.inlet.dismiss(-more)
            return []
        # Threads that were dismissed, but have not left yet, stay; only the rest is new.
        return self._targets_of(self.threads.add(more - self.inlet.recall(more)))

    def _targets_of(self, slots: list[Slot]) -> list[tuple[str, Callable[[], None]]]:
        return [
            (f"{self.spec.name}-{slot.number}", functools.partial(self._run_worker, slot))
            for slot in slots
        ]

    def enter(self) -> None:
        """Enter the hooks of the queue and of the stage, before any thread of the stage starts."""
        fork_processes(self.spec.executor)
        enter_queue_hook(self._stage_hooks, self.outlet)
        for hook in self.hooks:
            if isinstance(hook, TaskStatsHook):
                hook.start()
            enter_stage_hook(self._stage_hooks, hook, self.spec.name)

    def request_stop(self) -> None:
        """Cancel calls that no executor has begun; the run closes the channels. Never blocks."""
        for future in self._submitted.copy():
            future.cancel()

    @property
    def num_dropped(self) -> int:
        """The number of tasks whose op returned None."""
        return sum(cell.num_dropped for cell in self._cells)

    @property
    def num_tasks(self) -> int:
        """The number of tasks that ended, failures included."""
        return sum(cell.num_tasks for cell in self._cells)

    @property
    def num_failures(self) -> int:
        """The number of tasks that raised."""
        return self._budget.num_failures

    @property
    def turn_wait_ns(self) -> int:
        """The time that all threads waited for their turn to take an item."""
        return 0 if self.turns is None else self.turns.waited_ns()

    def judge_epoch(self) -> None:
        """End the run after an empty epoch, if it was empty because every task failed."""
        if self._budget.nothing_succeeded(self.num_tasks):
            self._owner.fail(self._budget.message(self.num_tasks), self._budget.errors)

    def new_cell(self) -> TaskCell:
        """Return a new cell for one thread."""
        cell = TaskCell()
        for recorder in self._recorders:
            recorder.share(cell)
        self._cells.append(cell)
        return cell

    def count_failure(self, error: Exception, number: int, item: Any) -> None:
        """Note a failing item on the user's exception and charge the budget."""
        add_note(error, self.spec.name, threading.current_thread().name, number, item)
        self._recorder.failed(self.spec.name, number, error)
        if self._budget.spend(error, self.num_tasks):
            self._owner.fail(self._budget.message(self.num_tasks), self._budget.errors)

    def fail(self, error: BaseException) -> None:
        """End the run, because the stage itself broke: a dead executor, a hook, SystemExit."""
        self.cut_short = True
        if not isinstance(error, Exception):
            cause, error = error, RuntimeError(f"{type(error).__name__} in a worker thread")
            error.__cause__ = cause
        attach_note(error, f"in stage {self.spec.name!r} ({threading.current_thread().name})")
        self._owner.fail(f"stage {self.spec.name!r} broke", [error])

    def leave(self, slot: Slot | None = None, workers: int = 1) -> None:
        """Count a worker that ends; the last one ends the stage."""
        if not self.threads.leave(slot, workers):
            return
        try:
            if self._budget.overdrawn_at_end(self.num_tasks):
                self._owner.fail(self._budget.message(self.num_tasks), self._budget.errors)
            self._stage_hooks.close()
        except Exception as error:
            self.fail(error)
        finally:
            for hook in self.hooks:
                if isinstance(hook, TaskStatsHook):
                    hook.end()
            if self.cut_short:  # nobody takes any more: no thread before it may wait for room
                self.inlet.close()
            self.outlet.finish()

    def _run_worker(self, slot: Slot) -> None:
        try:
            with LazyRunner() as runner:
                slot.cell = slot.cell or self.new_cell()
                self.work(slot.cell, slot.ring, self.measured_op(), runner)
        except Dismissed:
            pass
        except (ChannelClosed, CancelledError):
            self.cut_short = True
        except BaseException as error:
            self.fail(error)
        finally:
            if self.turns is not None:
                self.turns.leave()
            self.leave(slot)

    def work(
        self, cell: TaskCell, ring: Ring, call: Callable[[Any], Measured], runner: LazyRunner
    ) -> None:
        """Do the work of one thread until the channels end; overridden for ops of other kinds.

        call: the op, which returns its times too.
        """
        self._map(cell, ring, self.with_hooks(call, runner))

    def _take_past_sentinels(self) -> tuple[int, Any]:
        number, item = self.inlet.get_numbered()
        while type(item) is Sentinel:
            self.pass_sentinel(number, item)
            number, item = self.inlet.get_numbered()
        return number, item

    def pass_sentinel(self, number: int, sentinel: Sentinel) -> None:
        """Pass a sentinel on, at its place in the order."""
        if sentinel is EPOCH_END:
            self.end_epoch(number)
        self.emit_sentinel(number, sentinel)

    def end_epoch(self, number: int) -> None:
        """Pass on the rest of an epoch, before its end. ``number``: the sentinel's."""

    def emit_sentinel(self, number: int, sentinel: Sentinel) -> None:
        """Put a sentinel into the queue after the stage."""
        if self.ordered:
            self.outlet.put_at(number, sentinel)
        else:
            self.outlet.put(sentinel)

    def _map(self, cell: TaskCell, ring: Ring, call: Callable[[Any], Measured]) -> None:
        """One item in, one out (several, if a generator ran on an executor)."""
        inlet, outlet, many = self.inlet, self.outlet, self.spec.kind is OpKind.GENERATOR
        take, put = self.take, outlet.put
        since_ns = ring.begin()
        while True:
            try:
                number, item = take()
            except EndOfChannel:
                return
            output, outcome, started_ns = -1, _PASSED, perf_counter_ns()
            try:
                result, wall_ns, cpu_ns = call(item)
            except BaseException as error:
                if not isinstance(error, Exception) or self.ends_worker(error):
                    self.emit_nothing(number)  # later items in the order must not wait for this one
                    raise
                ended_ns, cpu_ns, outcome = perf_counter_ns(), -1, _FAILED
                cell.add_failure(ended_ns - started_ns, cpu_ns)
                self.count_failure(error, number, item)
                self.emit_nothing(number)
            else:
                ended_ns = perf_counter_ns()
                cell.add(wall_ns, cpu_ns)
                if many:
                    self._emit_all(cell, number, result)
                elif result is None:
                    outcome = _DROPPED
                    cell.num_dropped += 1
                    self.emit_nothing(number)
                elif self.ordered:
                    outlet.put_at(number, result)
                else:
                    output = put(result)
            item = result = None  # else they would stay alive while this thread waits
            done_ns = perf_counter_ns()
            if done_ns - since_ns >= ring.shortest_ns:
                ring.add(
                    since_ns,
                    started_ns,
                    ended_ns,
                    done_ns,
                    cpu_ns,
                    number,
                    output,
                    inlet,
                    outlet,
                    outcome,
                )
            since_ns = done_ns

    def emit_nothing(self, number: int) -> None:
        """Note that the item of that number has no result, or no further one."""
        if self._keeps_places:
            self.emit_sentinel(number, ABSENT)
        elif self.ordered:
            self.outlet.skip(number)

    def _emit_all(self, cell: TaskCell, number: int, results: list[Any]) -> None:
        for result in results:
            if result is None:
                cell.num_dropped += 1
            elif self.ordered:
                self.outlet.put_at(number, result, last=False)
            else:
                self.outlet.put(result)
        self.emit_nothing(number)

    def measured_op(self) -> Callable[[Any], Measured]:
        """Return the op as a call that returns its times too, measured where the op runs."""
        op, executor = self.spec.op, self.spec.executor
        if executor is not None:
            is_generator = self.spec.kind is OpKind.GENERATOR
            measured = functools.partial(measure_list if is_generator else self.measure, op)
            return functools.partial(self._submit, executor, measured)
        if self.measure is measure and self.spec.kind is not OpKind.GENERATOR:
            return self.limited(metered(op))
        return self.limited(functools.partial(self.measure, op))

    def limited(self, call: Callable[[Any], Measured]) -> Callable[[Any], Measured]:
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

    def with_hooks(self, call: Callable[[Any], R], runner: LazyRunner) -> Callable[[Any], R]:
        """Return ``call`` inside the task hooks."""
        hooks = self.task_hooks
        if not hooks:
            return call

        def call_hooked(item: Any) -> R:
            with ExitStack() as stack:
                for hook in hooks:
                    try:
                        context = runner.blocking(hook.task_hook(item))
                    except NotAContextError as error:
                        raise bad_hook(hook, "task_hook", self.spec.name, error) from None
                    stack.enter_context(context)
                return call(item)
            raise RuntimeError("a task hook must not swallow the exception of the op.")

        return call_hooked

    def _submit(
        self, executor: Executor, measured: Callable[[Any], Measured], item: Any
    ) -> Measured:
        try:
            future = executor.submit(measured, item)
        except Exception:
            self._executor_refuses = True  # broken or shut down: it would refuse every item
            raise
        self._submitted.add(future)
        try:
            # The race with a stop: the run closes the outlet before request_stop() cancels futures.
            # So either that saw this future, or the outlet is seen closed here.
            if self.outlet.closed:
                future.cancel()
            return future.result()
        finally:
            self._submitted.discard(future)

    def ends_worker(self, error: Exception) -> bool:
        """Return whether the item is not to blame for ``error``: the run stops, or a hook or a
        dead executor would fail every item."""
        if isinstance(error, BadHookError):
            return True
        if isinstance(error, ChannelClosed | CancelledError):
            return self.outlet.closed  # else the op raised it, e.g. for a future of its own
        broke = self.spec.executor is not None and isinstance(error, BrokenExecutor)
        return broke or self._executor_refuses


def _is_plain_recorder(hook: TaskHook) -> TypeGuard[TaskStatsHook]:
    return isinstance(hook, TaskStatsHook) and type(hook).task_hook is TaskStatsHook.task_hook
