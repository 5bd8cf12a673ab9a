"""The calls of user code that fetch samples, and the choice among them for a dataset."""

from __future__ import annotations

from functools import partial
from operator import getitem
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset, Subset

from .rows import row_reader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


def samples_at(dataset: Any, indices: Iterable[Any]) -> list[Any]:
    """Return a sample for each index, as torch's own loader makes them: at the same cost."""
    return [dataset[index] for index in indices]


def samples_into(samples: list[Any], dataset: Any, indices: Iterable[Any]) -> None:
    """Append the samples of ``indices``; at an error, the length is the failing sample's number."""
    # Not extend(map(...)): calling __getitem__ from C takes 10 to 50 ns longer.
    for index in indices:
        samples.append(dataset[index])  # noqa: PERF401


def items_into(samples: list[Any], iterator: Iterator[Any], steps: Iterable[Any]) -> bool:
    """Append an item for each step; return True if the iterator has ended."""
    for _ in steps:
        try:
            samples.append(next(iterator))
        except StopIteration:
            return True
    return False


def one_sample_of(dataset: Any) -> Callable[[Any], Any]:
    """Return a function that fetches the sample of an index, if need be by ``__getitems__``."""
    own = getattr(type(dataset), "__getitem__", Dataset.__getitem__)
    if own is Dataset.__getitem__ and hasattr(dataset, "__getitems__"):
        return lambda index: dataset.__getitems__([index])[0]
    return partial(getitem, dataset)


def is_read_at_once(dataset: Any, collate_fn: Any) -> bool:
    """Return whether the samples of a batch are read by one call."""
    return takes_batches(dataset) or row_reader(dataset, collate_fn) is not None


def takes_batches(dataset: Any) -> bool:
    """Return whether a batch takes one call of ``__getitems__``, as torch's loader asks for it.

    torch's Subset always has that method; around a dataset without it, it only loops.
    """
    if type(dataset) is Subset:
        return takes_batches(dataset.dataset)
    return bool(getattr(dataset, "__getitems__", None))
