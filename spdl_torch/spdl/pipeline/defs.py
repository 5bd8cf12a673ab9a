"""``spdl.pipeline.defs``: a pipeline as data, configs to combine, print, pickle and build."""

from __future__ import annotations

from typing import Any

from ...pipeline.defs import (
    Aggregate,
    AggregateConfig,
    Aggregator,
    Collate,
    Disaggregate,
    DisaggregateConfig,
    Merge,
    MergeConfig,
    PathVariants,
    PathVariantsConfig,
    Pipe,
    PipeConfig,
    PipelineConfig,
    SinkConfig,
    SourceConfig,
)
from ..names import look_up

__all__ = [
    "Aggregate",
    "AggregateConfig",
    "Aggregator",
    "Collate",
    "Disaggregate",
    "DisaggregateConfig",
    "Merge",
    "MergeConfig",
    "PathVariants",
    "PathVariantsConfig",
    "Pipe",
    "PipeConfig",
    "PipelineConfig",
    "SinkConfig",
    "SourceConfig",
]


def __getattr__(name: str) -> Any:
    return look_up(__name__, name)
