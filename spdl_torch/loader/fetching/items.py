"""The items of an iterable dataset, in groups or one by one, from the start or from a state."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

from ...engine.failures import attach_note
from ..checkpoint.user_state import (
    OwnState,
    WorkerState,
    begun,
    ended_early,
    give_state,
    give_state_between_epochs,
    passes_of,
)
from ..error_notes import add_thread_note, is_of_handler, is_users
from .bad_samples import too_many_in_a_row
from .samples import items_into
from .timing import END, LONG_SAMPLES, timed

if TYPE_CHECKING:
    from ...engine.counters import TaskCell
    from .batch_maker import Batch, BatchRecipe

_logger = logging.getLogger("spdl_torch.data")


class EndOfIterable(Exception):
    """The end of an iterable dataset. Not StopIteration, which user code may raise by mistake."""


class Items:
    """Fetches the items of one worker's iterator, a batch at a time.

    Raises: ValueError: the dataset does not take its state; what ``iter(dataset)`` raises.
    """

    def __init__(
        self,
        recipe: BatchRecipe,
        batch: Batch,
        cell: TaskCell | None,
        *,
        resume: WorkerState | None,
        worker: int,
    ) -> None:
        self._dataset = dataset = recipe.dataset
        self._name = type(dataset).__name__
        self._batch = batch
        self._cell = cell
        self._drop_last = recipe.drop_last
        self._ended = resume is not None and resume.ended
        self.num_taken = 0
        """The number of items since the epoch began, including those before the state."""
        self._under_way: list[Any] = []  # the batch's items so far; describe() reads it
        if batch.streams is not None and batch.key is not None:
            batch.streams.begin_iterable(batch.key)
        begun_from = resume or WorkerState()
        passes = passes_of(dataset)
        beginning = None if passes is None else passes.of_next_pass()
        self._iterator = self._iterate(begun_from, worker)
        if begun_from.state is None and not begun_from.num_items:
            begun_from = begun_from._replace(state=beginning, of_dataset=beginning is not None)
        self.own_state = OwnState(self._iterator, dataset, begun_from)

    def fetch(self, index: Sequence[Any]) -> Any:
        """Return one item for each entry of ``index``, or as many as are left.

        Raises: EndOfIterable: none is left, or too few for a batch with ``drop_last``.
        """
        items: list[Any] = []
        before = self.num_taken
        self.own_state.num_drawn = before + len(index)  # for a handler that takes a state meanwhile
        try:
            take = self._take if self._batch.tolerance is None else self._take_good
            take(items, index)
        except BaseException as error:
            self.own_state.num_drawn = self.num_taken
            if not is_users(error):  # perhaps when an item was drawn that nobody has counted
                self.own_state.num_drawn = max(self.num_taken, before + len(items)) + 1
            raise
        self.own_state.num_drawn = self.num_taken
        if not items or (self._drop_last and len(items) < len(index)):
            raise EndOfIterable
        return items

    def progress(self, *, wanted: bool) -> WorkerState:
        """Return the iterable's progress after the last batch. ``wanted``: include its own state,
        if it keeps one.
        """
        if wanted:
            self.own_state.ask(self.num_taken, ended=self._ended)
        return self.own_state.reached(self.num_taken, ended=self._ended)

    def end(self) -> None:
        """Let go of the iterator. A generator that nobody else holds ends here."""
        self._iterator = None

    def describe(self, _: Any) -> str:
        """Describe the item that is being fetched. Called from other threads."""
        number = self.num_taken + len(self._under_way)
        return f"item {number} of the iterator of {self._name}"

    def describe_batch(self, number: int, _index: object = None) -> str:
        """Name the items of batch ``number``, which were just taken, in one short line; an index
        says nothing about them.
        """
        first, last = self._batch.first, self.num_taken - 1
        items = f"item {last}" if first >= last else f"items {first} to {last}"
        return f"batch {number}, {items} of the iterator of {self._name}"

    def _iterate(self, resume: WorkerState, worker: int) -> Any:
        has_own = resume.state is not None
        field = f"workers[{worker}].state (of_dataset={resume.of_dataset})"
        if has_own and resume.of_dataset:
            give = give_state if resume.num_items else give_state_between_epochs
            give(self._dataset, resume.state, field)
        try:
            # Workers are told which pass it is.
            is_own = get_worker_info() is None and not resume.ended
            iterator: Any = begun(self._dataset) if is_own else iter(self._dataset)
        except BaseException as error:
            add_thread_note(error, f"in iter({self._name})")
            raise
        if has_own and not resume.of_dataset and not resume.ended:
            give_state(iterator, resume.state, field)
        self.num_taken = resume.num_items
        if not resume.ended:
            num_made_again = resume.num_after if has_own else resume.num_items
            field = f"workers[{worker}].{'num_after' if has_own else 'num_items'}"
            self._pass_over(iterator, resume.num_items - num_made_again, field)
        return iterator

    def _pass_over(self, iterator: Iterator[Any], first: int, field: str) -> None:
        """Make again, and drop, the items from number ``first`` on that were handed out.

        They draw the random numbers that they drew then, which may decide what comes after them.

        Raises: ValueError: there are fewer.
        """
        batch = self._batch
        if batch.streams is not None and batch.key is not None:
            batch.streams.begin(batch.key, first)
        for place in range(self.num_taken - first):
            batch.at(place)
            try:
                is_end = next(iterator, END) is END
            except Exception as error:  # it was raised when the item was handed out
                if is_of_handler(error):
                    raise
                continue
            if is_end:
                raise ended_early(field, self._dataset, place, self.num_taken - first)

    def _take(self, items: list[Any], index: Sequence[Any]) -> None:
        """Fill ``items``, as far as there are any, without tolerance for errors."""
        if self._ended:
            return
        self._under_way, streams = items, self._batch.streams
        steps: Any = index
        if streams is not None:
            steps = streams.over(iter(index), len(index))
        try:
            self._ended = timed(self._cell, items_into, items, self._iterator, steps, into=items)
        except BaseException as error:
            if is_users(error):  # the failed item counts: the iterable moves past it
                self.num_taken += 1
            add_thread_note(error, f"in the iterator of {self._name}")
            raise
        finally:
            self.num_taken += len(items)
            self._under_way = []

    def _take_good(self, items: list[Any], index: Sequence[Any]) -> None:
        """Fill ``items``, without those that fail."""
        num_bad, batch = 0, self._batch
        while len(items) < len(index):
            place = self.num_taken - batch.first
            batch.at(place)
            try:
                items.append(self._next())
                num_bad = 0
            except EndOfIterable:
                if num_bad:
                    _logger.warning(
                        "DataLoader: the iterator of %s ended right after an error that was "
                        "skipped. If it reads from a generator, that ended there, and the rest "
                        "of its data is lost.",
                        self._name,
                    )
                return
            except Exception as error:
                if inspect.isgenerator(self._iterator):
                    attach_note(
                        error,
                        'on_error="skip" cannot go on after it: a generator ends at its first '
                        "error. Catch it inside, or return an iterator that has __next__.",
                    )
                    raise
                batch.note_bad(place, self.num_taken - 1, error)
                num_bad += 1
            if num_bad and (failure := too_many_in_a_row(batch.bad[-num_bad:])) is not None:
                raise failure

    def _next(self) -> Any:
        if self._ended:
            raise EndOfIterable
        try:
            item = timed(self._cell, next, self._iterator, END, recorded_from=LONG_SAMPLES)
        except BaseException as error:
            if is_users(error):  # as in _take
                self.num_taken += 1
            add_thread_note(error, f"in the iterator of {self._name}")
            raise
        if item is END:
            self._ended = True
            raise EndOfIterable
        self.num_taken += 1
        return item


class SingleItems(Items):
    """Fetches one item at a time, for a loader without batches."""

    def fetch(self, _: Any) -> Any:
        (item,) = super().fetch((None,))
        return item
