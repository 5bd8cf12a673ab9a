"""``spdl.pipeline.defs``: SPDL's names of the parts of :mod:`spdl_torch.pipeline`'s definitions."""

from __future__ import annotations

from typing import Any

from spdl_torch.lazy_names import import_name

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

__path__: list[str] = []  # as a package's: imports of names then ask __getattr__


def __getattr__(name: str) -> Any:
    return import_name(__name__, {}, name)
