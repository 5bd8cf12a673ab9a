"""One run of a pipeline: owns its threads and channels from start to close.

Nothing here refers to the :class:`~spdl_torch.pipeline.Pipeline` that the user holds, so that
dropping that object can end the run.
"""

from __future__ import annotations

import enum
import logging
import os
import threading
from collections.abc import AsyncIterable, Callable, Iterator
from time import perf_counter_ns
from typing import Any

from ..errors import PipelineFailure, PipelineStopped
from .channel import Channel, ChannelClosed, EndOfChannel
from .coroutines import AsyncStage
from .definition import (
    BURST_BUFFER_SIZE,
    MaxFailures,
    PipelineSpec,
    SourceSpec,
    default_buffer_size,
)
from .failures import FailureBudget
from .hooks import HookFactory, StageInfo, StatsQueue, TaskStatsHook
from .reporter import Reporter
from .stats import PipelineStats, StageStats, queue_stats, task_stats
from .threads import ThreadGroup
from .worker import Stage

__all__ = ["Run", "RunState"]

_logger = logging.getLogger("spdl_torch.pipeline")

_SOURCE_GRACE_SECONDS = 0.02  # how long stop() waits for a source that is inside the user's next()


class RunState(enum.Enum):
    """Where a run is. Only ``Run._advance`` moves it, holding the lock."""

    NEW = "new"  # built, no thread exists
    RUNNING = "running"  # workers take, apply, put
    DRAINING = "draining"  # the source is exhausted or the run failed; items are in flight
    STOPPING = "stopping"  # stop was asked for: channels refuse items
    CLOSED = "closed"  # every thread has ended or, blocked in the user's source, was left


_MOVES: dict[RunState, frozenset[RunState]] = {
    RunState.NEW: frozenset({RunState.RUNNING, RunState.STOPPING}),
    RunState.RUNNING: frozenset({RunState.DRAINING, RunState.STOPPING}),
    RunState.DRAINING: frozenset({RunState.STOPPING, RunState.CLOSED}),
    RunState.STOPPING: frozenset({RunState.CLOSED}),
    RunState.CLOSED: frozenset(),
}


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
    ) -> None:
        self.state = RunState.NEW
        self._spec = spec
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
            task_hook_factory or _default_hooks(extra),
        )
        source_info = StageInfo(0, 0, spec.source.name)
        sink_info = StageInfo(0, len(spec.stages) + 1, "sink")
        self._gate = _make_gate(spec, num_threads)
        sizes = _buffer_sizes(spec)
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
                )
            )
        self._last_queue = queue
        self._sink_queue = make_queue(sink_info, spec.sink.buffer_size, **extra)
        for queue, given in zip(self._queues(), _given_buffer_sizes(spec), strict=True):
            if given is None:
                queue.allow_bursts(BURST_BUFFER_SIZE)
        self._reporter = Reporter([*self._recorders(), *self._queues()], self._join_workers)

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
            for name, target in stage.thread_targets():
                self._threads.spawn(name, target)
        self._threads.spawn("sink", self._run_sink)
        self._source_thread = self._threads.spawn(self._spec.source.name, self._run_source)

    def get(self, timeout: float | None = None) -> Any:
        """The next finished item; starts the run if need be.

        Raises: EOFError: the end; TimeoutError: try again; PipelineFailure; PipelineStopped.
        """
        self._check_process()
        if self.state is RunState.NEW:
            self.start()
        try:
            return self._sink_queue.get(timeout)
        except EndOfChannel:
            self._close()
        except ChannelClosed:
            raise PipelineStopped("get: the pipeline was stopped.") from None
        if (failure := self.failure) is not None:
            raise failure
        raise EOFError("get: the pipeline has delivered every item.")

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
        self._reporter.request_stop()
        # Every worker has put its last item, so this join is short. A source may be blocked in
        # the user's code (after a failure): nobody waits for it.
        self._join_workers()
        with self._lock:
            self._advance(RunState.CLOSED)

    def _join_workers(self, timeout: float | None = None) -> bool:
        return self._threads.join(timeout, without=self._source_thread)

    def _advance(self, state: RunState) -> None:
        if state is self.state:
            return
        assert state in _MOVES[self.state], f"{self.state} -> {state}"
        self.state = state

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise PipelineStopped(
                "this process is a fork; the pipeline's threads stayed in process "
                f"{self._pid}. Build a pipeline after the fork."
            )

    # -- source and sink threads ---------------------------------------------------------------

    def _run_source(self) -> None:
        queue = self._source_queue
        try:
            for item in _iterate(self._spec.source):
                queue.put(item)
        except ChannelClosed:
            pass
        except Exception as error:
            error.add_note(f"in the source {self._spec.source}, after {len_put(queue)} items")
            self.fail("the source raised", [error])
        except BaseException as error:
            wrapped = RuntimeError(f"{type(error).__name__} in the source")
            wrapped.__cause__ = error
            self.fail("the source raised", [wrapped])
        finally:
            queue.finish()
            with self._lock:
                if self.state is RunState.RUNNING:
                    self._advance(RunState.DRAINING)

    def _run_sink(self) -> None:
        try:
            while True:
                self._sink_queue.put(self._last_queue.get())
        except (EndOfChannel, ChannelClosed):
            pass
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
            stages=tuple(map(_stage_stats, self._stages)),
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
                discarding = stage.spec.concurrency if cut_short else 0
                assert 0 <= lost <= discarding, f"{taken=} {delivered=} {dropped=} {failed=}"

    def describe(self) -> str:
        """State and every stage, one line each."""
        return "\n".join(
            [f"Pipeline [{self.state.value}]", *(f"  {p}" for p in self._spec.parts())]
        )


def len_put(queue: StatsQueue) -> int:
    """How many items were put so far."""
    return queue.counters().num_put


def _stage_stats(stage: Stage) -> StageStats:
    recorder = next((h for h in stage.hooks if isinstance(h, TaskStatsHook)), None)
    tasks = recorder.counters() if recorder else TaskStatsHook(stage.info).counters()
    inlet, outlet = stage.inlet.counters(), stage.outlet.counters()
    thread_ns = max(1, tasks.elapsed_ns * stage.spec.concurrency)
    return StageStats(
        name=stage.spec.name,
        concurrency=stage.spec.concurrency,
        tasks=task_stats(tasks),
        queue=queue_stats(outlet),
        num_dropped=stage.num_dropped,
        busy_ratio=tasks.busy_ns / thread_ns,
        wait_in_ratio=min(1.0, inlet.get_wait[0] / thread_ns),
        wait_out_ratio=min(1.0, outlet.put_wait[0] / thread_ns),
    )


def _default_hooks(extra: dict[str, float]) -> HookFactory:
    return lambda info: [TaskStatsHook(info, **extra)]


def _make_gate(spec: PipelineSpec, num_threads: int | None) -> Channel[None] | None:
    """Tokens for the bound on running tasks; None where the stages' own bounds are tighter."""
    own = sum(s.concurrency for s in spec.stages if s.executor is None and not s.is_async)
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"build: num_threads must be >= 1 or None, got {num_threads}.")
    if num_threads is None or num_threads >= own:
        return None
    gate: Channel[None] = Channel(num_threads)
    for _ in range(num_threads):
        gate.put(None)
    return gate


def _buffer_sizes(spec: PipelineSpec) -> list[int]:
    """Capacity of the queue after the source and after each stage."""
    threads = [1, *(stage.concurrency for stage in spec.stages), 1]
    return [
        size or default_buffer_size(max(before, after))
        for size, before, after in zip(
            _given_buffer_sizes(spec), threads, threads[1:], strict=False
        )
    ]


def _given_buffer_sizes(spec: PipelineSpec) -> list[int | None]:
    """What the user said of each queue, the sink's included."""
    return [None, *(stage.buffer_size for stage in spec.stages), spec.sink.buffer_size]


def _iterate(source: SourceSpec) -> Iterator[Any]:
    if isinstance(source.iterable, AsyncIterable):
        return _iterate_async(source.iterable)
    return iter(source.iterable)


def _iterate_async(iterable: AsyncIterable[Any]) -> Iterator[Any]:
    """Drive an async source on a loop of its own; between items the loop stands still."""
    import asyncio

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
