"""``spdl.pipeline``: the names of SPDL's that :mod:`spdl_torch.pipeline` has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spdl_torch.lazy_names import hand_on

if TYPE_CHECKING:
    from ...data import (
        iterate_in_subprocess as iterate_in_subprocess,
        run_pipeline_in_subprocess as run_pipeline_in_subprocess,
    )
    from ...pipeline import (
        Pipeline as Pipeline,
        PipelineBuilder as PipelineBuilder,
        PipelineFailure as PipelineFailure,
        QueuePerfStats as QueuePerfStats,
        StageInfo as StageInfo,
        StatsQueue as StatsQueue,
        TaskHook as TaskHook,
        TaskPerfStats as TaskPerfStats,
        TaskStatsHook as TaskStatsHook,
        build_pipeline as build_pipeline,
        cache_iterator as cache_iterator,
    )
    from . import defs as defs

hand_on()
