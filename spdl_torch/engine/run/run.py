"""One run of a pipeline, which owns its threads and channels from start to close.

Nothing here refers to the :class:`~spdl_torch.pipeline.Pipeline` that the user holds, so that
dropping that object can end the run.
"""

from __future__ import annotations

import logging
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ...errors import PipelineStopped
from ...machine.probes import join_probing
from ...machine.readings import Probing
from ..channel.sentinels import EPOCH_END
from ..channel.waits import ChannelClosed, EndOfChannel
from ..definition.ops import OpKind
from ..definition.specs import default_buffer_size
from ..hooks.callbacks import check_interval
from ..hooks.interval_reporter import Reporter, Reports
from ..hooks.queue_class import queue_maker
from ..hooks.task_hooks import TaskHook, TaskStatsHook
from ..stats.perf_stats import PipelineStats
from ..threads.stacks import describe_busy
from ..threads.stall import warn_when_stalled
from ..threads.thread_group import ThreadGroup
from .stage_stats import stage_stats
from .states import Lifecycle, RunState
from .task_limit import make_task_limit
from .wiring import Wiring

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from ...errors import PipelineFailure
    from ...machine.readings import Probes
    from ..definition.specs import PipelineSpec
    from ..hooks.stage_info import StageInfo
    from ..hooks.stats_queue import StatsQueue
    from ..hooks.task_hooks import HookFactory
    from ..recorder.flight_recorder import FlightRecorder
    from .build_options import BuildOptions

_logger = logging.getLogger("spdl_torch.pipeline")

_GROUPING = (OpKind.AGGREGATE, OpKind.AGGREGATOR)

_PROBE_JOIN_SECONDS = 1.0  # it ends at once

_SOURCE_GRACE_SECONDS = 0.02  # how long stop() waits for a source that is inside the user's next()


class Run:
    """Threads and channels of one pass over the source, or of all, if that is continuous.

    ``break``, an exception and Ctrl-C all call ``stop``: every wait ends at once, a running op
    finishes first. A source blocked in the user's own ``next()`` cannot be interrupted: it is left
    to its daemon thread, which ends when that call returns.
    """

    def __init__(
        self, spec: PipelineSpec[Any], options: BuildOptions, recorder: FlightRecorder
    ) -> None:
        tuner = options.tuner
        self.life = Lifecycle()
        """The run's way from state to state."""
        self.recorder = recorder
        self.spec = spec
        self._is_adjustable = tuner is not None
        self._threads = ThreadGroup(self.request_stop)
        self._started_ns = 0
        self._ended_ns: int | None = None
        self._probing = Probing()
        self._epoch_began = 0  # the number, at the sink, of the first item of this epoch

        interval = check_interval(options.report_stats_interval, "build: report_stats_interval")
        interval = None if interval == -1 else interval
        self.task_limit = make_task_limit(spec, options.num_threads, adjustable=self._is_adjustable)
        wiring = Wiring(
            spec,
            make_queue=queue_maker(options.queue_class, interval),
            make_hooks=options.task_hook_factory or _default_hooks(interval, recorder.enabled),
            max_failures=options.max_failures,
            task_limit=self.task_limit,
            owner=self,
            recorder=recorder,
            adjustable=self._is_adjustable,
            first_id=options.stage_id,
        )
        self.source, self.stages = wiring.source, wiring.stages
        self._queues, self._sink, self._consumer = wiring.queues, wiring.sink, wiring.consumer
        subjects: list[Reports] = [*self._recorders(), *self.queues()]
        if tuner is not None:
            subjects.append(tuner.attach(self))
        self._reporter = Reporter(subjects, self._join_workers)

    def start(self) -> None:
        """Start every thread. Raises: PipelineStopped: it was started or stopped before."""
        self._check_process()
        self.life.begin()
        if self.recorder.enabled:
            self._probing.begin()
        self._started_ns = perf_counter_ns()
        try:
            self.source.enter()
            for stage in self.stages:
                stage.enter()
            self._sink.enter()
        except Exception as error:
            self.fail("a stage hook raised", [error])
        self._reporter.start(self._threads)
        self._threads.spawn("sink", self._sink.run)
        # Downstream first: no thread waits for a missing taker.
        for stage in reversed(self.stages):
            # A tuner may set the concurrency meanwhile, on the reporter's thread.
            with self.life.lock:
                targets = stage.thread_targets()
            for name, target in targets:
                self._start_worker(name, target)
        self.source.thread = self._threads.spawn(self.source.name, self.source.run)

    def get(self, timeout: float | None = None) -> Any:
        """Return the next finished item; start the run first if need be.

        Raises: EOFError: the end of the data, or of an epoch, after which the next one follows;
            TimeoutError: try again; PipelineFailure; PipelineStopped.
        """
        self._check_process()
        if self.state is RunState.NEW:
            self.start()
        sink = self._sink.outlet
        self._consumer.ask(sink)
        get = sink.get_numbered
        try:
            number, item = (
                warn_when_stalled(get, self._report_stall) if timeout is None else get(timeout)
            )
        except TimeoutError as error:
            raise TimeoutError(f"get: {error} {describe_busy(self._threads.threads())}") from None
        except EndOfChannel:
            self._consumer.end()
            self._close()
        except ChannelClosed:
            self._consumer.end()
            raise PipelineStopped("get: the pipeline was stopped.") from None
        else:
            if item is EPOCH_END:
                self._end_epoch(number)
                raise EOFError("get: the epoch has ended; the next item is of the next one.")
            self._consumer.got(number)
            return item
        if (failure := self.failure) is not None:
            raise failure
        raise EOFError("get: the pipeline has delivered every item.")

    def _end_epoch(self, number: int) -> None:
        """Begin the next epoch; ``number``: the sentinel's, at the sink."""
        self._consumer.end()
        began, self._epoch_began = self._epoch_began, number + 1
        if (
            began == number
        ):  # an empty epoch; if every task so far has failed, all later ones would be empty too
            for stage in self.stages:
                stage.tally.judge_epoch()

    def _report_stall(self, seconds: float) -> None:
        busy = describe_busy(self._threads.threads())
        _logger.warning("pipeline: the loop has waited %g s for an item. %s", seconds, busy)

    @property
    def state(self) -> RunState:
        """The state now, which other threads may change."""
        return self.life.state

    @property
    def sink_queue(self) -> StatsQueue:
        """The queue from which the consumer takes."""
        return self._sink.outlet

    @property
    def failure(self) -> PipelineFailure | None:
        """The error that ``get`` raises after the good items; None as long as nothing failed."""
        return self.life.failure

    def request_stop(self) -> None:
        """End every wait. Never blocks; may be called from any thread, also by a finalizer."""
        if not self._threads.is_here:
            return  # a forked child has no threads, and perhaps locks that nobody will release
        if not self.life.stop():
            return
        self._stop_clock()
        # Without the lock: a finalizer that runs on a thread inside a channel holds that channel's
        # lock while it waits here for the run's.
        self._consumer.end()
        for channel in self.queues():
            channel.close()
        if self.task_limit is not None:
            self.task_limit.close()
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
            names = ", ".join(self._threads.alive(without=self._source_threads()))
            raise TimeoutError(
                f"stop: still running after {timeout} seconds: {names}. An op cannot be "
                "interrupted; call stop() again to wait longer."
            )
        for thread in self._source_threads():
            thread.join(_SOURCE_GRACE_SECONDS)
            if thread.is_alive():
                _logger.info("stop: the source is blocked in its own next(); its thread is left.")
        self._close()

    def fail(self, message: str, errors: list[Exception]) -> None:
        """Take no new items; ``get`` raises after the last good one. Never blocks."""
        self.life.fail(message, errors)
        self.source.outlet.finish()

    def source_has_ended(self) -> None:
        """Note that the data has ended. Never blocks."""
        self.life.source_has_ended()

    def _close(self) -> None:
        """Close a run whose data has ended or that was stopped: its threads end or have ended."""
        if not self.life.drain():
            return
        self._stop_clock()
        self._consumer.end()
        self._reporter.request_stop()
        # Every worker has put its last item, so this join is short. A source may be blocked in
        # the user's code (after a failure): it is not waited for.
        self._join_workers()
        self._probing.end()
        join_probing(_PROBE_JOIN_SECONDS)
        self.life.close()
        self.recorder.finish()

    def _stop_clock(self) -> None:
        self._ended_ns = self._ended_ns or perf_counter_ns()

    def probes(self) -> Probes | None:
        """Return the readings of the machine since the start, up to the end; None = it keeps no
        statistics."""
        return self._probing.readings()

    def _join_workers(self, timeout: float | None = None) -> bool:
        return self._threads.join(timeout, without=self._source_threads())

    def _source_threads(self) -> list[threading.Thread]:
        return [] if self.source.thread is None else [self.source.thread]

    def _check_process(self) -> None:
        if not self._threads.is_here:
            raise PipelineStopped(
                "this process is a fork; the pipeline's threads stayed in process "
                f"{self._threads.pid}. Build a pipeline after the fork."
            )

    @property
    def is_taking(self) -> bool:
        """Whether it runs, and the source has more."""
        return self.state is RunState.RUNNING

    @property
    def num_delivered(self) -> int:
        """The number of items that the consumer took so far."""
        return self.sink_queue.counters().num_got

    def set_concurrency(self, stage: str, count: int) -> None:
        """Run at most ``count`` calls of the op at once; surplus threads end with their next item.
        Results and their order stay the same. Without effect when the run has ended.

        Raises: ValueError: the stage cannot be changed.
        """
        live = next((each for each in self.stages if each.spec.name == stage), None)
        if not self._is_adjustable or live is None or not live.spec.is_adjustable or count < 1:
            raise ValueError(
                f"set_concurrency: stage must be one with threads of its own, of a pipeline built "
                f"with a tuner, and count >= 1, got {stage!r} and {count}."
            )
        # A stop comes before, and nothing starts, or after, and joins the new threads.
        with self.life.lock:
            if self.state not in (RunState.NEW, RunState.RUNNING, RunState.DRAINING):
                return
            for queue in (live.inlet, live.outlet):
                self._grow(queue, default_buffer_size(count))
            if not live.threads.has_begun:  # no thread yet that could leave
                live.threads.wanted = count
                return
            for name, target in live.resize(count):
                self._start_worker(name, target)

    def _start_worker(self, name: str, target: Callable[[], None]) -> None:
        """Start a thread of a stage."""
        self._threads.spawn(name, target)

    def _grow(self, queue: StatsQueue, capacity: int) -> None:
        """Raise the capacity of a queue, unless the user gave it."""
        at = next(at for at in self._queues if at.queue is queue)
        if not at.is_given and capacity > queue.capacity:
            queue.grow(capacity)
            self.recorder.set_capacity(at.stage_number, capacity)

    def _recorders(self) -> list[TaskStatsHook]:
        return [hook for stage in self.stages for hook in stage.hooks.recorders]

    def queues(self) -> list[StatsQueue]:
        """Return every queue, from that of the source to that of the sink."""
        return [at.queue for at in self._queues]

    def snapshot(self) -> PipelineStats:
        """Return the statistics from the start to now, or to the end; open waits included."""
        now = self._ended_ns or perf_counter_ns()
        elapsed_ns = max(0, now - self._started_ns) if self._started_ns else 0
        wait_ns = self.sink_queue.counters().get_wait[0]
        return PipelineStats(
            elapsed=elapsed_ns / 1e9,
            consumer_wait_ratio=min(1.0, wait_ns / max(1, elapsed_ns)),
            stages=tuple(map(stage_stats, self.stages)),
        )

    @property
    def num_lost(self) -> int:
        """The number of items that ops have dropped or failed so far. The incomplete last list that
        an aggregate drops does not count.
        """
        return sum(
            each.tally.num_failures + (each.spec.kind not in _GROUPING and each.tally.num_dropped)
            for each in self.stages
        )

    def describe(self) -> str:
        """Return the state and every stage, a line each."""
        return "\n".join([f"Pipeline [{self.state.value}]", *(f"  {p}" for p in self.spec.parts())])


def _default_hooks(interval: float | None, enabled: bool) -> HookFactory:
    def make(info: StageInfo) -> list[TaskHook]:
        return [TaskStatsHook(info, interval)] if enabled else []

    return make
