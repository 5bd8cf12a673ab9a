"""One run of a pipeline: owns its threads and channels from start to close.

Nothing here refers to the :class:`~spdl_torch.pipeline.Pipeline` that the user holds, so that
dropping that object can end the run.
"""

from __future__ import annotations

import logging
import os
import threading
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ..errors import PipelineFailure, PipelineStopped
from .channel import ChannelClosed, EndOfChannel
from .coroutines import AsyncStage
from .definition import (
    BURST_BUFFER_SIZE,
    MaxFailures,
    OpKind,
    PipelineSpec,
    default_buffer_size,
)
from .failures import FailureBudget
from .hooks import HookFactory, StageInfo, StatsQueue, TaskStatsHook
from .iterate import iterate
from .layout import buffer_sizes, given_buffer_sizes, make_gate
from .patience import told_when_long
from .readings import stage_stats
from .reporter import Reporter, Reports
from .stacks import describe_busy
from .states import MOVES, RunState
from .stats import PipelineStats
from .threads import ThreadGroup
from .worker import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .recorder import FlightRecorder
    from .tuning import Tuner

__all__ = ["Run"]

_logger = logging.getLogger("spdl_torch.pipeline")

_SOURCE_GRACE_SECONDS = 0.02  # how long stop() waits for a source that is inside the user's next()


class Run:
    """Threads and channels of one pass over the source.

    ``break``, an exception in the loop body and Ctrl-C reach it as ``stop``: every wait ends at
    once, a running op finishes first. A source blocked in the user's own ``next()`` cannot be
    interrupted: it is left to its daemon thread, which ends when that call returns.
    """

    def __init__(
        self,
        spec: PipelineSpec,
        *,
        num_threads: int | None,
        max_failures: MaxFailures | None,
        report_stats_interval: float | None,
        queue_class: Callable[..., StatsQueue] | None,
        task_hook_factory: HookFactory | None,
        recorder: FlightRecorder,
        tuner: Tuner | None = None,
    ) -> None:
        self.state = RunState.NEW
        self.recorder = recorder
        self.spec = spec
        self._is_adjustable = tuner is not None
        # Re-entrant: request_stop() may come from a finalizer on a thread that holds it.
        self._lock = threading.RLock()
        self._failed: tuple[str, list[Exception]] | None = None
        self._pid = os.getpid()
        self._threads = ThreadGroup(self.request_stop)
        self._source_thread: threading.Thread | None = None
        self._started_ns = 0

        extra = {} if report_stats_interval is None else {"interval": report_stats_interval}
        make_queue, make_hooks = (
            queue_class or StatsQueue,
            task_hook_factory or _default_hooks(extra, recorder.enabled),
        )
        source_info = StageInfo(0, 0, spec.source.name)
        sink_info = StageInfo(0, len(spec.stages) + 1, "sink")
        self._gate = make_gate(spec, num_threads, adjustable=self._is_adjustable)
        sizes = buffer_sizes(spec)
        self._source_queue = queue = make_queue(source_info, sizes[0], **extra)
        self._stages: list[Stage] = []
        for stage_id, stage in enumerate(spec.stages, start=1):
            info = StageInfo(0, stage_id, stage.name, stage.concurrency)
            inlet, queue = queue, make_queue(info, sizes[stage_id], **extra)
            limit = max_failures if stage.max_failures is None else stage.max_failures
            self._stages.append(
                (AsyncStage if stage.is_async else Stage)(
                    stage,
                    info,
                    inlet=inlet,
                    outlet=queue,
                    hooks=make_hooks(info),
                    gate=self._gate,
                    budget=FailureBudget(stage.name, limit),
                    owner=self,
                    recorder=recorder,
                    adjustable=self._is_adjustable,
                )
            )
        self._last_queue = queue
        self._sink_queue = make_queue(sink_info, spec.sink.buffer_size, **extra)
        self._source_ring = recorder.new_ring(spec.source.name, 0, role="source")
        self._sink_ring = recorder.new_ring("sink", sink_info.stage_id, role="sink")
        self._consumer = recorder.new_consumer_ring(sink_info.stage_id + 1, self._sink_queue)
        for position, queue in enumerate(self._queues()):
            recorder.add_queue(position, queue.info.stage_name, queue.buffer_size)
        for queue, given in zip(self._queues(), given_buffer_sizes(spec), strict=True):
            if given is None:
                queue.allow_bursts(BURST_BUFFER_SIZE)
        subjects: list[Reports] = [*self._recorders(), *self._queues()]
        if tuner is not None:
            subjects.append(tuner.attach(self))
        self._reporter = Reporter(subjects, self._join_workers)

    # -- life --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start every thread. Raises: PipelineStopped: it was started or stopped before."""
        self._check_process()
        with self._lock:
            if self.state is not RunState.NEW:
                raise PipelineStopped(f"start: the pipeline is {self.state.value}; it runs once.")
            self._advance(RunState.RUNNING)
        self._started_ns = perf_counter_ns()
        try:
            for stage in self._stages:
                stage.enter()
        except Exception as error:
            self.fail("a stage hook raised", [error])
        self._reporter.start(self._threads)
        for stage in reversed(self._stages):  # downstream first: nobody waits for a missing taker
            with self._lock:
                targets = stage.thread_targets()
            for name, target in targets:
                self._threads.spawn(name, target)
        self._threads.spawn("sink", self._run_sink)
        self._source_thread = self._threads.spawn(self.spec.source.name, self._run_source)

    def get(self, timeout: float | None = None) -> Any:
        """The next finished item; starts the run if need be.

        Raises: EOFError: the end; TimeoutError: try again; PipelineFailure; PipelineStopped.
        """
        self._check_process()
        if self.state is RunState.NEW:
            self.start()
        self._consumer.ask(self._sink_queue)
        get = self._sink_queue.get_numbered
        try:
            number, item = (
                told_when_long(get, self._tell_stall) if timeout is None else get(timeout)
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
            self._consumer.got(number)
            return item
        if (failure := self.failure) is not None:
            raise failure
        raise EOFError("get: the pipeline has delivered every item.")

    def _tell_stall(self, seconds: float) -> None:
        busy = describe_busy(self._threads.threads())
        _logger.warning("pipeline: the loop has waited %g s for an item. %s", seconds, busy)

    @property
    def failure(self) -> PipelineFailure | None:
        """What ``get`` raises behind the good items; None as long as nothing failed."""
        # Made anew each time. An exception that was raised refers to the frames that it passed, and
        # by them to the Pipeline: kept here it would keep that alive, whose end ends this run.
        return None if self._failed is None else PipelineFailure(*self._failed)

    def request_stop(self) -> None:
        """End every wait. Never blocks; may be called from any thread, also by a finalizer."""
        if os.getpid() != self._pid:
            return  # a forked child has none of the threads, and perhaps locks that nobody holds
        with self._lock:
            if self.state is RunState.CLOSED:
                return
            self._advance(RunState.STOPPING)
        self._consumer.end()
        for channel in self._queues():
            channel.close()
        if self._gate is not None:
            self._gate.close()
        for stage in self._stages:
            stage.request_stop()
        self._reporter.request_stop()

    def stop(self, timeout: float | None = None) -> None:
        """``request_stop``, then wait for the threads. Idempotent. On a thread of the run, e.g. in
        an op, it does not wait.

        Raises: TimeoutError: an op still runs after ``timeout`` seconds; call again to wait on.
        """
        if os.getpid() != self._pid:
            return
        self.request_stop()
        if self._threads.is_member():
            return  # an op or a callback cannot wait for its own end
        if not self._join_workers(timeout):
            names = ", ".join(self._threads.alive(without=self._source_thread))
            raise TimeoutError(
                f"stop: still running after {timeout} seconds: {names}. An op cannot be "
                "interrupted; stop() again waits on."
            )
        if self._source_thread is not None:
            self._source_thread.join(_SOURCE_GRACE_SECONDS)
            if self._source_thread.is_alive():
                _logger.info("stop: the source is blocked in its own next(); its thread is left.")
        self._close()

    def fail(self, message: str, errors: list[Exception]) -> None:
        """Take no new items; ``get`` raises after the last good one. Never blocks."""
        with self._lock:
            if self._failed is None:
                self._failed = message, list(errors)
        self._source_queue.finish()

    def _close(self) -> None:
        """The data has ended or the run was stopped; the threads are ending or have ended."""
        with self._lock:
            if self.state is RunState.CLOSED:
                return
            if self.state is RunState.RUNNING:
                self._advance(RunState.DRAINING)
        self._consumer.end()
        self._reporter.request_stop()
        # Every worker has put its last item, so this join is short. A source may be blocked in
        # the user's code (after a failure): nobody waits for it.
        self._join_workers()
        with self._lock:
            self._advance(RunState.CLOSED)
        self.recorder.finish()

    def _join_workers(self, timeout: float | None = None) -> bool:
        return self._threads.join(timeout, without=self._source_thread)

    def _advance(self, state: RunState) -> None:
        if state is self.state:
            return
        assert state in MOVES[self.state], f"{self.state} -> {state}"
        self.state = state

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise PipelineStopped(
                "this process is a fork; the pipeline's threads stayed in process "
                f"{self._pid}. Build a pipeline after the fork."
            )

    # -- what a tuner calls --------------------------------------------------------------------

    @property
    def is_taking(self) -> bool:
        """Whether it runs, and the source has more."""
        return self.state is RunState.RUNNING

    @property
    def num_delivered(self) -> int:
        """Items that the consumer took so far."""
        return self._sink_queue.counters().num_got

    def set_concurrency(self, stage: str, count: int) -> None:
        """Run at most ``count`` calls of the op at once: those that run already end first. What
        comes out, and in which order, stays the same. Without effect when the run has ended.

        Raises: ValueError: the stage cannot be changed.
        """
        live = next((each for each in self._stages if each.spec.name == stage), None)
        if not self._is_adjustable or live is None or not live.spec.is_adjustable or count < 1:
            raise ValueError(
                f"set_concurrency: stage must be one with threads of its own, of a pipeline built "
                f"with a tuner, and count >= 1, got {stage!r} and {count}."
            )
        with self._lock:  # a stop either sees the new threads, or they are not started
            if self.state not in (RunState.NEW, RunState.RUNNING, RunState.DRAINING):
                return
            place = self._stages.index(live)
            self._grow(place, default_buffer_size(count))
            self._grow(place + 1, default_buffer_size(count))
            if not live.crew.has_begun:  # nor need there be anybody who could leave
                live.crew.headcount.count = count
                return
            for name, target in live.resize(count):
                self._threads.spawn(name, target)

    def set_room(self, room: Mapping[str, int]) -> None:
        """Let that many items wait behind each stage named, if that is more than now."""
        for place, stage in enumerate(self._stages, start=1):
            if stage.spec.name in room:
                self._grow(place, room[stage.spec.name])

    def _grow(self, place: int, capacity: int) -> None:
        """More room in the queue at ``place``, unless the user gave a number."""
        queue = self._queues()[place]
        if given_buffer_sizes(self.spec)[place] is None and capacity > queue.capacity:
            queue.grow(capacity)
            self.recorder.set_capacity(place, capacity)

    # -- source and sink threads ---------------------------------------------------------------

    def _run_source(self) -> None:
        queue, ring = self._source_queue, self._source_ring
        since_ns = ring.begin()
        try:
            for item in iterate(self.spec.source):
                ended_ns = perf_counter_ns()
                output = queue.put(item)
                done_ns = perf_counter_ns()
                if done_ns - since_ns >= ring.shortest_ns:
                    ring.add(since_ns, since_ns, ended_ns, done_ns, -1, -1, output, None, queue)
                since_ns = done_ns
        except ChannelClosed:
            pass
        except BaseException as error:
            error.add_note(f"in the source {self.spec.source}, after {len_put(queue)} items")
            self.fail("the source raised", [_wrapped(error)])
        finally:
            queue.finish()
            with self._lock:
                if self.state is RunState.RUNNING:
                    self._advance(RunState.DRAINING)

    def _run_sink(self) -> None:
        before, behind, ring = self._last_queue, self._sink_queue, self._sink_ring
        since_ns = ring.begin()
        try:
            while True:
                number, item = before.get_numbered()
                got_ns = perf_counter_ns()
                output = behind.put(item)
                item = None  # or it would stay alive while this thread waits
                done_ns = perf_counter_ns()
                if done_ns - since_ns >= ring.shortest_ns:
                    ring.add(since_ns, got_ns, got_ns, done_ns, -1, number, output, before, behind)
                since_ns = done_ns
        except (EndOfChannel, ChannelClosed):
            pass
        except BaseException as error:  # of a user's queue class: the stages must not wait for room
            self.fail(
                "the sink broke", [error if isinstance(error, Exception) else _wrapped(error)]
            )
            before.close()
        finally:
            self._sink_queue.finish()

    # -- statistics ----------------------------------------------------------------------------

    def _recorders(self) -> list[TaskStatsHook]:
        return [h for stage in self._stages for h in stage.hooks if isinstance(h, TaskStatsHook)]

    def _queues(self) -> list[StatsQueue]:
        return [self._source_queue, *(stage.outlet for stage in self._stages), self._sink_queue]

    def stats(self) -> PipelineStats:
        """Figures since the start; waits that are still open are counted."""
        elapsed_ns = perf_counter_ns() - self._started_ns if self._started_ns else 0
        wait_ns = self._sink_queue.counters().get_wait[0]
        return PipelineStats(
            elapsed=elapsed_ns / 1e9,
            consumer_wait_ratio=min(1.0, wait_ns / max(1, elapsed_ns)),
            stages=tuple(map(stage_stats, self._stages)),
        )

    @property
    def num_lost(self) -> int:
        """Items that ops have dropped or failed so far. What an aggregate leaves over at the end of
        the data is not lost on the way.
        """
        return sum(
            stage.num_failures + (stage.spec.kind is not OpKind.AGGREGATE and stage.num_dropped)
            for stage in self._stages
        )

    def check_balance(self) -> None:
        """Assert, on a closed run, that every item is accounted for at every 1:1 stage."""
        for stage in self._stages:
            if stage.spec.kind.value.endswith("function"):
                taken = stage.inlet.counters().num_got
                # What waits for its turn in an ordered outlet was not counted as put yet.
                delivered = stage.outlet.counters().num_got + len(stage.outlet)
                dropped, failed = stage.num_dropped, stage.num_failures
                lost = taken - delivered - dropped - failed
                cut_short = stage.cut_short or stage.outlet.closed
                discarding = stage.crew.num_seats if cut_short else 0
                assert 0 <= lost <= discarding, f"{taken=} {delivered=} {dropped=} {failed=}"

    def describe(self) -> str:
        """State and every stage, one line each."""
        return "\n".join([f"Pipeline [{self.state.value}]", *(f"  {p}" for p in self.spec.parts())])


def _wrapped(error: BaseException) -> Exception:
    """What is no Exception (SystemExit) cannot be a member of an ExceptionGroup."""
    if isinstance(error, Exception):
        return error
    wrapped = RuntimeError(f"{type(error).__name__} in a thread of the pipeline")
    wrapped.__cause__ = error
    return wrapped


def len_put(queue: StatsQueue) -> int:
    """How many items were put so far."""
    return queue.counters().num_put


def _default_hooks(extra: dict[str, float], enabled: bool) -> HookFactory:
    return lambda info: [TaskStatsHook(info, **extra)] if enabled else []
