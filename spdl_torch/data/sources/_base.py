"""The interface of all sources, and the random numbers that they share."""

from __future__ import annotations

import math
import os
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from ...checks import whole
from ...io._cache.folders import hash_of
from ...objects.copies import shallow_copy
from ...shown_text import short_repr

if TYPE_CHECKING:
    from ._copies import ShardCopies

T_co = TypeVar("T_co", covariant=True)


class DataSource(ABC, Generic[T_co]):
    """Items in an order that the seed and the epoch determine, which can be sharded.

    A source may be iterated any number of times, also concurrently, and gives the same items in
    the same order until another epoch is set. ``len(source)`` works if the number is known without
    reading.

    ``shard`` and ``shuffle`` return a new source, which shares the list of names but not the
    epoch, and leave this one as it was. Sources can be pickled.
    """

    _epoch = 0
    _has_all_it_counts = True
    """Whether a pass has ``len()`` items, if that is known; else it may have fewer."""

    @property
    def epoch(self) -> int:
        """The epoch whose order the next iteration has; 0 at first."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; running ones keep theirs.

        Only shuffled sources change their order. Raises: ValueError: ``epoch`` < 0.
        """
        self._epoch = whole(f"{type(self).__name__}.set_epoch", "epoch", epoch, 0)

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
        for each in {*self._counters()}:
            counts.update(each.counts())
        return dict(counts)

    def loading_remarks(self) -> tuple[str, ...]:
        """Return the remarks for a loader's report: the same in words."""
        return tuple(remark for each in {*self._counters()} for remark in each.remarks())

    def _counters(self) -> Iterable[ShardCopies]:
        """Return the copies that shards are read from; sources made from one share its own."""
        return ()

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
        index, count = (
            whole(who, "index", index, -math.inf),
            whole(who, "count", count, -math.inf),
        )
        if not 0 <= index < count:
            raise ValueError(f"{who}: index must be in 0..count-1, got index {index} of {count}.")
        return index, count


def names_in(who: str, given: Any) -> list[str]:
    """Return the names that are given, one or several. Raises: TypeError: there are none."""
    try:
        several = [given] if isinstance(given, str | os.PathLike) else given
        return [os.fspath(name) for name in several]
    except TypeError:
        text = f"{who}: expected a path or a URL, or a list of them, got {short_repr(given)}."
        raise TypeError(text) from None


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
