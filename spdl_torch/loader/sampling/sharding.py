"""Which part of the data belongs to this rank and worker."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal, get_args

import torch.distributed
from torch.utils.data import get_worker_info

Tail = Literal["drop", "pad", "uneven"]
"""The treatment of a last round that is too short for every rank to get an item."""


def check_tail(tail: object, owner: str) -> None:
    """Refuse a ``tail`` that is none of the three."""
    if tail not in get_args(Tail):
        raise ValueError(f'{owner}: tail must be "drop", "pad" or "uneven", got {tail!r}.')


@dataclass(frozen=True, slots=True)
class Shard:
    """Part ``index`` of ``count`` disjoint parts that together are the whole."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"a shard's index must be between 0 and {self.count - 1}, got {self.index}."
            )


@dataclass(frozen=True, slots=True)
class OwnRank:
    """The rank whose part of the data an object takes: the one that it was given, if any, else this
    process's.

    owner: the object, in errors. Raises: ValueError: the two numbers do not fit.
    """

    owner: str
    num_replicas: int | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        count, rank = self.num_replicas, self.rank
        if (count is None) != (rank is None):
            raise ValueError(
                f"{self.owner}: num_replicas and rank go together, got {count} and {rank}."
            )
        if count is not None and rank is not None and not 0 <= rank < count:
            raise ValueError(f"{self.owner}: rank must be between 0 and {count - 1}, got {rank}.")

    def shard(self) -> Shard:
        """Return the rank's shard: as given, else from the process group, else from torchrun's
        variables, else everything.

        Call it at the first iteration, not before: Lightning sets up the process group after the
        datasets are made, and sets only ``LOCAL_RANK`` of the variables.

        Raises: RuntimeError: this is one of several ranks and cannot know which.
        """
        if self.num_replicas is not None and self.rank is not None:
            return Shard(self.rank, self.num_replicas)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return Shard(torch.distributed.get_rank(), torch.distributed.get_world_size())
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            return Shard(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        if os.environ.get("LOCAL_RANK", "0") != "0":
            raise RuntimeError(
                f"{self.owner}: this process is LOCAL_RANK={os.environ['LOCAL_RANK']}, but there "
                "is neither a process group nor RANK and WORLD_SIZE to say which part of the data "
                "is its own. Iterate after init_process_group() or pass num_replicas and rank."
            )
        return Shard()


def worker_shard() -> Shard:
    """Return the shard of the DataLoader worker that calls this; outside of workers, everything."""
    info = get_worker_info()
    return Shard() if info is None else Shard(info.id, info.num_workers)
