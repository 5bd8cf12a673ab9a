"""The interface of all sources, the random numbers that they share, and sources with random access:
any position is reached immediately."""

from __future__ import annotations

import math
import os
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload

from ...checks import check_whole, whole
from ...errors import UnsupportedOptionError
from ...io._cache.folders import hash_of
from ...objects.copies import shallow_copy

if TYPE_CHECKING:
    from torch import Tensor

    from ._copies import ShardCopies

T_co = TypeVar("T_co", covariant=True)

_CHUNK = 4096  # positions that become Python ints at once


class DataSource(ABC, Generic[T_co]):
    """Items in an order that the seed and the epoch determine, which can be sharded.

    A source may be iterated any number of times, also concurrently, and gives the same items in
    the same order until another epoch is set. ``len(source)`` works if the number is known without
    reading.

    ``shard`` and ``shuffle`` return a new source, which shares the list of names but not the
    epoch, and leave this one as it was. Sources can be pickled.
    """

    epoch = 0
    """The epoch whose order the next iteration has; see :meth:`set_epoch`."""
    _copies: frozenset[ShardCopies] = frozenset()
    """Those that shards or files are read from; sources made from one share its own."""
    _has_all_it_counts = True
    """Whether a pass has ``len()`` items, if that is known; else it may have fewer."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; running ones keep theirs.

        Only shuffled sources change their order. Raises: ValueError: ``epoch`` < 0.
        """
        self.epoch = whole(f"{type(self).__name__}.set_epoch", "epoch", epoch, 0)

    @abstractmethod
    def shard(self, index: int, count: int) -> DataSource[T_co]:
        """Return part ``index`` of ``count``: the parts are disjoint and together have all items.

        A part can be divided again, for instance among workers. Give all parts the same seed.
        Raises: ValueError: not ``0 <= index < count``.
        """

    @abstractmethod
    def shuffle(self, seed: int = 0, buffer_size: int | None = None) -> DataSource[T_co]:
        """Return a source of the same items in another order for every ``(seed, epoch)``.

        It draws from its own generator: torch's and Python's are left alone.
        """

    @abstractmethod
    def iterate(self, start: int = 0) -> Iterator[T_co]:
        """Iterate from the ``start``-th item on, without yielding those before.

        Raises: ValueError: ``start`` < 0. A start past the end gives nothing.
        """

    def loading_counts(self) -> dict[str, int]:
        """Return how often this process found a shard in ``cache`` and how often it waited for one,
        the bytes that it downloaded, the milliseconds of its waits, and how many shards were
        removed; {} without ``cache``."""
        counts = Counter[str]()
        for each in self._copies:
            counts.update(each.counts())
        return dict(counts)

    def loading_remarks(self) -> tuple[str, ...]:
        """Return the remarks for a loader's report: the same in words."""
        return tuple(remark for each in self._copies for remark in each.remarks())

    def __iter__(self) -> Iterator[T_co]:
        return self.iterate()

    def _with(self, **changes: Any) -> Self:
        """Return a copy with these changes, which no ``set_epoch`` of this one reaches."""
        twin = shallow_copy(self)
        for name, value in changes.items():
            setattr(twin, name, value)
        return twin

    def _checked_shard(self, index: int, count: int) -> tuple[int, int]:
        who = f"{type(self).__name__}.shard"
        check_whole(who, least=-math.inf, index=index, count=count)
        if not 0 <= index < count:
            raise ValueError(f"{who}: index must be in 0..count-1, got index {index} of {count}.")
        return int(index), int(count)


def names_in(given: Any) -> list[str]:
    """Return the names that are given, one or several."""
    several = [given] if isinstance(given, str | os.PathLike) else given
    return [os.fspath(name) for name in several]


def checked_seed(source: object, seed: int) -> int:
    """Return a seed. Raises: TypeError: it is no whole number."""
    return whole(f"{type(source).__name__}.shuffle", "seed", seed, -math.inf)


def checked_start(source: object, start: int) -> int:
    """Return a start. Raises: TypeError; ValueError: it is negative, which would count from the
    end: streams do not know theirs."""
    return whole(f"{type(source).__name__}.iterate", "start", start, 0)


seed_of = hash_of
"""63 bits that depend on every part, the same on every machine."""


def random_of(*parts: int | str) -> random.Random:
    """Return a new generator, seeded from the parts."""
    return random.Random(seed_of(*parts))


class ListSource(DataSource[T_co], Sequence[T_co]):
    """A list, a range, a map-style dataset, or anything else with ``len()`` and ``[number]``.

    ``source[position]`` is the item at that position of this epoch's order, and ``iterate(start)``
    begins there, both without touching earlier items. Items are read as they are yielded.

    Shuffled, an epoch's order is a permutation of all items; it takes 8 bytes an item, once.
    ``shuffle`` before ``shard``: the parts have other items every epoch. After: each part keeps
    its items and changes their order.
    """

    def __init__(self, items: Sequence[T_co]) -> None:
        self._items = items
        if isinstance(items, DataSource):
            self._copies = items._copies
        # The calls of shard, with index and count, and of shuffle, with its seed, in their order.
        self._steps: tuple[tuple[int, int] | int, ...] = ()
        self._order: tuple[int, range | Tensor] | None = None  # the epoch, and its order

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_order": None}

    def __repr__(self) -> str:
        steps = "".join(
            f", shuffle({step})" if isinstance(step, int) else f", shard{step}"
            for step in self._steps
        )
        return f"<{type(self).__name__} of {len(self)} items{steps}>"

    def __len__(self) -> int:
        length = len(self._items)
        for step in self._steps:
            if not isinstance(step, int):
                length = len(range(step[0], length, step[1]))
        return length

    @overload
    def __getitem__(self, position: int) -> T_co: ...
    @overload
    def __getitem__(self, position: slice) -> list[T_co]: ...
    def __getitem__(self, position: int | slice) -> Any:
        """Return the item at a position of this epoch's order, or a list of them for a slice."""
        order = self._positions()
        if isinstance(position, slice):
            # A tensor takes no negative steps; an array of the same memory does.
            chosen = order[position] if isinstance(order, range) else order.numpy()[position]
            return [self._items[int(number)] for number in chosen]
        if not -len(order) <= position < len(order):
            raise IndexError(
                f"{type(self).__name__}: position must be below {len(order)}, got {position}."
            )
        return self._items[int(order[position])]

    def shard(self, index: int, count: int) -> ListSource[T_co]:
        """Return a source of every ``count``-th item of this epoch's order, from ``index`` on.

        Lengths differ by one at most. Raises: ValueError: not ``0 <= index < count``.
        """
        index, count = self._checked_shard(index, count)
        return self._with(_steps=(*self._steps, (index, count)), _order=None)

    def shuffle(self, seed: int = 0, buffer_size: int | None = None) -> ListSource[T_co]:
        """Return a source of all items in an order drawn anew for every ``(seed, epoch)``.

        Raises: UnsupportedOptionError: ``buffer_size`` was given; no buffer is needed here.
        """
        if buffer_size is not None:
            raise UnsupportedOptionError(
                f"{type(self).__name__}.shuffle: buffer_size must be None, got {buffer_size}. "
                "Everything is shuffled with everything; a buffer is for streams such as TarShards."
            )
        return self._with(_steps=(*self._steps, checked_seed(self, seed)), _order=None)

    def iterate(self, start: int = 0) -> Iterator[T_co]:
        """Iterate from position ``start`` on, without touching earlier items."""
        start = checked_start(self, start)
        return _walk(self._items, self._positions(), start)

    def _positions(self) -> range | Tensor:
        """Return the positions in the list of this epoch's items, in order."""
        if self._order is None or self._order[0] != self.epoch:
            order: range | Tensor = range(len(self._items))
            for step in self._steps:
                if isinstance(step, int):
                    order = _permuted(order, seed_of("shuffle", step, self.epoch))
                else:
                    order = order[step[0] :: step[1]]
            if not isinstance(order, range):
                order = order.clone()  # a part must not keep the whole permutation
            self._order = self.epoch, order
        return self._order[1]


def _walk(items: Sequence[T_co], order: range | Tensor, start: int) -> Iterator[T_co]:
    for first in range(start, len(order), _CHUNK):
        chunk = order[first : first + _CHUNK]
        for number in chunk if isinstance(chunk, range) else chunk.tolist():
            yield items[number]


def _permuted(order: range | Tensor, seed: int) -> Tensor:
    import torch  # here, because a list that is not shuffled does not need it

    generator = torch.Generator(device="cpu").manual_seed(seed)
    permutation = torch.randperm(len(order), generator=generator, device="cpu")
    if isinstance(order, range):
        return permutation.mul_(order.step).add_(order.start)
    return order[permutation]
