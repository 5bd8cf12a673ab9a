"""``spdl.pipeline.defs``: SPDL's names of the parts of :mod:`spdl_torch.pipeline`'s definitions."""

from __future__ import annotations

from typing import Any

from ...engine.definition import (
    Aggregate,
    Aggregator,
    Collate,
    Disaggregate,
    Pipe,
    PipelineSpec as PipelineConfig,
    SinkSpec as SinkConfig,
    SourceSpec as SourceConfig,
    StageSpec as PipeConfig,
)
from ..names import look_up

__all__ = [
    "Aggregate",
    "Aggregator",
    "Collate",
    "Disaggregate",
    "Pipe",
    "PipeConfig",
    "PipelineConfig",
    "SinkConfig",
    "SourceConfig",
]


def __getattr__(name: str) -> Any:
    return look_up(__name__, name)
