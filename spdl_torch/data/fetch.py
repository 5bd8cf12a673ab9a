"""From indices to a batch: torch's rules for fetching and collating, one call a batch.

Used by the worker threads and, for ``num_workers=0``, on the trainer's thread.
"""

from __future__ import annotations

import threading
from itertools import repeat
from operator import getitem
from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, Any

from torch.utils.data import Subset, default_collate

from ..pipeline.failures import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ..pipeline.hooks import TaskCell
    from .random import SampleRandom

__all__ = ["BatchMaker", "EndOfIterable", "add_thread_note", "takes_batches", "timed"]


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
        streams: SampleRandom | None = None,
        epoch_seed: int = 0,
        fetch_cell: TaskCell | None,
        collate_cell: TaskCell | None,
    ) -> None:
        self._dataset = dataset
        self._dataset_name = type(dataset).__name__
        self._collate_fn = collate_fn
        self._drop_last = drop_last
        self._streams = streams  # None: the caller's own generators, as torch with no workers
        self._epoch_seed = epoch_seed
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

    def make(self, number: int, index: Any) -> Any:
        """Batch ``number``, of ``index``. Raises: EndOfIterable, or what the user's code raises."""
        if self._streams is not None and self._iterator is None:
            self._streams.begin(self._epoch_seed, number)
        return self.collate(self._fetch(index))

    def sample_at(self, number: int, position: int, index: Any) -> Any:
        """The sample at ``position`` of batch ``number``."""
        if self._streams is not None:
            self._streams.begin(self._epoch_seed, number)
            self._streams.at(position)
        return self.sample(index)

    def sample(self, index: Any) -> Any:
        """One sample of a map-style dataset."""
        try:
            return timed(self._fetch_cell, getitem, self._dataset, index)
        except BaseException as error:
            raise _noted(error, index) from _cause(error)

    def collate(self, samples: Any) -> Any:
        """Samples as one batch."""
        if self._streams is not None and self._iterator is None:
            self._streams.at_collate()
        if self._collate_fn is default_collate:
            batch = getattr(samples, "collated", None)
            if batch is not None:
                return batch  # the dataset wrote its samples into one batch already
        try:
            return timed(self._collate_cell, self._collate_fn, samples)
        except BaseException as error:
            raised = _not_stop_iteration(error, "collate_fn")
            add_thread_note(raised, "in collate_fn", f"given {describe(samples)}")
            raise raised from _cause(error)

    def _one_by_one(self, index: Any) -> list[Any]:
        indices = index if isinstance(index, list | tuple) else list(index)
        samples: list[Any] = []
        try:
            timed(
                self._fetch_cell,
                _fetch_into,
                samples,
                self._dataset,
                indices,
                indices if self._streams is None else self._streams.positions(indices),
                tasks=len(indices),
            )
        except BaseException as error:
            raise _noted(error, indices[len(samples)]) from _cause(error)
        return samples

    def _in_one_call(self, index: Any) -> Any:
        try:
            return timed(self._fetch_cell, self._dataset.__getitems__, index)
        except BaseException as error:
            raised = _not_stop_iteration(error, "__getitems__")
            add_thread_note(raised, f"in {self._dataset_name}.__getitems__", _indices(index))
            raise raised from _cause(error)

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
            item = timed(self._fetch_cell, next, self._iterator, _END)
        except BaseException as error:
            add_thread_note(error, f"in the iterator of {self._dataset_name}")
            raise
        if item is _END:
            self._ended = True
            raise EndOfIterable
        return item


_END = object()


def timed(cell: TaskCell | None, call: Callable[..., Any], *args: Any, tasks: int = 1) -> Any:
    """``call(*args)``, its wall and CPU time on this thread counted in ``cell``."""
    if cell is None:
        return call(*args)
    wall, cpu = perf_counter_ns(), thread_time_ns()
    try:
        result = call(*args)
    except BaseException:
        cell.add_failure(perf_counter_ns() - wall, thread_time_ns() - cpu)
        raise
    if result is not _END:
        cell.add(perf_counter_ns() - wall, thread_time_ns() - cpu, tasks)
    return result


def _fetch_into(
    samples: list[Any], dataset: Any, indices: Sequence[Any], in_turn: Iterable[Any]
) -> None:
    """``samples`` keeps what came before an error, so its length tells the failing position."""
    samples.extend(map(getitem, repeat(dataset), in_turn))  # one C loop
    if len(samples) < len(indices):
        raise StopIteration  # raised by the dataset, and taken by extend() for the end


def takes_batches(dataset: Any) -> bool:
    """Whether a whole batch comes by one call of ``__getitems__``, as torch's loader asks for it.

    torch's Subset always has that method; around a dataset that does not, it only loops.
    """
    if type(dataset) is Subset:
        return takes_batches(dataset.dataset)
    return bool(getattr(dataset, "__getitems__", None))


def add_thread_note(error: BaseException, where: str, what: str = "") -> None:
    """Say on the user's own exception where it happened, once, and on which worker thread."""
    thread = threading.current_thread().name
    note = f"{where} ({thread})" if thread.startswith("spdl-") else where
    note = f"{note}, {what}" if what else note
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _noted(error: BaseException, index: Any) -> BaseException:
    error = _not_stop_iteration(error, f"dataset[{describe(index)}]")
    add_thread_note(error, "in the dataset", f"sample index {describe(index)}")
    return error


def _not_stop_iteration(error: BaseException, where: str) -> BaseException:
    """StopIteration would end the trainer's loop early and in silence; torch lets it."""
    if isinstance(error, StopIteration):
        return RuntimeError(
            f"{where} raised StopIteration, which would end the epoch early. A map-style dataset "
            "ends by its length; raise IndexError or another error for a bad index."
        )
    return error


def _cause(error: BaseException) -> BaseException | None:
    """``raise ... from`` this keeps what the user's own ``raise ... from`` said."""
    return error if isinstance(error, StopIteration) else error.__cause__


def _indices(index: Any) -> str:
    text = ", ".join(map(describe, list(index)[:8]))
    return f"indices [{text}{', ...' if len(index) > 8 else ''}]"
