"""Pipelines, as users define, hold and run them: ``builder`` makes a ``pipeline`` of stages, which
the engine runs.

The names below are imported when they are first used: a ``DataLoader`` runs no pipeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spdl_torch.lazy_names import hand_on

from ..errors import PipelineFailure as PipelineFailure, PipelineStopped as PipelineStopped

if TYPE_CHECKING:
    from ..engine.definition import (
        Aggregate as Aggregate,
        Aggregator as Aggregator,
        Disaggregate as Disaggregate,
        Pipe as Pipe,
        PipelineSpec as PipelineSpec,
        SinkSpec as SinkSpec,
        SourceSpec as SourceSpec,
    )
    from ..engine.hooks import (
        StageInfo as StageInfo,
        TaskHook as TaskHook,
        TaskStatsHook as TaskStatsHook,
    )
    from ..engine.stage_hooks import StatsQueue as StatsQueue
    from ..engine.statistics import (
        PipelineStats as PipelineStats,
        QueuePerfStats as QueuePerfStats,
        StageStats as StageStats,
        TaskPerfStats as TaskPerfStats,
    )
    from .builder import PipelineBuilder as PipelineBuilder, build_pipeline as build_pipeline
    from .caching import cache_iterator as cache_iterator
    from .pipeline import Pipeline as Pipeline

hand_on()
