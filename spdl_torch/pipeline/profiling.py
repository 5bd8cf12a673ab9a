"""Measure each stage of a pipeline alone, with more and fewer threads, to see how far it scales."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import os
import random
import sys
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..engine.definition.ops import OpKind
from ..engine.definition.specs import MergeSpec, PipelineSpec, SinkSpec, SourceSpec
from ..engine.hooks.stats_queue import StatsQueue
from ..scopes import scope
from .builder import build_pipeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from ..engine.definition.specs import StageSpec
    from ..engine.stats.perf_stats import QueuePerfStats
    from .pipeline import Pipeline

_logger = logging.getLogger("spdl_torch.pipeline")

_CONCURRENCIES = (32, 16, 8, 4, 1)

_KEPT_BYTES = 1 << 30
"""Bytes of a stage's outputs that are kept as the next one's inputs; beyond, inputs repeat."""


@dataclass(frozen=True, slots=True)
class ProfileStats:
    """A stage at one concurrency."""

    concurrency: int
    qps: float
    """Items passed on per second."""
    occupancy_rate: float
    """Share of the time in which an item waited after it, 0 to 1."""


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """A stage at every concurrency tried; aggregates and generators of lists run at 1 alone."""

    name: str
    stats: Sequence[ProfileStats]


class ProfileHook(ABC):
    """Code around what is measured; both methods return context managers."""

    @abstractmethod
    def stage_profile_hook(self, stage: str, concurrency: int) -> AbstractContextManager[Any]:
        """Return a context that is entered around every run of a stage."""

    @abstractmethod
    def pipeline_profile_hook(self) -> AbstractContextManager[Any]:
        """Return a context that is entered around the whole profile."""


class _NoHook(ProfileHook):
    @scope
    def stage_profile_hook(self, stage: str, concurrency: int) -> Iterator[None]:
        yield

    @scope
    def pipeline_profile_hook(self) -> Iterator[None]:
        yield


def profile_pipeline(
    cfg: PipelineSpec[Any],
    num_inputs: int = 1000,
    *,
    callback: Callable[[ProfileResult], None] | None = None,
    hook: ProfileHook | None = None,
) -> list[ProfileResult]:
    """Run each stage alone, at concurrency 32, 16, 8, 4 and 1, with what the stages before it make
    of the source's first items.

    num_inputs: items for each run of a stage. At most 1 GiB of them is kept, as far as their size
        can be seen; if that is less than ``num_inputs``, they are given repeatedly.
    callback: called with each result as soon as it is known.
    Returns: a result for each stage, those of path variants and of merged pipelines included; []
        on ranks of a machine other than the first (``LOCAL_RANK``).
    Raises: RuntimeError: a stage gets no item, because the source is empty or the stages before
        it drop or fail every item; ValueError: ``num_inputs`` < 1.
    """
    if num_inputs < 1:
        raise ValueError(f"profile_pipeline: num_inputs must be >= 1, got {num_inputs}.")
    hook = hook or _NoHook()
    profiling = _Profiling(num_inputs, callback or (lambda _: None), hook)
    with hook.pipeline_profile_hook():
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            profiling.pipeline(cfg)
    return profiling.results


class _Profiling:
    def __init__(
        self, num_inputs: int, callback: Callable[[ProfileResult], None], hook: ProfileHook
    ) -> None:
        self.results: list[ProfileResult] = []
        self._num_inputs = num_inputs
        self._callback = callback
        self._hook = hook

    def pipeline(self, cfg: PipelineSpec[Any]) -> list[Any]:
        """Measure a pipeline's stages; return its outputs that were kept."""
        if isinstance(cfg.src, MergeSpec):
            inputs = [item for part in cfg.src.pipeline_configs for item in self.pipeline(part)]
            random.shuffle(inputs)
        else:
            inputs = self._first_items(cfg.src)
        return self._stages(cfg.pipes, inputs)

    def _first_items(self, source: SourceSpec) -> list[Any]:
        spec = PipelineSpec[Any](replace(source, continuous=False), (), SinkSpec(1))
        with _silent(spec).auto_stop() as pipeline:
            return _kept(itertools.islice(pipeline, self._num_inputs))

    def _stages(self, stages: Sequence[StageSpec], inputs: list[Any]) -> list[Any]:
        for stage in stages:
            measure = self._paths if stage.kind is OpKind.PATH_VARIANTS else self._stage
            inputs = measure(stage, inputs)
        return inputs

    def _paths(self, stage: StageSpec, inputs: list[Any]) -> list[Any]:
        """Deal the inputs out as the router says, and measure each path."""
        parts: list[list[Any]] = [[] for _ in stage.paths]
        for item in inputs:
            indices = _result_of(stage.op, item)
            if stage.batched:
                lists: list[list[Any]] = [[] for _ in parts]
                for member, index in zip(item, indices, strict=True):
                    lists[index].append(member)
                for part, members in zip(parts, lists, strict=True):
                    part += [members] if members else []
            else:
                parts[indices].append(item)
        outputs = [
            output
            for path, part in zip(stage.paths, parts, strict=True)
            if part  # no input takes this path: it is not measured
            for output in self._stages(path, part)
        ]
        random.shuffle(outputs)
        return outputs

    def _stage(self, stage: StageSpec, inputs: list[Any]) -> list[Any]:
        if not inputs:
            raise RuntimeError(
                f"profile_pipeline: there is no input for stage {stage.name!r}: the source is "
                "empty, or the stages before it drop or fail every item."
            )
        stats: list[ProfileStats] = []
        outputs: list[Any] = []
        for concurrency in _CONCURRENCIES if _may_run_at_once(stage) else (1,):
            with self._hook.stage_profile_hook(stage.name, concurrency):
                made, qps, occupancy = self._run(replace(stage, concurrency=concurrency), inputs)
            outputs = made or outputs
            stats.append(ProfileStats(concurrency, qps, occupancy))
            _logger.info(
                "profile_pipeline: %s[%d]: %.1f items/s, occupied %.0f %%",
                stage.name,
                concurrency,
                qps,
                occupancy * 100,
            )
        result = ProfileResult(stage.name, stats)
        self.results.append(result)
        self._callback(result)
        return outputs

    def _run(self, stage: StageSpec, inputs: list[Any]) -> tuple[list[Any], float, float]:
        """Return the outputs that were kept, the rate and the occupancy."""
        source = SourceSpec(itertools.islice(itertools.cycle(inputs), self._num_inputs))
        spec = PipelineSpec[Any](source, (stage,), SinkSpec(2))
        start = perf_counter()
        with _silent(spec).auto_stop() as pipeline:
            outputs = _kept(pipeline)
            seconds = perf_counter() - start
            figures = pipeline.snapshot().stages[0].queue
        return outputs, figures.num_items / seconds, figures.occupancy_rate


class _SilentQueue(StatsQueue):
    async def interval_stats_callback(self, stats: QueuePerfStats) -> None:
        """Log nothing."""


def _silent(spec: PipelineSpec[Any]) -> Pipeline[Any]:
    """Build a pipeline that logs no statistics: profiling itself logs one line a run."""
    return build_pipeline(
        spec, max_failures=-1, queue_class=_SilentQueue, task_hook_factory=lambda _: []
    )


def _may_run_at_once(stage: StageSpec) -> bool:
    is_disaggregate = stage.kind is OpKind.GENERATOR and stage.name == "disaggregate"
    return stage.kind not in (OpKind.AGGREGATE, OpKind.AGGREGATOR) and not is_disaggregate


def _result_of(router: Callable[[Any], Any], item: Any) -> Any:
    result = router(item)
    if not inspect.isawaitable(result):
        return result

    async def wait() -> Any:
        return await result

    return asyncio.run(wait())


def _kept(items: Iterator[Any] | Any) -> list[Any]:
    """Take all of the items; return the first ones, as many as may be kept."""
    items, kept, num_bytes = iter(items), [], 0
    for item in items:
        kept.append(item)
        num_bytes += _size(item)
        if num_bytes >= _KEPT_BYTES:
            break
    deque(items, maxlen=0)
    return kept


def _size(item: Any) -> int:
    """Return the bytes of an array's or tensor's elements, of a container's members."""
    nbytes = getattr(item, "nbytes", None)
    if isinstance(nbytes, int):
        return nbytes
    if isinstance(item, list | tuple | set):
        return sum(map(_size, item))
    if isinstance(item, dict):
        return sum(map(_size, item.values()))
    return sys.getsizeof(item)
