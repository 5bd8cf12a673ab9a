"""Sources that can only be read from the front, and any iterable as a source."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Set, Sized
from itertools import islice
from typing import Any, Generic, Self, TypeVar, cast

from ...checks import check_whole
from ._base import DataSource, ListSource, checked_seed, checked_start, random_of

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

DEFAULT_BUFFER_SIZE = 1000
_FIRST = 100  # items in the buffer before the first is yielded


class Mix:
    """The shuffle of a stream: its seed, and the size of the buffer to draw from."""

    def __init__(self, seed: int, buffer_size: int | None, where: str) -> None:
        check_whole(where, buffer_size=buffer_size, optional=True)
        self.seed = seed
        self.buffer_size = DEFAULT_BUFFER_SIZE if buffer_size is None else int(buffer_size)

    def drawn(self, items: Iterator[T], *place: int) -> Iterator[T]:
        """Yield the items, each drawn from the buffer.

        The buffer grows to its size while items are yielded, so the first comes soon.
        """
        draw = random_of("buffer", self.seed, *place)
        waiting: list[T] = []
        first = min(self.buffer_size, _FIRST)
        for number, item in enumerate(items):
            if len(waiting) < first or (len(waiting) < self.buffer_size and number % 2):
                waiting.append(item)
                continue
            slot = draw.randrange(len(waiting))
            waiting[slot], item = item, waiting[slot]
            yield item
        draw.shuffle(waiting)
        waiting.reverse()
        while waiting:
            yield waiting.pop()


class StreamSource(DataSource[T_co]):
    """The base of all streams: which part of the items it has, and a buffered shuffle."""

    _parts: tuple[tuple[int, int], ...] = ()
    """Index and count of each call of ``shard``, in order."""
    _mix: Mix | None = None

    def shard(self, index: int, count: int) -> Self:
        """Return part ``index`` of ``count``; see the class and :meth:`DataSource.shard`."""
        index, count = self._checked_shard(index, count)
        return self._with(_parts=(*self._parts, (index, count)))

    def shuffle(self, seed: int = 0, buffer_size: int | None = None) -> Self:
        """Return a source that draws items at random from a buffer of ``buffer_size`` (None =
        1000).

        A part draws from its own items alone. Raises: ValueError: ``buffer_size`` < 1.
        """
        seed = checked_seed(self, seed)
        return self._with(_mix=Mix(seed, buffer_size, f"{type(self).__name__}.shuffle"))

    def _check_positions(self) -> None:
        """Refuse to take an item by position where the order is not known. Raises: TypeError."""
        if self._mix is not None:
            raise TypeError(
                f"{type(self).__name__}: the order of a shuffled source is known only while it is "
                "read. Take items by position before shuffle(), or "
                "ListSource(source).shuffle(seed)."
            )

    def _shown_parts(self) -> str:
        return "".join(f", shard({index}, {count})" for index, count in self._parts)

    def _bounds(self, length: int) -> tuple[int, int]:
        """Return the bounds of this part of so many items, if each part is one range: lengths
        differ by one at most, longer first.

        0..7 in 3 parts -> 0..3, 3..5, 5..7
        """
        first, end = 0, length
        for index, count in self._parts:
            length, rest = divmod(end - first, count)
            first += index * length + min(index, rest)
            end = first + length + (index < rest)
        return first, end


class Stream(StreamSource[T_co], Generic[T_co]):
    """Any iterable, or a function that returns one. Parts are every ``count``-th item."""

    def __init__(self, items: Iterable[T_co] | Callable[[], Iterable[T_co]]) -> None:
        self._items = items

    def iterate(self, start: int = 0) -> Iterator[T_co]:
        """Iterate from the ``start``-th item on; earlier ones are read and dropped."""
        start = checked_start(self, start)
        opened = iter(self.begun())
        index, count = self.stride()
        if self._mix is None:
            return islice(opened, index + start * count, None, count)
        part = islice(opened, index, None, count)
        return islice(self._mix.drawn(part, self.epoch, index, count), start, None)

    def stride(self) -> tuple[int, int]:
        """Return ``(index, count)``: this part is every ``count``-th item from ``index`` on."""
        # Every n-th of every m-th item is one stride, however often a part is divided.
        index, count = 0, 1
        for each, number in self._parts:
            index, count = index + each * count, count * number
        return index, count

    def begun(self) -> Iterable[T_co]:
        """Return the iterable that all parts read in the epoch that is set."""
        items: Any = self._items
        set_epoch = getattr(items, "set_epoch", None)  # a sampler's
        if callable(set_epoch):
            set_epoch(self.epoch)
        is_function = callable(items) and not hasattr(items, "__iter__")
        return cast("Iterable[T_co]", items() if is_function else items)


class SizedStream(Stream[T_co]):
    """A stream of known length, such as a sampler."""

    def __len__(self) -> int:
        length: int = len(self._items)  # type: ignore[arg-type]  # sized, see the class
        index, count = self.stride()
        return len(range(index, length, count))


def as_source(items: Iterable[T] | Sequence[T] | Callable[[], Iterable[T]]) -> DataSource[T]:
    """Return a source of these items: a :class:`ListSource` if they have ``len()`` and indices.

    items: a list, range or map-style dataset; any other iterable that can be iterated repeatedly,
        such as a sampler (its ``set_epoch`` is called) or an iterable dataset; or a function that
        returns one, such as a generator function.
    Raises: TypeError: none of these, or an iterator or a set.
    """
    if isinstance(items, DataSource):
        return items
    if isinstance(items, Iterator | Set):  # empty the second time, or in another order elsewhere
        raise TypeError(
            f"as_source: a {type(items).__name__} has no lasting order. Pass the function that "
            "makes it, or a list."
        )
    if is_map_style(items):
        return ListSource(cast("Sequence[T]", items))
    if isinstance(items, Iterable) or hasattr(items, "__getitem__"):
        stream: Any = SizedStream if isinstance(items, Sized) else Stream
        return cast("DataSource[T]", stream(items))
    if callable(items):
        return Stream(items)
    raise TypeError(
        f"as_source: expected an iterable or a function that returns one, "
        f"got {type(items).__name__}."
    )


def is_map_style(items: object) -> bool:
    """Return whether any item can be asked for by its index: a list, a map-style dataset."""
    if isinstance(items, DataSource):
        return isinstance(items, ListSource)
    return hasattr(items, "__getitem__") and hasattr(items, "__len__") and not _is_stream(items)


def _is_stream(items: object) -> bool:
    """Return whether this is torch's IterableDataset, which inherits a useless ``__getitem__``."""
    data: Any = sys.modules.get("torch.utils.data")
    return data is not None and isinstance(items, data.IterableDataset)
