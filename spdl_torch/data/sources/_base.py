"""What every source promises, and the numbers that all of them draw alike."""

from __future__ import annotations

import copy
import hashlib
import random
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DataSource", "check_start", "random_of", "seed_of"]

T_co = TypeVar("T_co", covariant=True)


class DataSource(ABC, Generic[T_co]):
    """Items in an order that the seed and the epoch fix, which can be shared out.

    ``for item in source`` may be written any number of times, also at the same time, and gives
    the same items in the same order until the epoch is set to another. ``len(source)`` works
    where the number is known without reading.

    ``shard`` and ``shuffle`` return a new source, which shares the list of names but not the
    epoch, and leave this one as it was. Sources can be pickled.
    """

    _epoch = 0

    @property
    def epoch(self) -> int:
        """Which epoch's order the next iteration has; 0 at first."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration. One that runs already keeps its own.

        Only shuffled sources change their order. Raises: ValueError: ``epoch`` < 0.
        """
        if epoch < 0:
            raise ValueError(f"{type(self).__name__}.set_epoch: epoch must be >= 0, got {epoch}.")
        self._epoch = int(epoch)

    @abstractmethod
    def shard(self, index: int, count: int) -> DataSource[T_co]:
        """Part ``index`` of ``count``: the parts have no item in common and all items together.

        A part can be divided again, for instance among workers. Give all of them the same seed.
        Raises: ValueError: not ``0 <= index < count``.
        """

    @abstractmethod
    def shuffle(self, seed: int = 0, buffer_size: int | None = None) -> DataSource[T_co]:
        """The same items in another order for every ``(seed, epoch)``.

        It draws from a generator of its own: torch's and Python's are left alone.
        """

    @abstractmethod
    def iterate(self, start: int = 0) -> Iterator[T_co]:
        """What iteration gives from its ``start``-th item on, without handing out those before.

        Raises: ValueError: ``start`` < 0. A start past the end gives nothing.
        """

    def __iter__(self) -> Iterator[T_co]:
        return self.iterate()

    def _with(self, **changes: Any) -> Self:
        twin = copy.copy(self)
        for name, value in changes.items():
            setattr(twin, name, value)
        return twin

    def _check_shard(self, index: int, count: int) -> None:
        if not 0 <= index < count:
            raise ValueError(
                f"{type(self).__name__}.shard: index must be in 0..count-1, got index {index} "
                f"of {count}."
            )


def check_start(source: DataSource[Any], start: int) -> None:
    """Refuse what would count from the end: streams do not know theirs."""
    if start < 0:
        raise ValueError(f"{type(source).__name__}.iterate: start must be >= 0, got {start}.")


def seed_of(*parts: int | str) -> int:
    """63 bits that differ wherever a part does; the same on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def random_of(*parts: int | str) -> random.Random:
    """A generator of its own for these parts."""
    return random.Random(seed_of(*parts))
