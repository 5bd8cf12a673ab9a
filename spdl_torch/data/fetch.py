"""From indices to a batch: torch's rules for fetching and collating, one call a batch.

Used by the worker threads and, for ``num_workers=0``, on the trainer's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import getitem
from time import perf_counter_ns, thread_time_ns
from typing import Any

from torch.utils.data import default_collate

from ..pipeline.failures import describe
from ..pipeline.hooks import TaskCell

__all__ = ["BatchMaker", "EndOfIterable"]


class EndOfIterable(Exception):
    """An iterable dataset has ended. Not StopIteration, which user code may raise by mistake."""


class BatchMaker:
    """Fetches and collates for one worker, and counts the time of each in a cell (None: off).

    Errors are the user's own, with a note that says which sample or batch they come from.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[Any], Any],
        *,
        iterable: bool,
        auto_collation: bool,
        drop_last: bool,
        fetch_cell: TaskCell | None,
        collate_cell: TaskCell | None,
    ) -> None:
        self._dataset = dataset
        self._collate_fn = collate_fn
        self._drop_last = drop_last
        self._fetch_cell = fetch_cell
        self._collate_cell = collate_cell
        self._ended = False
        self._iterator = iter(dataset) if iterable else None
        self._fetch: Callable[[Any], Any]
        if iterable:
            self._fetch = self._next_group if auto_collation else self._next_item
        elif not auto_collation:
            self._fetch = self.sample
        elif takes_batches(dataset):
            self._fetch = self._in_one_call
        else:
            self._fetch = self._one_by_one

    def make(self, index: Any) -> Any:
        """The batch of ``index``. Raises: EndOfIterable, or what the user's code raises."""
        return self.collate(self._fetch(index))

    def sample(self, index: Any) -> Any:
        """One sample of a map-style dataset."""
        try:
            return _timed(self._fetch_cell, getitem, self._dataset, index)
        except Exception as error:
            raise _noted(error, index) from _cause(error)

    def collate(self, samples: Any) -> Any:
        """Samples as one batch."""
        if self._collate_fn is default_collate and hasattr(samples, "collated"):
            return samples.collated  # the dataset wrote its samples into one batch already
        try:
            return _timed(self._collate_cell, self._collate_fn, samples)
        except Exception as error:
            error.add_note(f"in collate_fn, given {describe(samples)}")
            raise _not_stop_iteration(error, "collate_fn") from _cause(error)

    def _one_by_one(self, index: Any) -> list[Any]:
        indices = index if isinstance(index, list | tuple) else list(index)
        samples: list[Any] = []
        try:
            _timed(
                self._fetch_cell, _fetch_into, samples, self._dataset, indices, tasks=len(indices)
            )
        except Exception as error:
            raise _noted(error, indices[len(samples)]) from _cause(error)
        return samples

    def _in_one_call(self, index: Any) -> Any:
        try:
            return _timed(self._fetch_cell, self._dataset.__getitems__, index)
        except Exception as error:
            error.add_note(f"in __getitems__ of {type(self._dataset).__name__}, {_indices(index)}")
            raise _not_stop_iteration(error, "__getitems__") from _cause(error)

    def _next_group(self, index: Sequence[Any]) -> list[Any]:
        samples: list[Any] = []
        for _ in index:
            try:
                samples.append(self._next_item())
            except EndOfIterable:
                break
        if not samples or (self._drop_last and len(samples) < len(index)):
            raise EndOfIterable
        return samples

    def _next_item(self, _: Any = None) -> Any:
        assert self._iterator is not None, "guaranteed by __init__: only iterables come here"
        if self._ended:
            raise EndOfIterable
        try:
            item = _timed(self._fetch_cell, next, self._iterator, _END)
        except Exception as error:
            error.add_note(f"in the iterator of {type(self._dataset).__name__}")
            raise
        if item is _END:
            self._ended = True
            raise EndOfIterable
        return item


_END = object()


def _timed(cell: TaskCell | None, call: Callable[..., Any], *args: Any, tasks: int = 1) -> Any:
    """``call(*args)``, its wall and CPU time on this thread counted in ``cell``."""
    if cell is None:
        return call(*args)
    wall, cpu = perf_counter_ns(), thread_time_ns()
    try:
        result = call(*args)
    except Exception:
        cell.add_failure(perf_counter_ns() - wall, thread_time_ns() - cpu)
        raise
    if result is not _END:
        cell.add(perf_counter_ns() - wall, thread_time_ns() - cpu, tasks)
    return result


def _fetch_into(samples: list[Any], dataset: Any, indices: Sequence[Any]) -> None:
    """``samples`` keeps what came before an error, so its length tells the failing position."""
    samples.extend(map(getitem, repeat(dataset), indices))  # one C loop
    if len(samples) < len(indices):
        raise StopIteration  # raised by the dataset, and taken by extend() for the end


def takes_batches(dataset: Any) -> bool:
    """Whether torch would fetch a whole batch by one call of ``__getitems__``."""
    return bool(getattr(dataset, "__getitems__", None))


def _noted(error: Exception, index: Any) -> Exception:
    error.add_note(f"in the dataset, sample index {describe(index)}")
    return _not_stop_iteration(error, f"dataset[{describe(index)}]")


def _not_stop_iteration(error: Exception, where: str) -> Exception:
    """StopIteration would end the trainer's loop early and in silence; torch lets it."""
    if isinstance(error, StopIteration):
        return RuntimeError(
            f"{where} raised StopIteration, which would end the epoch early. A map-style dataset "
            "ends by its length; raise IndexError or another error for a bad index."
        )
    return error


def _cause(error: Exception) -> BaseException | None:
    """``raise ... from`` this keeps what the user's own ``raise ... from`` said."""
    return error if isinstance(error, StopIteration) else error.__cause__


def _indices(index: Any) -> str:
    text = ", ".join(map(describe, list(index)[:8]))
    return f"indices [{text}{', ...' if len(index) > 8 else ''}]"
