"""``spdl.pipeline``: the names of SPDL's that :mod:`spdl_torch.pipeline` has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..names import look_up

if TYPE_CHECKING:
    from ...data import iterate_in_subprocess, run_pipeline_in_subprocess
    from ...pipeline import (
        Pipeline,
        PipelineBuilder,
        PipelineFailure,
        QueuePerfStats,
        StageInfo,
        StatsQueue,
        TaskHook,
        TaskPerfStats,
        TaskStatsHook,
        build_pipeline,
        cache_iterator,
    )

__all__ = [
    "Pipeline",
    "PipelineBuilder",
    "PipelineFailure",
    "QueuePerfStats",
    "StageInfo",
    "StatsQueue",
    "TaskHook",
    "TaskPerfStats",
    "TaskStatsHook",
    "build_pipeline",
    "cache_iterator",
    "iterate_in_subprocess",
    "run_pipeline_in_subprocess",
]

_HOMES = {
    **dict.fromkeys(__all__, "spdl_torch.pipeline"),
    "iterate_in_subprocess": "spdl_torch.data",
    "run_pipeline_in_subprocess": "spdl_torch.data",
}


def __getattr__(name: str) -> Any:
    return look_up(__name__, name, modules=("defs",), homes=_HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
