"""``spdl.source``: sources of indices and files.

They need neither torch nor a process group: rank and world size are given. For training with a
DataLoader there is :class:`spdl_torch.DistributedSampler`; for files, shards and resuming,
``spdl_torch.data.sources``. The kinds of sources are protocols, which ``isinstance`` checks by the
methods present.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, TypeVar, runtime_checkable

from spdl_torch.lazy_names import import_name

from ._sampler import DistributedDeterministicSampler, DistributedRandomSampler

__all__ = [
    "DistributedDeterministicSampler",
    "DistributedRandomSampler",
    "IterableWithShuffle",
    "SizedIterable",
    "SizedIterableWithShuffle",
]

_MODULES = dict.fromkeys(("imagenet", "local_directory", "utils"), ".")

T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class IterableWithShuffle(Protocol[T_co]):
    """An iterable whose order can be changed."""

    def __iter__(self) -> Iterator[T_co]: ...

    def shuffle(self, seed: int) -> None:
        """Make iterations from now on use the order that belongs to ``seed``."""
        ...


@runtime_checkable
class SizedIterable(Protocol[T_co]):
    """An iterable with a length."""

    def __iter__(self) -> Iterator[T_co]: ...

    def __len__(self) -> int: ...


@runtime_checkable
class SizedIterableWithShuffle(IterableWithShuffle[T_co], SizedIterable[T_co], Protocol[T_co]):
    """An iterable with a length, whose order can be changed."""


def __getattr__(name: str) -> Any:
    return import_name(__name__, _MODULES, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
