"""One running stage: threads that take an item, call the op and pass the result on.

The number of an item at a stage is the order in which it was taken; an ordered stage hands it to
the outlet, which restores the order, so that ordering costs neither a thread nor a second buffer.
"""

from __future__ import annotations

import functools
import threading
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from contextlib import ExitStack
from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, TypeVar

from .channel import Channel, ChannelClosed, EndOfChannel
from .contexts import LazyRunner, blocking
from .definition import OpKind, StageSpec
from .failures import FailureBudget, add_note
from .hooks import StageInfo, StatsQueue, TaskCell, TaskHook, TaskStatsHook

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Stage", "StageOwner"]

R = TypeVar("R")

Measured = tuple[Any, int, int]
"""What an op returned, its wall time and its thread CPU time in ns."""


class StageOwner(Protocol):
    """What a stage needs of the run that owns it."""

    def fail(self, message: str, errors: list[Exception]) -> None:
        """Take no new items; raise once the good ones are delivered. Never blocks."""


class Stage:
    """The live form of a :class:`StageSpec`; the run starts its threads and joins them.

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
        gate: Channel[None] | None,
        budget: FailureBudget,
        owner: StageOwner,
    ) -> None:
        self.spec = spec
        self.info = info
        self.inlet = inlet
        self.outlet = outlet
        self.hooks = hooks
        self.ordered = spec.output_order == "input" and spec.concurrency > 1
        # Hooks nobody wrote are not entered: recorders whose task_hook is not overridden have their
        # cells written directly by the workers.
        self._recorders = [h for h in hooks if _is_plain_recorder(h)]
        self.task_hooks = [h for h in hooks if not _is_plain_recorder(h)]
        self._cells: list[TaskCell] = []
        self._gate = gate if spec.executor is None else None
        self._budget = budget
        self._owner = owner
        self._lock = threading.Lock()
        self._workers_left = spec.concurrency
        self.cut_short = False
        self._stage_hooks = ExitStack()
        self._executor_refuses = False
        self._submitted: set[Future[Measured]] = set()

    # -- what the run calls ------------------------------------------------------------------

    def thread_targets(self) -> list[tuple[str, Callable[[], None]]]:
        """Name and target of each thread of the stage."""
        return [(f"{self.spec.name}-{n}", self._run_worker) for n in range(self.spec.concurrency)]

    def enter(self) -> None:
        """Enter the stage hooks, before any thread of the stage starts."""
        for hook in self.hooks:
            if isinstance(hook, TaskStatsHook):
                hook.start()
            self._stage_hooks.enter_context(blocking(hook.stage_hook()))

    def request_stop(self) -> None:
        """Withdraw what has not begun; the channels are closed by the run. Never blocks."""
        for future in tuple(self._submitted):
            future.cancel()

    @property
    def num_dropped(self) -> int:
        """Tasks whose op returned None."""
        return sum(cell.num_dropped for cell in self._cells)

    @property
    def num_tasks(self) -> int:
        """Tasks that ended, failures included."""
        return sum(cell.num_tasks for cell in self._cells)

    @property
    def num_failures(self) -> int:
        """Tasks that raised."""
        return self._budget.num_failures

    # -- what every kind of worker shares ----------------------------------------------------

    def new_cell(self) -> TaskCell:
        """A place to count for one thread."""
        cell = TaskCell()
        for recorder in self._recorders:
            recorder.share(cell)
        self._cells.append(cell)
        return cell

    def count_failure(self, error: Exception, number: int, item: Any) -> None:
        """Note a failing item on the user's exception and charge the budget."""
        add_note(error, self.spec.name, threading.current_thread().name, number, item)
        if self._budget.spend(error, self.num_tasks):
            self._owner.fail(self._budget.message(self.num_tasks), self._budget.errors)

    def fail(self, error: BaseException) -> None:
        """The stage itself broke (an executor died, a hook raised, SystemExit): end the run."""
        self.cut_short = True
        if not isinstance(error, Exception):
            cause, error = error, RuntimeError(f"{type(error).__name__} in a worker thread")
            error.__cause__ = cause
        error.add_note(f"in stage {self.spec.name!r} ({threading.current_thread().name})")
        self._owner.fail(f"stage {self.spec.name!r} broke", [error])

    def leave(self, workers: int = 1) -> None:
        """A worker is done; the last one ends the stage."""
        with self._lock:
            self._workers_left -= workers
            if self._workers_left:
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
            if self.cut_short:  # nobody takes any more: the stages before must not wait for room
                self.inlet.close()
            self.outlet.finish()

    # -- threads -----------------------------------------------------------------------------

    def _run_worker(self) -> None:
        try:
            with LazyRunner() as runner:
                cell, call = self.new_cell(), self._measured_op()
                if self.spec.kind is OpKind.GENERATOR and self.spec.executor is None:
                    self._expand_all(cell, call, runner)
                elif self.spec.kind is OpKind.AGGREGATE:
                    self._aggregate(cell, self._with_hooks(call, runner))
                else:
                    self._map(cell, self._with_hooks(call, runner))
        except (ChannelClosed, CancelledError):
            self.cut_short = True
        except BaseException as error:
            self.fail(error)
        finally:
            self.leave()

    def _map(self, cell: TaskCell, call: Callable[[Any], Measured]) -> None:
        """One item in, one out (several, if a generator ran on an executor)."""
        take, put, many = (
            self.inlet.get_numbered,
            self.outlet.put,
            self.spec.kind is OpKind.GENERATOR,
        )
        while True:
            try:
                number, item = take()
            except EndOfChannel:
                return
            started_ns = perf_counter_ns()
            try:
                result, wall_ns, cpu_ns = call(item)
            except BaseException as error:
                if not isinstance(error, Exception) or self._ends_worker(error):
                    self._emit_nothing(number)  # those behind it in the order must not wait
                    raise
                cell.add_failure(perf_counter_ns() - started_ns, 0)
                self.count_failure(error, number, item)
                self._emit_nothing(number)
                continue
            cell.add(wall_ns, cpu_ns)
            if many:
                self._emit_all(cell, number, result)
            elif result is None:
                cell.num_dropped += 1
                self._emit_nothing(number)
            elif self.ordered:
                self.outlet.put_at(number, result)
            else:
                put(result)
            item = result = None  # or they would stay alive while this thread waits

    def _expand_all(
        self, cell: TaskCell, call: Callable[[Any], Measured], runner: LazyRunner
    ) -> None:
        """One item in, many out, each passed on as soon as it is there."""
        while True:
            try:
                number, item = self.inlet.get_numbered()
            except EndOfChannel:
                return
            times = [0, 0]
            expand = functools.partial(self._pass_on, cell, call, number, times)
            try:
                self._with_hooks(expand, runner)(item)
            except BaseException as error:
                if not isinstance(error, Exception) or self._ends_worker(error):
                    self._emit_nothing(number)
                    raise
                cell.add_failure(*times)
                self.count_failure(error, number, item)
            else:
                cell.add(*times)
            self._emit_nothing(number)

    def _pass_on(
        self,
        cell: TaskCell,
        call: Callable[[Any], Measured],
        number: int,
        times: list[int],
        item: Any,
    ) -> None:
        """Pass on what the generator yields; ``times`` sums what was spent inside it."""
        outputs, times[0], times[1] = call(item)
        step = self._gated(functools.partial(_measure, _next))
        while True:
            output, wall_ns, cpu_ns = step(outputs)
            times[0] += wall_ns
            times[1] += cpu_ns
            if output is _EXHAUSTED:
                return
            if output is None:
                cell.num_dropped += 1
            elif self.ordered:
                self.outlet.put_at(number, output, last=False)
            else:
                self.outlet.put(output)

    def _aggregate(self, cell: TaskCell, call: Callable[[Any], Measured]) -> None:
        """Many in, one list out; a remainder unless ``drop_last``."""
        group: list[Any] = []
        size = self.spec.batch_size
        while True:
            try:
                number, item = self.inlet.get_numbered()
            except EndOfChannel:
                break
            group.append(item)
            if len(group) == size:
                self._emit_group(cell, call, group, number // size)
                group = []
        if group and not self.spec.drop_last:
            self._emit_group(cell, call, group, number // size)
        else:
            cell.num_dropped += len(group)

    def _emit_group(
        self, cell: TaskCell, call: Callable[[Any], Measured], group: list[Any], number: int
    ) -> None:
        started_ns = perf_counter_ns()
        try:
            result, wall_ns, cpu_ns = call(group)
        except Exception as error:  # of a task hook
            if self._ends_worker(error):
                raise
            cell.add_failure(perf_counter_ns() - started_ns, 0)
            self.count_failure(error, number, group)
            return
        cell.add(wall_ns, cpu_ns)
        self.outlet.put(result)

    def _emit_nothing(self, number: int) -> None:
        if self.ordered:
            self.outlet.skip(number)

    def _emit_all(self, cell: TaskCell, number: int, results: list[Any]) -> None:
        for result in results:
            if result is None:
                cell.num_dropped += 1
            elif self.ordered:
                self.outlet.put_at(number, result, last=False)
            else:
                self.outlet.put(result)
        self._emit_nothing(number)

    # -- calling the op ----------------------------------------------------------------------

    def _measured_op(self) -> Callable[[Any], Measured]:
        """The op as a call that also tells its times, measured where the op runs."""
        op, executor = self.spec.op, self.spec.executor
        if executor is not None:
            measure = _measure_list if self.spec.kind is OpKind.GENERATOR else _measure
            return functools.partial(self._submit, executor, functools.partial(measure, op))
        return self._gated(functools.partial(_measure, op))

    def _gated(self, call: Callable[[Any], Measured]) -> Callable[[Any], Measured]:
        """``call`` under the bound on all stages' threads, if there is one."""
        gate = self._gate
        if gate is None:
            return call

        def call_gated(item: Any) -> Measured:
            gate.get()
            try:
                return call(item)
            finally:
                gate.put(None)

        return call_gated

    def _with_hooks(self, call: Callable[[Any], R], runner: LazyRunner) -> Callable[[Any], R]:
        hooks = self.task_hooks
        if not hooks:
            return call

        def call_hooked(item: Any) -> R:
            with ExitStack() as stack:
                for hook in hooks:
                    stack.enter_context(runner.blocking(hook.task_hook(item)))
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
            # request_stop() closes the outlet before it cancels, so either it saw this future or
            # the closed outlet is seen here.
            if self.outlet.closed:
                future.cancel()
            return future.result()
        finally:
            self._submitted.discard(future)

    def _ends_worker(self, error: Exception) -> bool:
        """Whether ``error`` is not the item's own fault: the stop of the run, or a dead executor,
        which would fail every item."""
        if isinstance(error, ChannelClosed | CancelledError):
            return self.outlet.closed  # else the op raised it, e.g. for a future of its own
        broke = self.spec.executor is not None and isinstance(error, BrokenExecutor)
        return broke or self._executor_refuses


def _is_plain_recorder(hook: TaskHook) -> TypeGuard[TaskStatsHook]:
    return isinstance(hook, TaskStatsHook) and type(hook).task_hook is TaskStatsHook.task_hook


def _measure(op: Callable[[Any], Any], item: Any) -> Measured:
    wall, cpu = perf_counter_ns(), thread_time_ns()
    result = op(item)
    return result, perf_counter_ns() - wall, thread_time_ns() - cpu


def _measure_list(op: Callable[[Any], Any], item: Any) -> Measured:
    return _measure(lambda item: list(op(item)), item)


_EXHAUSTED = object()


def _next(outputs: Any) -> Any:
    return next(outputs, _EXHAUSTED)
