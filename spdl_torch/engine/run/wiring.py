"""The parts of a run: its source, stages, sink and queues, created from a definition.

They are created, and numbered, upstream first: a stage, the queue after it and its rows in a trace
share one *stage number*.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..definition.ops import OpKind
from ..definition.specs import BURST_BUFFER_SIZE, default_buffer_size
from ..failures import FailureBudget
from ..hooks.stage_info import StageInfo
from ..stage.aggregate_stage import AggregateStage, AggregatorStage
from ..stage.async_stage import AsyncStage
from ..stage.generator_stage import ExpandingStage
from ..stage.source import Source
from ..stage.stage import Stage
from .sink import Sink

if TYPE_CHECKING:
    from ..channel.channel import Channel
    from ..definition.specs import MaxFailures, PipelineSpec, SourceSpec, StageSpec
    from ..hooks.queue_class import QueueMaker
    from ..hooks.stats_queue import StatsQueue
    from ..hooks.task_hooks import HookFactory
    from ..recorder.flight_recorder import FlightRecorder
    from .run import Run


@dataclass(frozen=True, slots=True)
class QueueAt:
    """A queue and the number of the stage that fills it."""

    stage_number: int
    queue: StatsQueue
    is_given: bool
    """Whether the user gave the size; then it never changes."""


class Wiring:
    """Makes the parts of a run."""

    def __init__(
        self,
        spec: PipelineSpec[Any],
        *,
        make_queue: QueueMaker,
        make_hooks: HookFactory,
        max_failures: MaxFailures | None,
        task_limit: Channel[None] | None,
        owner: Run,
        recorder: FlightRecorder,
        adjustable: bool,
        first_id: int,
    ) -> None:
        self.stages: list[Stage] = []
        """The stages, upstream first."""
        self.queues: list[QueueAt] = []
        """The queues, from that of the source to that of the sink."""
        self._make_queue, self._make_hooks = make_queue, make_hooks
        self._max_failures, self._task_limit = max_failures, task_limit
        self._owner, self._recorder = owner, recorder
        self._adjustable, self._first_id = adjustable, first_id
        self._num_stages = 0
        self._is_continuous = spec.src.continuous
        takers = [*(stage.concurrency for stage in spec.pipes), 1]
        last = self._source(spec.src, takers[0])
        for stage, after in zip(spec.pipes, takers[1:], strict=True):
            last = self._stage(stage, last, after)
        info = self.next_info("sink")
        stage_number = self._number_of(info)
        queue = self._queue(info, stage_number, spec.sink.buffer_size)
        ring = recorder.new_ring("sink", stage_number, role="sink")
        self.sink = Sink(last, queue, ring, owner)
        self.consumer = recorder.new_consumer_ring(stage_number + 1, queue)
        """The ring in which the consumer's waits are recorded."""

    def next_info(self, name: str, concurrency: int = 1) -> StageInfo:
        """Return the next stage, with its number."""
        stage_id = self._first_id + self._num_stages
        self._num_stages += 1
        return StageInfo(0, stage_id, name, concurrency)

    def _number_of(self, info: StageInfo) -> int:
        return info.stage_id - self._first_id

    def _queue(
        self,
        info: StageInfo,
        stage_number: int,
        given: int | None,
        threads: tuple[int, int] = (1, 1),
    ) -> StatsQueue:
        """Create a queue; ``threads``: how many fill it, how many take from it."""
        queue = self._make_queue(info, given or default_buffer_size(max(threads)))
        if given is None:
            queue.allow_bursts(BURST_BUFFER_SIZE)
        self.queues.append(QueueAt(stage_number, queue, given is not None))
        self._recorder.add_queue(stage_number, info.stage_name, queue.buffer_size)
        return queue

    def _source(self, spec: SourceSpec, takers: int) -> StatsQueue:
        info = self.next_info(spec.name)
        stage_number = self._number_of(info)
        queue = self._queue(info, stage_number, None, (1, takers))
        ring = self._recorder.new_ring(spec.name, stage_number, role="source")
        self.source = Source(spec, queue, ring, self._owner)
        return queue

    def _stage(self, spec: StageSpec, inlet: StatsQueue, takers: int) -> StatsQueue:
        info = self.next_info(spec.name, spec.concurrency)
        stage_number = self._number_of(info)
        queue = self._queue(info, stage_number, spec.buffer_size, (spec.concurrency, takers))
        limit = self._max_failures if spec.max_failures is None else spec.max_failures
        stage = _class_of(spec)(
            spec,
            info,
            inlet=inlet,
            outlet=queue,
            hooks=self._make_hooks(info),
            task_limit=self._task_limit,
            budget=FailureBudget(spec.name, limit),
            owner=self._owner,
            recorder=self._recorder,
            stage_number=stage_number,
            adjustable=self._adjustable,
            has_sentinels=self._is_continuous,
        )
        self.stages.append(stage)
        return queue


def _class_of(spec: StageSpec) -> type[Stage]:
    if spec.is_async:
        return AsyncStage
    if spec.kind is OpKind.AGGREGATE:
        return AggregateStage
    if spec.kind is OpKind.AGGREGATOR:
        return AggregatorStage
    return ExpandingStage if spec.kind is OpKind.GENERATOR and spec.executor is None else Stage
