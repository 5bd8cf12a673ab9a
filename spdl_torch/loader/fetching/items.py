"""The items of an iterable dataset, in groups or one by one, from the start or from a state."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Sequence
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
from .bad_samples import MOST_IN_A_ROW, EndOfIterable, nothing_good
from .batch_maker import END, LONG_SAMPLES, BatchMaker, timed

if TYPE_CHECKING:
    from .bad_samples import BadSample
    from .batch_maker import BatchRecipe

_logger = logging.getLogger("spdl_torch.data")


def items_into(samples: list[Any], iterator: Iterator[Any], steps: Iterable[Any]) -> bool:
    """Append an item for each step; return True if the iterator has ended."""
    for _ in steps:
        try:
            samples.append(next(iterator))
        except StopIteration:
            return True
    return False


class Items(BatchMaker):
    """Fetches the items of one worker's iterator, a batch at a time; or one, for a loader without
    batches."""

    def _open(self, recipe: BatchRecipe, resume: WorkerState, worker: int) -> None:
        """Begin the iterator. Raises: ValueError: the dataset does not take its state; what
        ``iter(dataset)`` raises."""
        self._drop_last = recipe.drop_last
        self._ended = resume.ended
        self._num_taken = 0  # since the epoch began, including those before the state
        self._under_way: list[Any] = []  # the batch's items so far; describe() reads it
        if self._streams is not None and self._key is not None:
            self._streams.begin_iterable(self._key)
        passes = passes_of(self._dataset)
        beginning = None if passes is None else passes.of_next_pass()
        self._iterator = self._iterate(resume, worker)
        if resume.state is None and not resume.num_items:
            resume = resume._replace(state=beginning, of_dataset=beginning is not None)
        self.own_state = OwnState(self._iterator, self._dataset, resume)

    def begin(self, first: int, bad: list[BadSample] | None = None) -> None:
        """Begin a batch, of the next items of this iterator."""
        super().begin(self._num_taken, bad)

    def fetch(self, index: Sequence[Any]) -> Any:
        """Return one item for each entry of ``index``, or as many as are left; without batches the
        item alone.

        Raises: EndOfIterable: none is left, or too few for a batch with ``drop_last``.
        """
        items: list[Any] = []
        before = self._num_taken
        index = index if self._auto_collation else (None,)
        self.own_state.num_drawn = before + len(index)  # for a handler that takes a state meanwhile
        try:
            take = self._take if self._tolerance is None else self._take_good
            take(items, index)
        except BaseException as error:
            self.own_state.num_drawn = self._num_taken
            if not is_users(error):  # perhaps when an item was drawn that nobody has counted
                self.own_state.num_drawn = max(self._num_taken, before + len(items)) + 1
            raise
        self.own_state.num_drawn = self._num_taken
        if not items or (self._drop_last and len(items) < len(index)):
            raise EndOfIterable
        return items if self._auto_collation else items[0]

    def progress(self, *, wanted: bool) -> WorkerState:
        if wanted:
            self.own_state.ask(self._num_taken, ended=self._ended)
        return self.own_state.reached(self._num_taken, ended=self._ended)

    def end(self) -> None:
        """Let go of the iterator. A generator that nobody else holds ends here."""
        self._iterator = None

    def describe(self, _: Any) -> str:
        number = self._num_taken + len(self._under_way)
        return f"item {number} of the iterator of {self._name}"

    def describe_batch(self, number: int, index: Any) -> str:
        """Name batch ``number`` by its items: an index says nothing about them."""
        first, last = self._first, self._num_taken - 1
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
        self._num_taken = resume.num_items
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
        streams = self._streams
        if streams is not None and self._key is not None:
            streams.begin(self._key, first)
        for place in range(self._num_taken - first):
            if streams is not None:
                streams.at(place)
            try:
                is_end = next(iterator, END) is END
            except Exception as error:  # it was raised when the item was handed out
                if is_of_handler(error):
                    raise
                continue
            if is_end:
                raise ended_early(field, self._dataset, place, self._num_taken - first)

    def _take(self, items: list[Any], index: Sequence[Any]) -> None:
        """Fill ``items``, as far as there are any, without tolerance for errors."""
        if self._ended:
            return
        self._under_way, streams = items, self._streams
        steps: Any = index
        if streams is not None:
            steps = streams.over(iter(index), len(index))
        try:
            self._ended = timed(self._cell, items_into, items, self._iterator, steps, into=items)
        except BaseException as error:
            if is_users(error):  # the failed item counts: the iterable moves past it
                self._num_taken += 1
            add_thread_note(error, f"in the iterator of {self._name}")
            raise
        finally:
            self._num_taken += len(items)
            self._under_way = []

    def _take_good(self, items: list[Any], index: Sequence[Any]) -> None:
        """Fill ``items``, without those that fail."""
        num_bad = 0
        while len(items) < len(index):
            place = self._num_taken - self._first
            if self._streams is not None:
                self._streams.at(place)
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
                self._note_bad(place, self._num_taken - 1, error)
                num_bad += 1
            if num_bad == MOST_IN_A_ROW:
                raise nothing_good(self._bad[-num_bad:])

    def _next(self) -> Any:
        if self._ended:
            raise EndOfIterable
        try:
            item = timed(self._cell, next, self._iterator, END, recorded_from=LONG_SAMPLES)
        except BaseException as error:
            if is_users(error):  # as in _take
                self._num_taken += 1
            add_thread_note(error, f"in the iterator of {self._name}")
            raise
        if item is END:
            self._ended = True
            raise EndOfIterable
        self._num_taken += 1
        return item
