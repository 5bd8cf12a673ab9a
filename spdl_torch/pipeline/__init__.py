"""The engine: stages of worker threads joined by bounded queues.

It knows nothing of torch. ``definition`` says what a pipeline is, ``defs`` and ``builder`` are how
a user writes it, ``wiring`` makes sources, stages and queues of it, ``run`` owns their threads,
``worker`` and ``coroutines`` are the stages, ``channel`` is where they wait, ``stats`` and
``hooks`` are what can be seen of them.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ..errors import PipelineFailure, PipelineStopped
from .builder import PipelineBuilder, build_pipeline
from .caching import cache_iterator
from .channel.sentinels import is_eof, is_epoch_end
from .definition.specs import PipelineSpec
from .hooks.stage_info import StageInfo
from .hooks.stats_queue import StatsQueue
from .hooks.task_hooks import TaskHook, TaskStatsHook
from .pipeline import Pipeline
from .profiling import ProfileHook, ProfileResult, profile_pipeline
from .stats.perf_stats import PipelineStats, QueuePerfStats, StageStats, TaskPerfStats

if TYPE_CHECKING:
    from ..data.child_pipelines import iterate_in_subprocess, run_pipeline_in_subprocess

__all__ = [
    "Pipeline",
    "PipelineBuilder",
    "PipelineFailure",
    "PipelineSpec",
    "PipelineStats",
    "PipelineStopped",
    "ProfileHook",
    "ProfileResult",
    "QueuePerfStats",
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
    "iterate_in_subprocess",
    "profile_pipeline",
    "run_pipeline_in_subprocess",
]

# They need torch, which nothing else here does, so they are made on a floor above.
_HOMES = dict.fromkeys(
    ("iterate_in_subprocess", "run_pipeline_in_subprocess"), "..data.child_pipelines"
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name], __name__), name)
    globals()[name] = value  # from now on without this detour
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
