"""A drop-in for PyTorch's DataLoader that loads on threads inside the training process."""

from .data.dataloader import DataLoader
from .errors import DecodeError, PipelineFailure, PipelineStopped, UnsupportedOptionError

__version__ = "0.1.0.dev0"

__all__ = [
    "DataLoader",
    "DecodeError",
    "PipelineFailure",
    "PipelineStopped",
    "UnsupportedOptionError",
    "__version__",
]
