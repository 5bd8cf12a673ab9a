"""Which part of a source belongs to this rank and worker, and how long that part is."""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch.distributed
from torch.utils.data import DistributedSampler, get_worker_info

__all__ = ["Shard", "length_of_shard", "rank_shard", "take_shard", "worker_shard"]


@dataclass(frozen=True, slots=True)
class Shard:
    """Part ``index`` of ``count`` parts that have no item in common and together are the whole."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"a shard's index must be within 0 and {self.count - 1}, got {self.index}."
            )


def rank_shard(num_replicas: int | None, rank: int | None) -> Shard:
    """What was given, else what the process group says, else torchrun's variables, else all.

    Asked at the first iteration and not before: Lightning sets the process group up after the
    datasets were made, and of the variables only ``LOCAL_RANK``.

    Raises: RuntimeError: one of several ranks that cannot know which one.
    """
    if num_replicas is not None and rank is not None:
        return Shard(rank, num_replicas)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Shard(torch.distributed.get_rank(), torch.distributed.get_world_size())
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return Shard(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    if os.environ.get("LOCAL_RANK", "0") != "0":
        raise RuntimeError(
            f"PipelineDataset: this process is LOCAL_RANK={os.environ['LOCAL_RANK']}, but there is "
            "neither a process group nor RANK and WORLD_SIZE to tell which part of the source is "
            "its own. Iterate after init_process_group() or pass num_replicas and rank."
        )
    return Shard()


def worker_shard() -> Shard:
    """Of the DataLoader's worker that this is; all of it outside of workers."""
    info = get_worker_info()
    return Shard() if info is None else Shard(info.id, info.num_workers)


def take_shard(source: Any, ranks: Shard, workers: Shard) -> Any:
    """The items of ``source`` that belong to a worker of a rank.

    A source with ``shard(index, count)`` knows best; torch's DistributedSampler has chosen the
    rank's part already; of any other iterable every ``count``-th item is taken.
    """
    for shard in (_without_ranks_of(source, ranks), workers):
        if shard.count > 1:
            source = _part(source, shard)
    return source


def length_of_shard(source: Any, ranks: Shard) -> int:
    """How many items of ``source`` belong to a rank. Raises: TypeError: ``source`` has no len."""
    ranks = _without_ranks_of(source, ranks)
    if ranks.count > 1 and hasattr(source, "shard"):
        return len(source.shard(ranks.index, ranks.count))
    return len(range(ranks.index, len(source), ranks.count))


def _part(source: Any, shard: Shard) -> Any:
    if hasattr(source, "shard"):
        return source.shard(shard.index, shard.count)
    return (_AsyncStride if isinstance(source, AsyncIterable) else _Stride)(source, shard)


def _without_ranks_of(source: Any, ranks: Shard) -> Shard:
    return Shard() if isinstance(source, DistributedSampler) else ranks


@dataclass(frozen=True, slots=True)
class _Stride:
    """Every ``count``-th item of an iterable or async iterable, beginning with ``index``."""

    source: Any
    part: Shard

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.source), self.part.index, None, self.part.count)


@dataclass(frozen=True, slots=True)
class _AsyncStride:
    source: AsyncIterable[Any]
    part: Shard

    async def __aiter__(self) -> AsyncIterator[Any]:
        position = 0
        async for item in self.source:
            if position % self.part.count == self.part.index:
                yield item
            position += 1
