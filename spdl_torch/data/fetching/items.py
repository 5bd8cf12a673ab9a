"""The items of an iterable dataset, in groups or one by one, from where a state stands."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

from ...pipeline.failures import attach_note
from ..checkpoint.user_state import OwnState, WorkerState, give_state
from ..error_notes import add_thread_note
from .bad_samples import too_many_in_a_row
from .sample_calls import items_into
from .timing import END, timed, timed_sample

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ...pipeline.hooks.task_hooks import TaskCell
    from .batch import Batch

__all__ = ["EndOfIterable", "Items", "SingleItems"]

_logger = logging.getLogger("spdl_torch.data")


class EndOfIterable(Exception):
    """An iterable dataset has ended. Not StopIteration, which user code may raise by mistake."""


class Items:
    """Fetches the items of one worker's iterator, a batch at a time.

    Raises: ValueError: the dataset does not take its state; what ``iter(dataset)`` raises.
    """

    def __init__(
        self,
        dataset: Any,
        batch: Batch,
        cell: TaskCell | None,
        *,
        resume: WorkerState | None,
        worker: int,
        drop_last: bool,
    ) -> None:
        self._dataset = dataset
        self._name = type(dataset).__name__
        self._batch = batch
        self._cell = cell
        self._drop_last = drop_last
        self._ended = resume is not None and resume.ended
        self.num_taken = 0
        """Items since the epoch began, those of before the state included."""
        self._under_way: list[Any] = []  # of the batch, so far
        if batch.streams is not None and batch.key is not None:
            batch.streams.begin_iterable(batch.key)
        begun_from = resume or WorkerState()
        self._iterator = self._iterate(begun_from, worker)
        self.own_state = OwnState(self._iterator, dataset, begun_from)

    def fetch(self, index: Sequence[Any]) -> Any:
        """Return as many items as ``index`` has entries, or as there are left.

        Raises: EndOfIterable: none is left, or too few for a batch with ``drop_last``.
        """
        items: list[Any] = []
        if self._batch.tolerance is None:
            self._take(items, index)
        else:
            for _ in index:
                try:
                    items.append(self._next_good())
                except EndOfIterable:
                    break
        if not items or (self._drop_last and len(items) < len(index)):
            raise EndOfIterable
        return items

    def progress(self, *, wanted: bool) -> WorkerState:
        """Return where the iterable stands after the last batch. ``wanted``: somebody asks for its
        own state, if it keeps one.
        """
        if wanted:
            self.own_state.ask(self.num_taken, ended=self._ended)
        return self.own_state.reached(self.num_taken, ended=self._ended)

    def describe(self, _: Any) -> str:
        """Say what is fetched now; for other threads to ask."""
        number = self.num_taken + len(self._under_way)
        return f"item {number} of the iterator of {self._name}"

    def describe_batch(self, number: int) -> str:
        """Name the items of batch ``number``, which were just taken, in one short line."""
        first, last = self._batch.first, self.num_taken - 1
        items = f"item {last}" if first >= last else f"items {first} to {last}"
        return f"batch {number}, {items} of the iterator of {self._name}"

    def _iterate(self, resume: WorkerState, worker: int) -> Any:
        has_own = resume.state is not None
        field = f"workers[{worker}].state (of_dataset={resume.of_dataset})"
        if has_own and resume.of_dataset:
            give_state(self._dataset, resume.state, field)
        iterator: Any = iter(self._dataset)
        if has_own and not resume.of_dataset and not resume.ended:
            give_state(iterator, resume.state, field)
        self.num_taken = resume.num_items
        if not resume.ended:
            num_made_again = resume.num_behind if has_own else resume.num_items
            self._pass_over(iterator, resume.num_items - num_made_again)
        return iterator

    def _pass_over(self, iterator: Iterator[Any], first: int) -> None:
        """Take the items from number ``first`` on that were handed out, and errors in their place.
        They draw what they drew then: it may decide what comes after them.
        """
        batch = self._batch
        if batch.streams is not None and batch.key is not None:
            batch.streams.begin(batch.key, first)
        for place in range(self.num_taken - first):
            batch.at(place)
            try:
                if next(iterator, END) is END:
                    return
            except Exception:  # it was reported when the item's turn was
                continue

    def _take(self, items: list[Any], index: Sequence[Any]) -> None:
        """Fill ``items``; none of them may fail."""
        if self._ended:
            return
        self._under_way, streams = items, self._batch.streams
        turns = index if streams is None else streams.over(index, items)
        try:
            self._ended = timed(self._cell, items_into, items, self._iterator, turns, into=items)
        except BaseException as error:
            if isinstance(error, Exception):  # an iterable that goes on has left that item behind
                self.num_taken += 1
            add_thread_note(error, f"in the iterator of {self._name}")
            raise
        finally:
            self.num_taken += len(items)
            self._under_way = []

    def _next_good(self) -> Any:
        num_bad, batch = 0, self._batch
        while True:
            place = self.num_taken - batch.first
            batch.at(place)
            try:
                return self._next()
            except EndOfIterable:
                if num_bad:
                    _logger.warning(
                        "DataLoader: the iterator of %s ended right behind an error that was "
                        "skipped. If it reads from a generator, that ended there, and the rest "
                        "of its data is lost.",
                        self._name,
                    )
                raise
            except Exception as error:
                if batch.tolerance is None:
                    raise
                if inspect.isgenerator(self._iterator):
                    attach_note(
                        error,
                        'on_error="skip" cannot go on behind it: a generator ends at its first '
                        "error. Catch it inside, or return an iterator that has __next__.",
                    )
                    raise
                batch.note_bad(place, self.num_taken - 1, error)
                num_bad += 1
            if (failure := too_many_in_a_row(batch.bad[-num_bad:])) is not None:
                raise failure

    def _next(self) -> Any:
        if self._ended:
            raise EndOfIterable
        try:
            item = timed_sample(self._cell, next, self._iterator, END)
        except BaseException as error:
            if isinstance(error, Exception):  # as in _take
                self.num_taken += 1
            add_thread_note(error, f"in the iterator of {self._name}")
            raise
        if item is END:
            self._ended = True
            raise EndOfIterable
        self.num_taken += 1
        return item


class SingleItems(Items):
    """Without batches: an item at a time."""

    def fetch(self, _: Any) -> Any:
        return self._next_good()
