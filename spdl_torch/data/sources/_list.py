"""Sources with random access: any position is reached immediately."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from spdl_torch.errors import UnsupportedOptionError

from ._base import DataSource, checked_seed, checked_start, seed_of

if TYPE_CHECKING:
    from torch import Tensor

    from ._copies import ShardCopies

T_co = TypeVar("T_co", covariant=True)

_CHUNK = 4096  # positions that become Python ints at once


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

    def _counters(self) -> Iterable[ShardCopies]:
        return self._items._counters() if isinstance(self._items, DataSource) else ()

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
        if self._order is None or self._order[0] != self._epoch:
            order: range | Tensor = range(len(self._items))
            for step in self._steps:
                if isinstance(step, int):
                    order = _permuted(order, seed_of("shuffle", step, self._epoch))
                else:
                    order = order[step[0] :: step[1]]
            if not isinstance(order, range):
                order = order.clone()  # a part must not keep the whole permutation
            self._order = self._epoch, order
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
