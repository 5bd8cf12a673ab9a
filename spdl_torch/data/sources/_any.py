"""Any iterable as a source."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Set, Sized
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ._base import DataSource
from ._list import ListSource
from ._stream import SizedStream, Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


def as_source(items: Iterable[T] | Sequence[T] | Callable[[], Iterable[T]]) -> DataSource[T]:
    """Return a source of these items: a :class:`ListSource` if they have ``len()`` and indices.

    items: a list, range or map-style dataset; any other iterable that can be iterated repeatedly,
        such as a sampler (its ``set_epoch`` is called) or an iterable dataset; or a function that
        returns one, such as a generator function.
    Raises: TypeError: none of these, or an iterable that would be empty the second time.
    """
    if isinstance(items, DataSource):
        return items
    if isinstance(items, str | bytes):
        raise TypeError(
            f"as_source: expected an iterable of items, got {items!r}. For files of that name, "
            "use Files(...), FileList(...) or TarShards(...)."
        )
    if isinstance(items, Mapping | Set):
        raise TypeError(
            f"as_source: expected items in an order, got a {type(items).__name__}. "
            "Pass sorted(...) or list(...) of it."
        )
    if isinstance(items, Iterator):
        raise TypeError(
            f"as_source: a {type(items).__name__} can be iterated once only. Pass the function "
            "that makes it, or a list."
        )
    if hasattr(items, "__getitem__") and isinstance(items, Sized) and not _is_stream(items):
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
