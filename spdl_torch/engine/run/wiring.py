"""The network of a run: its nodes and queues, created from a definition.

A node is a stage or a merge. Sources and nodes are created, and numbered, upstream first: a node,
the queue after it and its rows in a trace share one *stage number*.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from ..definition.ops import OpKind
from ..definition.specs import (
    BURST_BUFFER_SIZE,
    MergeSpec,
    PipelineSpec,
    SourceSpec,
    StageSpec,
    default_buffer_size,
)
from ..failures import FailureBudget
from ..graph.merge import ArrivalMerge, BatchMerge
from ..graph.merge_op import OpMerge
from ..graph.router import PathQueues, router_stage
from ..hooks.stage_info import StageInfo
from ..stage.aggregate_stage import AggregateStage, AggregatorStage
from ..stage.async_stage import AsyncStage
from ..stage.generator_stage import ExpandingStage
from ..stage.source import Source, SourceOwner
from ..stage.stage import Stage
from .sink import Sink

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..channel.channel import Channel
    from ..definition.specs import MaxFailures
    from ..hooks.queue_class import QueueMaker
    from ..hooks.stats_queue import StatsQueue
    from ..hooks.task_hooks import HookFactory
    from ..recorder.flight_recorder import FlightRecorder


class Node(Protocol):
    """A stage or a merge: it takes from queues and puts into queues, on threads of its own."""

    def enter(self) -> None:
        """Enter the hooks, before any thread starts."""

    def thread_targets(self) -> list[tuple[str, Callable[[], None]]]:
        """Return name and target of each thread that it begins with."""

    def request_stop(self) -> None:
        """End the waits that closed queues do not end. Never blocks."""


@dataclass(frozen=True, slots=True)
class QueueAt:
    """A queue and the number of the stage that fills it."""

    stage_number: int
    queue: StatsQueue
    is_given: bool
    """Whether the user gave the size; then it never changes."""


@dataclass(frozen=True, slots=True)
class Network:
    """The sources, stages and queues of a run, upstream first."""

    sources: list[Source] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    """The stages, and what joins their paths."""
    queues: list[QueueAt] = field(default_factory=list)

    def queue_at(self, queue: StatsQueue) -> QueueAt:
        """Return where a queue of the run stands."""
        return next(at for at in self.queues if at.queue is queue)


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
        owner: SourceOwner,
        recorder: FlightRecorder,
        adjustable: bool,
        first_id: int,
    ) -> None:
        self.network = Network()
        self._make_queue, self._make_hooks = make_queue, make_hooks
        self._max_failures, self._task_limit = max_failures, task_limit
        self._owner, self._recorder = owner, recorder
        self._adjustable, self._first_id = adjustable, first_id
        self._num_stages = 0
        self._is_continuous = spec.is_continuous
        if not spec.is_chain:
            recorder.branches()
        last = self._pipeline(spec, takers=1)
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
        self.network.queues.append(QueueAt(stage_number, queue, given is not None))
        self._recorder.add_queue(stage_number, info.stage_name, queue.buffer_size)
        return queue

    def _pipeline(
        self, spec: PipelineSpec[Any], takers: int, last: int | None = None
    ) -> StatsQueue:
        """Create source and stages; ``last``: the size given for the last queue."""
        first = spec.pipes[0].concurrency if spec.pipes else takers
        queue = self._source(spec.src, first, None if spec.pipes else last)
        return self._chain(spec.pipes, queue, takers, last)

    def _source(self, spec: SourceSpec, takers: int, given: int | None) -> StatsQueue:
        if isinstance(spec, MergeSpec):
            return self._merge(spec, takers, given)
        info = self.next_info(spec.name)
        stage_number = self._number_of(info)
        queue = self._queue(info, stage_number, given, (1, takers))
        ring = self._recorder.new_ring(spec.name, stage_number, role="source")
        self.network.sources.append(Source(spec, queue, ring, self._owner))
        return queue

    def _chain(
        self,
        stages: Sequence[StageSpec],
        inlet: StatsQueue,
        takers: int,
        last: int | None = None,
        *,
        keeps_places: bool = False,
    ) -> StatsQueue:
        """Create one stage after the other; return the queue after the last one."""
        for number, spec in enumerate(stages):
            is_last = number == len(stages) - 1
            after = takers if is_last else stages[number + 1].concurrency
            given = last if is_last and spec.buffer_size is None else spec.buffer_size
            add = self._path_variants if spec.kind is OpKind.PATH_VARIANTS else self._stage
            inlet = add(spec, inlet, after, given, keeps_places=keeps_places)
        return inlet

    def _stage(
        self,
        spec: StageSpec,
        inlet: StatsQueue,
        takers: int,
        given: int | None,
        *,
        keeps_places: bool = False,
    ) -> StatsQueue:
        info = self.next_info(spec.name, spec.concurrency)
        queue = self._queue(info, self._number_of(info), given, (spec.concurrency, takers))
        self._add_stage(_class_of(spec), spec, info, inlet, queue, keeps_places=keeps_places)
        return queue

    def _add_stage(
        self,
        stage_class: type[Stage],
        spec: StageSpec,
        info: StageInfo,
        inlet: StatsQueue,
        outlet: StatsQueue,
        *,
        keeps_places: bool = False,
    ) -> None:
        limit = self._max_failures if spec.max_failures is None else spec.max_failures
        stage = stage_class(
            spec,
            info,
            inlet=inlet,
            outlet=outlet,
            hooks=self._make_hooks(info),
            task_limit=self._task_limit,
            budget=FailureBudget(spec.name, limit),
            owner=self._owner,
            recorder=self._recorder,
            stage_number=self._number_of(info),
            adjustable=self._adjustable,
            has_sentinels=self._is_continuous or keeps_places,
            keeps_places=keeps_places,
        )
        self.network.stages.append(stage)
        self.network.nodes.append(stage)

    def _path_variants(
        self,
        spec: StageSpec,
        inlet: StatsQueue,
        takers: int,
        given: int | None,
        *,
        keeps_places: bool = False,
    ) -> StatsQueue:
        """Create a router, the chains of its paths, and the merge of their ends."""
        router = router_stage(spec)
        info = self.next_info(spec.name)
        stage_number = self._number_of(info)
        heads = [
            self._queue(
                replace(info, stage_name=f"{spec.name}_path{n}"), stage_number, None, (1, t)
            )
            for n, t in enumerate(path[0].concurrency for path in spec.paths)
        ]
        # PathQueues lacks only the ordered puts of a queue, which a router never uses.
        outlet = cast("StatsQueue", PathQueues(heads))
        stage_class = _class_of(router)
        self._add_stage(stage_class, router, info, inlet, outlet, keeps_places=keeps_places)
        if not spec.batched:
            tails = [
                self._chain(path, head, 1) for path, head in zip(spec.paths, heads, strict=True)
            ]
        else:
            tails = [
                self._chain(_in_order(path), head, 1, keeps_places=True)
                for path, head in zip(spec.paths, heads, strict=True)
            ]
        merge_info = self.next_info(f"{spec.name}_merge")
        queue = self._queue(merge_info, self._number_of(merge_info), given, (1, takers))
        node: Node
        if spec.batched:
            node = BatchMerge(merge_info, tails, queue, self._rings(merge_info, 1), self._owner)
            node.keeps_places = keeps_places
        else:
            rings = self._rings(merge_info, len(tails))
            node = ArrivalMerge(merge_info, tails, queue, rings, self._owner)
        self.network.nodes.append(node)
        return queue

    def _merge(self, spec: MergeSpec, takers: int, given: int | None) -> StatsQueue:
        """Create the chains of the merged pipelines; a sink's size is that of its last queue."""
        tails = [
            self._pipeline(pipeline, 1, pipeline.sink.buffer_size)
            for pipeline in spec.pipeline_configs
        ]
        info = self.next_info(spec.name)
        queue = self._queue(info, self._number_of(info), given, (1, takers))
        if spec.op is None:
            rings = self._rings(info, len(tails))
            self.network.nodes.append(ArrivalMerge(info, tails, queue, rings, self._owner))
            return queue
        node = OpMerge(info, tails, queue, self._rings(info, 1), self._owner)
        node.set_op(spec.op, is_continuous=self._is_continuous)
        self.network.nodes.append(node)
        return queue

    def _rings(self, info: StageInfo, count: int) -> list[Any]:
        stage_number = self._number_of(info)
        return [self._recorder.new_ring(info.stage_name, stage_number, n) for n in range(count)]


def _class_of(spec: StageSpec) -> type[Stage]:
    if spec.is_async:
        return AsyncStage
    if spec.kind is OpKind.AGGREGATE:
        return AggregateStage
    if spec.kind is OpKind.AGGREGATOR:
        return AggregatorStage
    return ExpandingStage if spec.kind is OpKind.GENERATOR and spec.executor is None else Stage


def _in_order(path: Sequence[StageSpec]) -> list[StageSpec]:
    """Return the path with every stage in order, so that parts of lists keep their places."""
    return [replace(stage, output_order="input") for stage in path]
