"""The part of a source that belongs to a rank and worker: which part that is, its items, and their
number."""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any, Literal, get_args

import torch.distributed
from torch.utils.data import get_worker_info

from ...errors import UnsupportedOptionError
from .sampler_chain import is_shared_out


def take_shard(source: Any, ranks: Shard, workers: Shard, tail: Tail = "uneven") -> Any:
    """Return the items of ``source`` that belong to a worker of a rank.

    A source with ``shard(index, count)`` divides itself; torch's DistributedSampler has already
    chosen the rank's part; from any other iterable every ``count``-th item is taken. ``tail``
    applies to ranks; workers share their rank's part unevenly.

    Raises: UnsupportedOptionError: ``tail`` asks for parts of one length, but the source's parts
        have no ``len()``.
    """
    ranks = _without_ranks_of(source, ranks)
    if ranks.count > 1:
        source = _part(source, ranks, tail)
    return _part(source, workers, "uneven") if workers.count > 1 else source


def undivided(part: Any) -> Any:
    """Return the source of which a part of ``take_shard`` has every so many items; the part itself,
    if it was not made so."""
    return part.undivided if isinstance(part, Stride) else part


def length_of_shard(source: Any, ranks: Shard, tail: Tail = "uneven") -> int:
    """Return how many items of ``source`` belong to a rank. Raises: TypeError: it has no len."""
    ranks = _without_ranks_of(source, ranks)
    return _fitting_length(_lengths_of_parts(source, ranks), ranks, tail)


def padding_of_shard(source: Any, ranks: Shard, tail: Tail) -> int:
    """Return how many of a rank's items, its last ones, repeat other ranks'. Raises: TypeError."""
    if tail != "pad":
        return 0
    return length_of_shard(source, ranks, tail) - length_of_shard(source, ranks, "uneven")


def _without_ranks_of(source: Any, ranks: Shard) -> Shard:
    return Shard() if is_shared_out(source) else ranks


def _lengths_of_parts(source: Any, ranks: Shard) -> list[int]:
    if ranks.count > 1 and hasattr(source, "shard"):
        return [len(source.shard(index, ranks.count)) for index in range(ranks.count)]
    length = len(source)
    return [len(range(index, length, ranks.count)) for index in range(ranks.count)]


def _fitting_length(lengths: list[int], ranks: Shard, tail: Tail) -> int:
    """Return the length of this rank's part under ``tail``."""
    return {"drop": min(lengths), "pad": max(lengths), "uneven": lengths[ranks.index]}[tail]


def _part(source: Any, shard: Shard, tail: Tail) -> Any:
    if not hasattr(source, "shard"):
        return (_AsyncStride if isinstance(source, AsyncIterable) else Stride)(source, shard, tail)
    part = source.shard(shard.index, shard.count)
    if tail == "uneven":
        return part
    try:
        if isinstance(source, AsyncIterable):
            raise TypeError(f"{type(source).__name__} is asynchronous")
        lengths = _lengths_of_parts(source, shard)
    except TypeError as error:
        raise UnsupportedOptionError(
            f"PipelineDataset: tail={tail!r} needs to know how long each rank's part is, but: "
            f"{error}. A rank that has fewer items would end early and the others wait for it for "
            'ever. Pass tail="uneven" and end every epoch after a number of steps that all ranks '
            "can make, or use a source whose parts have len()."
        ) from None
    length = _fitting_length(lengths, shard, tail)
    return part if length == lengths[shard.index] else _Fitted(part, source, length)


@dataclass(slots=True)
class Stride:
    """Every ``count``-th item of an iterable, starting at ``index``."""

    source: Any
    part: Shard
    tail: Tail

    @property
    def undivided(self) -> Any:
        """The source, which may have been a part of another one."""
        return undivided(self.source)

    def __iter__(self) -> Iterator[Any]:
        return self.of(iter(self.source))

    def of(self, items: Iterator[Any]) -> Iterator[Any]:
        """Return this part of ``items``."""
        count = self.part.count
        if self.tail == "uneven":
            return islice(items, self.part.index, None, count)
        return self._of_rounds(items, count)

    def _of_rounds(self, items: Iterator[Any], count: int) -> Iterator[Any]:
        """Yield one item of each round, once the round is known to be whole."""
        first = dealt = list(islice(items, count))
        while len(dealt) == count:
            yield dealt[self.part.index]
            dealt = list(islice(items, count))
        yield from _of_last_round(dealt, first, self.part, self.tail)


@dataclass(frozen=True, slots=True)
class _AsyncStride:
    """Every ``count``-th item of an async iterable, starting at ``index``."""

    source: AsyncIterable[Any]
    part: Shard
    tail: Tail

    async def __aiter__(self) -> AsyncIterator[Any]:
        first: list[Any] = []
        dealt: list[Any] = []
        async for item in self.source:
            dealt.append(item)
            if self.tail == "uneven" and len(dealt) == self.part.index + 1:
                yield item
            if len(dealt) == self.part.count:
                if self.tail != "uneven":
                    yield dealt[self.part.index]
                first, dealt = first or dealt, []
        for item in _of_last_round(dealt, first or dealt, self.part, self.tail):
            yield item


def _of_last_round(dealt: list[Any], first: list[Any], part: Shard, tail: Tail) -> list[Any]:
    """Return this part's share of an incomplete round, padded from the first round or dropped."""
    if tail != "pad" or not dealt:
        return []
    return [*islice(chain(dealt, cycle(first)), part.index, part.index + 1)]


@dataclass(frozen=True, slots=True)
class _Fitted:
    """A part that a source made, cut short or padded from the source's beginning."""

    part: Any
    source: Any
    length: int

    def __iter__(self) -> Iterator[Any]:
        return self.iterate()

    def iterate(self, start: int = 0) -> Iterator[Any]:
        """Iterate from the ``start``-th item on; immediate if the part has ``iterate``."""
        if not hasattr(self.part, "iterate"):
            items = chain(self.part, cycle(self.source))
            return islice(items, start, max(start, self.length))
        num_own = len(self.part)
        own = self.part.iterate(min(start, num_own))
        padding = islice(cycle(self.source), max(0, start - num_own), None)
        return islice(chain(own, padding), max(0, self.length - start))

    def __len__(self) -> int:
        return self.length


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
