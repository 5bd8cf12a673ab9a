"""One run of a pipeline, which owns its threads and channels from start to close.

A pipeline is a line: a source, stages, and the queue from which the consumer takes. Nothing here
refers to the :class:`~spdl_torch.pipeline.Pipeline` that the user holds, so that dropping that
object can end the run.
"""

from __future__ import annotations

import enum
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from ..checks import check_whole
from ..errors import PipelineFailure, PipelineStopped
from ..handlers import raised_in_handler
from ..locks import RLock
from ..machine.probes import join_probing
from ..machine.readings import Probing
from .async_stage import AsyncStage
from .channel import EPOCH_END, Channel, ChannelClosed, EndOfChannel, WaitIsOver, warn_when_stalled
from .counters import Stopwatch
from .definition import BURST_BUFFER_SIZE, default_buffer_size
from .grouping import AggregatorStage, ListStage
from .hooks import Reporter, Reports, StageInfo, TaskStatsHook, check_interval
from .loop import LOOP_NAME, LoopThread
from .ops import OpKind
from .source import Source
from .stacks import describe_busy
from .stage import Stage
from .stage_hooks import StatsQueue, new_queue
from .statistics import PipelineStats
from .threads import ThreadGroup

if TYPE_CHECKING:
    from ..machine.readings import Probes
    from .definition import BuildOptions, PipelineSpec
    from .recorder import FlightRecorder

_logger = logging.getLogger("spdl_torch.pipeline")

_PROBE_JOIN_SECONDS = 1.0  # it ends at once

_SOURCE_GRACE_SECONDS = 0.02  # how long stop() waits for a source that is inside the user's next()


_STAGES: dict[OpKind, type[Stage]] = {
    OpKind.ASYNC_FUNCTION: AsyncStage,
    OpKind.ASYNC_GENERATOR: AsyncStage,
    OpKind.AGGREGATE: ListStage,
    OpKind.AGGREGATOR: AggregatorStage,
}


class RunState(enum.Enum):
    """The state of a run; only :class:`Run` changes it, each time to a later one."""

    NEW = "new"  # built; no thread exists
    RUNNING = "running"  # workers take, apply, put
    DRAINING = "draining"  # the source is exhausted or the run failed; items are in flight
    STOPPING = "stopping"  # stop was asked for: channels refuse items
    CLOSED = "closed"  # every thread has ended, or is left blocked in the user's source


_IN_ORDER = list(RunState)


class Run:
    """Threads and channels of one pass over the source, or of all, if that is continuous.

    ``break``, an exception and Ctrl-C all call ``stop``: every wait ends at once, a running op
    finishes first. A source blocked in the user's own ``next()`` cannot be interrupted: it is left
    to its daemon thread, which ends when that call returns.
    """

    def __init__(
        self, spec: PipelineSpec[Any], options: BuildOptions, recorder: FlightRecorder
    ) -> None:
        self.state = RunState.NEW
        """The state now, which other threads may change."""
        # Held for moments, never in a wait, while the state is looked at and changed, or threads
        # are added: so a stop comes before or after. Re-entrant: the garbage collector may run a
        # finalizer, which stops the run, on a thread that holds it.
        self._lock = RLock()
        self._failed: tuple[str, list[Exception]] | None = None
        self.spec = spec
        self.options = options
        self.recorder = recorder
        self._threads = ThreadGroup(self.request_stop)
        self.loop = LoopThread(self._threads, num_users=1 + len(spec.pipes))
        self._watch = Stopwatch()
        self._probing = Probing()

        interval = check_interval(options.report_stats_interval, "build: report_stats_interval")
        interval = None if interval == -1 else interval
        self.task_limit = self._make_task_limit()
        self._make_line(interval)
        hooks = [hook for stage in self.stages for hook in stage.hooks.recorders]
        subjects: list[Reports] = [*hooks, *self.queues]
        if options.tuner is not None:
            subjects.append(options.tuner.attach(self))
        self._reporter = Reporter(subjects, self._join_workers)

    # How it is made:

    def _make_task_limit(self) -> Channel[None] | None:
        """Return a channel of ``num_threads`` tokens, of which each task on a thread takes one;
        None where the stages' own limits are lower."""
        num_threads = self.options.num_threads
        check_whole("build", num_threads=num_threads, optional=True)
        if num_threads is None:
            return None
        on_threads = (each for each in self.spec.pipes if each.executor is None)
        most_tasks = sum(stage.concurrency for stage in on_threads if not stage.is_async)
        if num_threads >= most_tasks and self.options.tuner is None:
            return None
        # A channel, not a semaphore: a stop closes it, which ends the waits of all workers at once.
        task_limit: Channel[None] = Channel(num_threads)
        for _ in range(num_threads):
            task_limit.put(None)
        return task_limit

    def _make_line(self, interval: float | None) -> None:
        """Make source, stages and queues, upstream first: a stage, the queue after it and its rows
        in a trace share one *stage number*.

        The sink is a name alone: the queue after the last stage has its room, too, and a queue of
        the user's class that shows the figures of that one.
        """
        spec, options, recorder = self.spec, self.options, self.recorder
        make_queue = partial(new_queue, options.queue_class or StatsQueue, interval)
        make_hooks = options.task_hook_factory or (
            lambda info: [TaskStatsHook(info, interval)] if recorder.enabled else []
        )
        stages = [(stage.name, stage.concurrency) for stage in spec.pipes]
        parts = [(spec.src.name, 1), *stages, ("sink", 1)]
        infos = [StageInfo(0, options.stage_id + n, *part) for n, part in enumerate(parts)]
        self.queues: list[StatsQueue] = []
        """The queues, from that of the source to that of the sink, which only shows figures."""
        self.stages: list[Stage] = []
        """The stages, upstream first."""
        sizes = [None, *(stage.buffer_size for stage in spec.pipes)]
        for number, (info, given) in enumerate(zip(infos[:-1], sizes, strict=True)):
            most_threads = max(each.concurrency for each in infos[number : number + 2])
            queue = make_queue(info, given or default_buffer_size(most_threads))
            if given is None:
                queue.allow_bursts(BURST_BUFFER_SIZE)
            self.queues.append(queue)
        sink = make_queue(infos[-1], spec.sink.buffer_size)
        sink.show(queue)
        queue.grow(queue.capacity + sink.buffer_size)
        self.outlet = queue
        """The queue from which the consumer takes."""
        for number, queue in enumerate(self.queues):
            recorder.add_queue(number, queue.info.stage_name, queue.capacity)
        self.source = Source(self)
        for number, (stage, info) in enumerate(zip(spec.pipes, infos[1:-1], strict=True), 1):
            kind = _STAGES.get(stage.kind, Stage)
            self.stages.append(kind(self, number, make_hooks(info)))
        self._consumer = recorder.new_consumer_ring(len(self.queues))
        self.queues.append(sink)

    # How it runs:

    def start(self) -> None:
        """Start every thread. Raises: PipelineStopped: it was started or stopped before."""
        self._check_process()
        for stage in self.stages:
            stage.claim()
        with self._lock:
            if self.state is not RunState.NEW:
                raise PipelineStopped(f"start: the pipeline is {self.state.value}; it runs once.")
            self.state = RunState.RUNNING
        if self.recorder.enabled:
            self._probing.begin()
        self._watch.start()
        for queue in self.queues:  # made when the run was, perhaps long ago
            queue.start_clock()
        parts: list[Source | Stage] = [self.source, *self.stages]
        # A list: Ctrl-C as a generator that is not used up goes would be lost.
        if [stage for stage in self.stages if stage.spec.is_async]:
            self.loop.begin()
        try:
            for part in parts:
                part.enter(part.outlet, *([self.queues[-1]] if part is parts[-1] else []))
        except Exception as error:
            if raised_in_handler(error):
                raise  # as Ctrl-C: the caller stops the run
            self.fail("a stage hook raised", [error])
        self._reporter.start(self._threads)
        # Downstream first: no thread waits for a missing taker. A tuner may set a concurrency
        # meanwhile, on the reporter's thread.
        with self._lock:
            targets = [each for stage in reversed(self.stages) for each in stage.targets()]
        source = self.source.spec.name, self.source.iterate
        self.source.threads = self._threads.spawn_all([*targets, source])[-1:]

    def get(self, timeout: float | None = None) -> Any:
        """Return the next finished item; start the run first if need be.

        Raises: EOFError: the end of the data, or of an epoch, after which the next one follows;
            TimeoutError: try again; PipelineFailure; PipelineStopped.
        """
        self._check_process()
        if self.state is RunState.NEW:
            self.start()
        self._consumer.ask(self.outlet)
        get = self.outlet.get_numbered
        try:
            number, item = (
                warn_when_stalled(get, self._report_stall) if timeout is None else get(timeout)
            )
        except WaitIsOver as error:
            raise TimeoutError(f"get: {error} {self._busy()}") from None
        except EndOfChannel:
            self._consumer.end()
            self._close()
        except ChannelClosed:
            self._consumer.end()
            raise PipelineStopped("get: the pipeline was stopped.") from None
        else:
            if item is EPOCH_END:
                self._consumer.end()
                raise EOFError("get: the epoch has ended; the next item is of the next one.")
            self._consumer.got(number)
            return item
        if (failure := self.failure) is not None:
            raise failure
        raise EOFError("get: the pipeline has delivered every item.")

    def _report_stall(self, seconds: float) -> None:
        _logger.warning("pipeline: the loop has waited %g s for an item. %s", seconds, self._busy())

    def _busy(self) -> str:
        """Describe who is at work."""
        stages = (stage for stage in self.stages if isinstance(stage, AsyncStage))
        coroutines = ", ".join(name for stage in stages for name in stage.in_work())
        busy = describe_busy(self._threads.threads())
        return f"Coroutines under way: {coroutines}. {busy}" if coroutines else busy

    # How it ends:

    def fail(self, message: str, errors: list[Exception]) -> None:
        """Take no new items; ``get`` raises the first failure after the last good item. Never
        blocks."""
        with self._lock:
            if self._failed is None:
                self._failed = message, list(errors)
        self.source.outlet.finish()

    @property
    def failure(self) -> PipelineFailure | None:
        """The error that ``get`` raises after the good items; None as long as nothing failed."""
        # Created anew each time. A raised exception refers to the frames that it passed, and so to
        # the Pipeline. Kept here, it would keep the Pipeline alive, whose end stops the run.
        return None if self._failed is None else PipelineFailure(*self._failed)

    def source_has_ended(self) -> None:
        """Note that the data has ended: what is left is in flight. Never blocks."""
        self._go_on_to(RunState.DRAINING)

    def request_stop(self) -> None:
        """End every wait. Never blocks; may be called from any thread, also by a finalizer."""
        if not self._threads.is_here:
            return  # a forked child has no threads, and perhaps locks that nobody will release
        if not self._go_on_to(RunState.STOPPING):
            return
        self._watch.stop()
        # Without the lock: a finalizer that runs on a thread inside a channel holds that channel's
        # lock while it waits here for the run's.
        self._consumer.end()
        # Those of later stages first: a worker that finds its inlet closed finishes its outlet, and
        # who takes from that must not take a stop for the end of the data.
        for channel in reversed(self.queues):
            channel.close()
        if self.task_limit is not None:
            self.task_limit.close()
        self.source.request_stop()
        for stage in self.stages:
            stage.request_stop()
        self._reporter.request_stop()
        self._probing.end()

    def stop(self, timeout: float | None = None) -> None:
        """Call ``request_stop``, then join the threads. Idempotent. Called on a thread of the run,
        e.g. in an op, it does not wait.

        Raises: TimeoutError: an op still runs after ``timeout`` seconds; call again to wait on.
        """
        if not self._threads.is_here:
            return
        self.request_stop()
        if self._threads.is_member():
            return  # an op or a callback cannot wait for its own end
        if not self._join_workers(timeout):
            names = ", ".join(self._threads.alive(without=self.source.threads))
            raise TimeoutError(
                f"stop: still running after {timeout} seconds: {names}. An op cannot be "
                "interrupted; call stop() again to wait longer."
            )
        for thread in self.source.threads:
            thread.join(_SOURCE_GRACE_SECONDS)
            if thread.is_alive():
                _logger.info("stop: the source is blocked in its own next(); its thread is left.")
        self._close()

    def goes_on(self) -> bool:
        """Return whether it is under way in this process. One that was asked to stop, as one that
        was dropped, is waited for."""
        if self.state is RunState.STOPPING:
            self.stop()
        return self._threads.is_here and self.state in (RunState.RUNNING, RunState.DRAINING)

    def _close(self) -> None:
        """Close a run whose data has ended or that was stopped: its threads end or have ended."""
        if not self._go_on_to(RunState.DRAINING):
            return
        self._consumer.end()
        self._reporter.request_stop()
        self.source.request_stop()
        # Every worker has put its last item, so this join is short. A source may be blocked in
        # the user's code (after a failure): it is not waited for.
        self._join_workers()
        self._probing.end()
        # Last: what is read when the clock has stopped is final, and recordings look no further.
        self._watch.stop()
        join_probing(_PROBE_JOIN_SECONDS)
        self._go_on_to(RunState.CLOSED)

    def _go_on_to(self, state: RunState) -> bool:
        """Go to that state, unless it is past; return whether the run is not closed."""
        with self._lock:
            if self.state is RunState.CLOSED:
                return False
            if _IN_ORDER.index(state) > _IN_ORDER.index(self.state):
                self.state = state
            return True

    def _join_workers(self, timeout: float | None = None) -> bool:
        """Join all threads but the source's. The loop's ends with those that need it, unless Ctrl-C
        came before they began; by its name, as nobody may know its thread then."""
        loop = [each for each in self._threads.threads() if each.name == f"spdl-{LOOP_NAME}"]
        if not self._threads.join(timeout, without=[*self.source.threads, *loop]):
            return False
        self._leave_hooks()
        self.loop.end()
        return not loop or self._threads.join(timeout, without=self.source.threads)

    def _leave_hooks(self) -> None:
        """Leave what the last thread of a part has not left, as a start that failed, or that Ctrl-C
        cut off, did not begin all of its threads. None of them is there."""
        left = [stage.hooks for stage in self.stages]
        for hooks in left if self.source.threads else [self.source.hooks, *left]:
            try:
                hooks.leave()
            except Exception as error:
                self.fail("a stage hook raised", [error])

    def _check_process(self) -> None:
        if not self._threads.is_here:
            raise PipelineStopped(
                "this process is a fork; the pipeline's threads stayed in process "
                f"{self._threads.pid}. Build a pipeline after the fork."
            )

    # For its tuner:

    @property
    def is_taking(self) -> bool:
        """Whether it runs, and the source has more."""
        return self.state is RunState.RUNNING

    def set_concurrency(self, stage: str, count: int) -> None:
        """Work on ``count`` threads from now on; surplus ones leave when they have passed on the
        item that they work on, or wait for. Results and their order stay the same. Without effect
        when the run has ended.

        stage: the name of one that is adjustable.
        Raises: RuntimeError: the system has no more threads, and the others go on.
        """
        live = next(each for each in self.stages if each.spec.name == stage)
        number = self.stages.index(live)
        for place in (number, number + 1):
            self._grow(place, default_buffer_size(count))
        # A stop comes before, and nothing starts, or after, and joins the new threads.
        with self._lock:
            if self.state in (RunState.STOPPING, RunState.CLOSED):
                return
            live.resize(count, self._threads.spawn)

    def _grow(self, number: int, capacity: int) -> None:
        """Raise the capacity of the queue after that stage, unless the user gave it."""
        queue = self.queues[number]
        if queue is self.outlet:
            capacity += self.queues[-1].buffer_size
        is_given = number > 0 and self.spec.pipes[number - 1].buffer_size is not None
        if not is_given and capacity > queue.capacity:
            queue.grow(capacity)
            self.recorder.add_queue(number, queue.info.stage_name, capacity)

    # For its readers:

    def probes(self) -> Probes | None:
        """Return the readings of the machine since the start, up to the end; None = it keeps no
        statistics."""
        return self._probing.readings()

    def snapshot(self) -> PipelineStats:
        """Return the statistics from the start to now, or to the end; open waits included."""
        waited_ns = self.outlet.counters().get_wait[0]
        stages = tuple(stage.stats() for stage in self.stages)
        return PipelineStats(self._watch.elapsed_ns(), waited_ns, stages)

    @property
    def num_lost(self) -> int:
        """The number of items that ops have dropped or failed so far. The incomplete last list that
        an aggregate drops does not count.
        """
        return sum(
            each.budget.num_failures + (not each.spec.is_grouping and each.num_dropped)
            for each in self.stages
        )

    def describe(self) -> str:
        """Return the state and every stage, a line each."""
        return "\n".join([f"Pipeline [{self.state.value}]", *(f"  {p}" for p in self.spec.parts())])
