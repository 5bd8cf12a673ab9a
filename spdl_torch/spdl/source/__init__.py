"""``spdl.source``: sources of indices and files.

They need neither torch nor a process group: rank and world size are given. For training with a
DataLoader there is :class:`spdl_torch.DistributedSampler`; for files, shards and resuming,
``spdl_torch.data.sources``.
"""

from __future__ import annotations

from typing import Any

from ..names import look_up
from ._sampler import DistributedDeterministicSampler, DistributedRandomSampler
from ._types import IterableWithShuffle, SizedIterable, SizedIterableWithShuffle

__all__ = [
    "DistributedDeterministicSampler",
    "DistributedRandomSampler",
    "IterableWithShuffle",
    "SizedIterable",
    "SizedIterableWithShuffle",
]

_MODULES = ("imagenet", "local_directory", "utils")


def __getattr__(name: str) -> Any:
    return look_up(__name__, name, modules=_MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
