"""A drop-in for PyTorch's DataLoader: threads where safe, processes where needed.

Public names are imported when they are first used, so that importing the package, asking for a
command's help or starting a pool process costs nothing of torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import spdl_torch.lazy_names as lazy_names

from .errors import (
    DecodeError,
    PipelineFailure,
    PipelineStopped,
    SourceChangedError,
    UnsupportedOptionError,
)

if TYPE_CHECKING:
    from .data.dataset import PipelineDataset
    from .data.folder import ImageFolder
    from .data.loader.dataloader import DataLoader
    from .data.sampling.distributed_sampler import DistributedSampler

__version__ = "0.1.0.dev0"

__all__ = [
    "DataLoader",
    "DecodeError",
    "DistributedSampler",
    "ImageFolder",
    "PipelineDataset",
    "PipelineFailure",
    "PipelineStopped",
    "SourceChangedError",
    "UnsupportedOptionError",
    "__version__",
]

_HOMES = {
    "DataLoader": ".data.loader.dataloader",
    "DistributedSampler": ".data.sampling.distributed_sampler",
    "ImageFolder": ".data.folder",
    "PipelineDataset": ".data.dataset",
}
_PACKAGES = ("autotune", "io", "observe", "pipeline", "spdl", "testing")


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f".{name}", __name__)
    return lazy_names.import_name(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
