"""Pipelines, as users define, hold and run them: ``builder`` makes a ``pipeline`` of stages, which
the engine runs.

The names below are imported when they are first used: a ``DataLoader`` runs no pipeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import spdl_torch.lazy_names as lazy_names

from ..errors import PipelineFailure, PipelineStopped

if TYPE_CHECKING:
    from ..engine.definition.specs import PipelineSpec, SinkSpec, SourceSpec
    from ..engine.definition.stages import (
        Aggregate,
        Aggregator,
        Disaggregate,
        Pipe,
    )
    from ..engine.hooks.stage_info import StageInfo
    from ..engine.hooks.stats_queue import StatsQueue
    from ..engine.hooks.task_hooks import TaskHook, TaskStatsHook
    from ..engine.stats.perf_stats import PipelineStats, QueuePerfStats, StageStats, TaskPerfStats
    from .builder import PipelineBuilder, build_pipeline
    from .caching import cache_iterator
    from .pipeline import Pipeline

__all__ = [
    "Aggregate",
    "Aggregator",
    "Disaggregate",
    "Pipe",
    "Pipeline",
    "PipelineBuilder",
    "PipelineFailure",
    "PipelineSpec",
    "PipelineStats",
    "PipelineStopped",
    "QueuePerfStats",
    "SinkSpec",
    "SourceSpec",
    "StageInfo",
    "StageStats",
    "StatsQueue",
    "TaskHook",
    "TaskPerfStats",
    "TaskStatsHook",
    "build_pipeline",
    "cache_iterator",
]

_HOMES = {
    ".builder": ("PipelineBuilder", "build_pipeline"),
    ".caching": ("cache_iterator",),
    "..engine.definition.specs": ("PipelineSpec", "SinkSpec", "SourceSpec"),
    "..engine.definition.stages": (
        "Aggregate",
        "Aggregator",
        "Disaggregate",
        "Pipe",
    ),
    "..engine.hooks.stage_info": ("StageInfo",),
    "..engine.hooks.stats_queue": ("StatsQueue",),
    "..engine.hooks.task_hooks": ("TaskHook", "TaskStatsHook"),
    ".pipeline": ("Pipeline",),
    "..engine.stats.perf_stats": ("PipelineStats", "QueuePerfStats", "StageStats", "TaskPerfStats"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    return lazy_names.import_name(__name__, _HOME_OF, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
