"""The engine: stages of worker threads joined by bounded queues. It knows nothing of torch.

Users define a pipeline by ``builder``; the result is a ``definition``. ``pipeline`` is
the object that they hold, ``run`` one run of it: it creates sources and stages (``stage``), and the
branches and joins between them (``graph``), and owns their ``threads``. They wait for each other at
a ``channel`` and nowhere else. ``stats``, ``hooks`` and the ``recorder`` show what they do.

From the ground up: ``definition``, ``failures``, ``threads``, ``stats``, ``channel``, ``recorder``,
``hooks``, ``stage``, ``graph``, ``run``; each uses only those before it. The names below
are imported when they are first used: a ``DataLoader`` runs no pipeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import spdl_torch.lazy_names as lazy_names

from ..errors import PipelineFailure, PipelineStopped

if TYPE_CHECKING:
    from .builder import PipelineBuilder, build_pipeline
    from .caching import cache_iterator
    from .channel.sentinels import is_eof, is_epoch_end
    from .definition.specs import PipelineSpec, SinkSpec, SourceSpec
    from .definition.stages import (
        Aggregate,
        Aggregator,
        Disaggregate,
        Merge,
        PathVariants,
        Pipe,
    )
    from .hooks.stage_info import StageInfo
    from .hooks.stats_queue import StatsQueue
    from .hooks.task_hooks import TaskHook, TaskStatsHook
    from .pipeline import Pipeline
    from .profiling import ProfileHook, ProfileResult, profile_pipeline
    from .stats.perf_stats import PipelineStats, QueuePerfStats, StageStats, TaskPerfStats

__all__ = [
    "Aggregate",
    "Aggregator",
    "Disaggregate",
    "Merge",
    "PathVariants",
    "Pipe",
    "Pipeline",
    "PipelineBuilder",
    "PipelineFailure",
    "PipelineSpec",
    "PipelineStats",
    "PipelineStopped",
    "ProfileHook",
    "ProfileResult",
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
    "is_eof",
    "is_epoch_end",
    "profile_pipeline",
]

_HOMES = {
    ".builder": ("PipelineBuilder", "build_pipeline"),
    ".caching": ("cache_iterator",),
    ".channel.sentinels": ("is_eof", "is_epoch_end"),
    ".definition.specs": ("PipelineSpec", "SinkSpec", "SourceSpec"),
    ".definition.stages": (
        "Aggregate",
        "Aggregator",
        "Disaggregate",
        "Merge",
        "PathVariants",
        "Pipe",
    ),
    ".hooks.stage_info": ("StageInfo",),
    ".hooks.stats_queue": ("StatsQueue",),
    ".hooks.task_hooks": ("TaskHook", "TaskStatsHook"),
    ".pipeline": ("Pipeline",),
    ".profiling": ("ProfileHook", "ProfileResult", "profile_pipeline"),
    ".stats.perf_stats": ("PipelineStats", "QueuePerfStats", "StageStats", "TaskPerfStats"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    return lazy_names.import_name(__name__, _HOME_OF, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
