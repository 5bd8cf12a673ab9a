"""A drop-in for PyTorch's DataLoader: threads where safe, processes where needed.

Public names are imported when they are first used, so that importing the package, asking for a
command's help or starting a pool process costs nothing of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spdl_torch.lazy_names import hand_on

from .errors import (
    DecodeError as DecodeError,
    PipelineFailure as PipelineFailure,
    PipelineStopped as PipelineStopped,
    SourceChangedError as SourceChangedError,
    UnsupportedOptionError as UnsupportedOptionError,
)

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from . import (
        autotune as autotune,
        io as io,
        observe as observe,
        pipeline as pipeline,
        spdl as spdl,
        testing as testing,
    )
    from .data.dataset import PipelineDataset as PipelineDataset
    from .data.folder import ImageFolder as ImageFolder
    from .loader.dataloader import DataLoader as DataLoader
    from .loader.sampling.distributed_sampler import DistributedSampler as DistributedSampler

hand_on()
