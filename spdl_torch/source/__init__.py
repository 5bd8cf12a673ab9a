"""Sources of indices and files, called as in ``spdl.source``.

They need neither torch nor a process group: rank and world size are given. For training with a
DataLoader there is :class:`spdl_torch.DistributedSampler`; for files, shards and resuming,
``spdl_torch.data.sources``.
"""

from spdl_torch.source._sampler import DistributedDeterministicSampler, DistributedRandomSampler
from spdl_torch.source._types import IterableWithShuffle, SizedIterable, SizedIterableWithShuffle

__all__ = [
    "DistributedDeterministicSampler",
    "DistributedRandomSampler",
    "IterableWithShuffle",
    "SizedIterable",
    "SizedIterableWithShuffle",
]
