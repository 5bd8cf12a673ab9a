"""The engine: stages of worker threads joined by bounded queues.

It knows nothing of torch. ``definition`` says what a pipeline is, ``builder`` is how a user
writes it, ``run`` owns the threads, ``worker`` and ``coroutines`` are the stages, ``channel`` is
where they wait, ``stats`` and ``hooks`` are what can be seen of them.
"""

from ..errors import PipelineFailure, PipelineStopped
from .builder import PipelineBuilder
from .definition import PipelineSpec
from .hooks import StageInfo, StatsQueue, TaskHook, TaskStatsHook
from .pipeline import Pipeline
from .stats import PipelineStats, QueuePerfStats, StageStats, TaskPerfStats

__all__ = [
    "Pipeline",
    "PipelineBuilder",
    "PipelineFailure",
    "PipelineSpec",
    "PipelineStats",
    "PipelineStopped",
    "QueuePerfStats",
    "StageInfo",
    "StageStats",
    "StatsQueue",
    "TaskHook",
    "TaskPerfStats",
    "TaskStatsHook",
]
