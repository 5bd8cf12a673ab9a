"""One running stage: threads that take an item, call the op and pass the result on.

:class:`Stage` is the one for plain functions; :mod:`.generator_stage`, :mod:`.aggregate_stage` and
:mod:`.async_stage` have those for generators, aggregates and asynchronous ops.

A stage numbers items in the order in which it takes them. An ordered stage puts each result with
its number, and the outlet restores the order: that costs neither a thread nor a second buffer.
"""

from __future__ import annotations

import functools
import threading
from concurrent.futures import BrokenExecutor, CancelledError
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ..channel.sentinels import EPOCH_END, Sentinel
from ..channel.waits import ChannelClosed, EndOfChannel
from ..definition.ops import OpKind
from ..failures import attach_note
from ..hooks.checks import BadHookError
from ..hooks.context_managers import LazyRunner
from ..hooks.stage_hooks import StageHooks
from ..recorder.moments import Outcome
from .epoch_barrier import Turnstile
from .executors import ExecutorCalls, fork_processes
from .op_timing import Measured, measure, measure_list, metered, unmeasured
from .stage_threads import Slot, StageThreads
from .tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..channel.channel import Channel
    from ..definition.specs import StageSpec
    from ..failures import FailureBudget
    from ..hooks.stage_info import StageInfo
    from ..hooks.stats_queue import StatsQueue
    from ..hooks.task_hooks import TaskCell, TaskHook
    from ..recorder.flight_recorder import FlightRecorder
    from ..recorder.rings import Ring
    from ..run.run import Run

_PASSED, _DROPPED, _FAILED = map(int, (Outcome.PASSED, Outcome.DROPPED, Outcome.FAILED))


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
        owner: Run,
        recorder: FlightRecorder,
        stage_number: int,
        adjustable: bool = False,
        has_sentinels: bool = False,
    ) -> None:
        self.spec = spec
        self.info = info
        self.inlet = inlet
        self.outlet = outlet
        self.hooks = StageHooks(hooks, spec.name)
        # One thread keeps the order by itself, as long as it stays the only one.
        self.ordered = spec.output_order == "input" and (spec.concurrency > 1 or adjustable)
        new_ring = functools.partial(recorder.new_ring, spec.name, stage_number)
        self.threads = StageThreads(spec.concurrency, new_ring)
        if self.ordered:
            recorder.restores_order(stage_number, outlet.progress)
        self.measure = measure if recorder.enabled else unmeasured
        self.tally = Tally(spec.name, budget, owner, recorder)
        self._task_limit = task_limit if spec.executor is None else None
        self._owner = owner
        self.cut_short = False  # set by any thread, read by the last one to leave
        self._calls = ExecutorCalls(lambda: outlet.closed)
        self.has_sentinels = has_sentinels
        # A sentinel overtakes no item where one thread works, or the outlet restores the order.
        has_peers = spec.concurrency > 1 or adjustable
        needs_turns = has_sentinels and not self.ordered and has_peers
        self.turns = Turnstile(inlet.get_numbered, self.pass_sentinel) if needs_turns else None
        self._take: Callable[[], tuple[int, Any]] = inlet.get_numbered
        if has_sentinels:
            self._take = self._take_past_sentinels if self.turns is None else self.turns.take
        self.take = self._take_if_needed if adjustable and spec.is_adjustable else self._take
        """Takes an item with its number. Raises: EndOfChannel: the thread ends."""

    def thread_targets(self) -> list[tuple[str, Callable[[], None]]]:
        """Return name and target of each thread that the stage begins with."""
        return self._targets_of(self.threads.slots())

    def resize(self, count: int) -> list[tuple[str, Callable[[], None]]]:
        """Work on ``count`` threads from now on; return name and target of those to be started.

        Each surplus thread ends with the item that it works on or waits for. Never blocks.
        """
        return self._targets_of(self.threads.resize(count))

    def _targets_of(self, slots: list[Slot]) -> list[tuple[str, Callable[[], None]]]:
        return [
            (f"{self.spec.name}-{slot.number}", functools.partial(self._run_worker, slot))
            for slot in slots
        ]

    def enter(self) -> None:
        """Enter the hooks of the queue and of the stage, before any thread of the stage starts."""
        fork_processes(self.spec.executor)
        self.hooks.enter(self.outlet)

    def request_stop(self) -> None:
        """Cancel calls that no executor has begun; the run closes the channels. Never blocks."""
        self._calls.cancel()

    @property
    def turn_wait_ns(self) -> int:
        """The time that all threads waited for their turn to take an item."""
        return 0 if self.turns is None else self.turns.waited_ns()

    def new_cell(self) -> TaskCell:
        """Return a new cell for one thread, which the recorders count, too."""
        cell = self.tally.new_cell()
        self.hooks.share(cell)
        return cell

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
            self.tally.judge_end()
            self.hooks.leave()
        except Exception as error:
            self.fail(error)
        finally:
            self.hooks.stop_clocks()
            if self.cut_short:  # nobody takes any more: no thread before it may wait for room
                self.inlet.close()
            self.outlet.finish()

    def _run_worker(self, slot: Slot) -> None:
        try:
            with LazyRunner() as runner:
                slot.cell = slot.cell or self.new_cell()
                self.work(slot.cell, slot.ring, self.measured_op(), runner)
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
        self._map(cell, ring, self.hooks.around(call, runner))

    def _take_if_needed(self) -> tuple[int, Any]:
        if self.threads.is_spare():
            raise EndOfChannel
        return self._take()

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
                self.tally.count_failure(error, number, item)
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
        if self.ordered:
            self.outlet.skip(number)

    def _emit_all(self, cell: TaskCell, number: int, results: list[Any]) -> None:
        results.reverse()
        while results:
            result = results.pop()  # what was passed on does not stay alive in the list
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
            return functools.partial(self._calls.make, executor, measured)
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

    def ends_worker(self, error: BaseException) -> bool:
        """Return whether the item is not to blame for ``error``: the run stops, or a hook or a
        dead executor would fail every item."""
        if isinstance(error, BadHookError):
            return True
        if isinstance(error, ChannelClosed | CancelledError):
            return self.outlet.closed  # else the op raised it, e.g. for a future of its own
        broke = self.spec.executor is not None and isinstance(error, BrokenExecutor)
        return broke or self._calls.are_refused
