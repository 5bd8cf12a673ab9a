"""From indices to a batch: torch's rules for fetching and collating, one call a batch.

Used by the worker threads and, for ``num_workers=0``, on the trainer's thread.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import default_collate

from ...pipeline.failures import attach_note, describe
from ..checkpoint.user_state import OwnState, WorkerState, give_state
from ..error_notes import (
    add_thread_note,
    cause_of,
    describe_batch,
    describe_indices,
    noted_call,
    noted_sample,
)
from .bad_samples import (
    MISSING,
    BadSample,
    NoGoodSample,
    Tries,
    nothing_good,
    too_many_in_a_row,
)
from .rows import row_reader
from .sample_calls import (
    items_into,
    one_sample_of,
    samples_into,
    takes_batches,
)
from .timing import END, timed, timed_sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ...pipeline.hooks.task_hooks import TaskCell
    from ..rng.keys import StreamKey
    from ..rng.streams import SampleStreams
    from .bad_samples import Tolerance

__all__ = ["BatchMaker", "EndOfIterable"]

_logger = logging.getLogger("spdl_torch.data")


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
        streams: SampleStreams | None = None,
        key: StreamKey | None = None,
        resume: WorkerState | None = None,
        worker: int = 0,
        tolerance: Tolerance | None = None,
        fetch_cell: TaskCell | None,
        collate_cell: TaskCell | None,
    ) -> None:
        self._dataset = dataset
        self._dataset_name = type(dataset).__name__
        self._fetch_one = one_sample_of(dataset)
        self._collate_fn = collate_fn
        self._drop_last = drop_last
        self._streams = streams if key is not None else None  # None: draws are left as they are
        self._key = key
        self._tolerance = tolerance  # None: an error of a sample is the batch's
        self._auto_collation = auto_collation
        self._bad: list[BadSample] = []  # of the batch
        self._first = 0
        self._is_collating = False
        self._under_way: list[Any] = []  # without streams: the batch's samples so far
        self._fetch_cell = fetch_cell
        self._collate_cell = collate_cell
        self._ended = resume is not None and resume.ended
        self._num_items = 0  # taken from an iterable, since the epoch began
        if iterable and streams is not None and key is not None:
            streams.begin_iterable(key)
        self._iterator: Any = None
        self.own_state: OwnState | None = None
        """Of an iterable; None = map-style."""
        if iterable:
            begun_from = resume or WorkerState()
            self._iterator = self._iterate(begun_from, worker)
            self.own_state = OwnState(self._iterator, dataset, begun_from)
        self._rows = row_reader(dataset, collate_fn) if auto_collation and not iterable else None
        # Functions of the class: bound to this object they would make a cycle of it, which only a
        # garbage collection could free, and with it the dataset.
        self._fetch: Callable[[BatchMaker, Any], Any]
        if iterable:
            self._fetch = BatchMaker._next_group if auto_collation else BatchMaker._next_item
        elif not auto_collation:
            self._fetch = BatchMaker.sample if tolerance is None else BatchMaker._only_sample
        elif takes_batches(dataset):
            self._fetch = BatchMaker._in_one_call
        else:
            has_rows = self._rows is not None
            self._fetch = BatchMaker._as_rows if has_rows else BatchMaker._one_by_one

    def make(self, first: int, index: Any, number: int) -> tuple[Any, Tries | None]:
        """Batch ``number``, of ``index``, whose first sample is at position ``first`` of the epoch,
        and what it took to fetch it if samples may fail.

        Raises: EndOfIterable, NoGoodSample, or what the user's code raises.
        """
        self.begin(first if self._iterator is None else self._num_items)
        samples, tries = self._fetch(self, index), None
        if self._tolerance is not None:
            try:
                samples, tries = self.good_of(samples, self._bad)
            except NoGoodSample:
                self.forget_bad()
                raise
        batch = self.collate(samples, index, number)
        self.forget_bad()
        return batch, tries

    def good_of(self, samples: Any, bad: list[BadSample]) -> tuple[Any, Tries]:
        """What is to be collated of samples some of which failed.

        Raises: NoGoodSample, with the tries.
        """
        num_good = 1
        if self._auto_collation:
            if bad:
                samples = [sample for sample in samples if sample is not MISSING]
            num_good = len(samples) if hasattr(samples, "__len__") else 1
        elif samples is MISSING:
            num_good = 0
        tries = Tries.of(num_good, bad)
        if bad and not num_good:
            raise NoGoodSample(tries)
        return samples, tries

    def at_work(self, index: Any) -> str:
        """What is done for the batch of ``index`` now, in words; for other threads to ask."""
        if self._is_collating:
            return "stage 'collate'"
        if self._iterator is not None:
            number = self._num_items + len(self._under_way)
            return f"stage 'fetch', item {number} of the iterator of {self._dataset_name}"
        if not self._auto_collation:
            return f"stage 'fetch', sample index {describe(index)}"
        place = len(self._under_way) if self._streams is None else self._streams.place
        if self._fetch is BatchMaker._in_one_call or not 0 <= place < len(index):
            return f"stage 'fetch', {describe_indices(index)}"
        return f"stage 'fetch', sample index {describe(index[place])}"

    def forget_bad(self) -> None:
        """The batch that was begun has them: their errors may come to know the loop's frames."""
        self._bad = []

    def tries(self) -> Tries | None:
        """Of a batch that came to nothing, once; None = no sample may fail."""
        bad, self._bad = self._bad, []
        return None if self._tolerance is None else Tries.of(0, bad)

    def progress(self, *, wanted: bool) -> WorkerState | None:
        """Where an iterable stands after the last batch; None for a map-style dataset. ``wanted``:
        somebody asks for its own state, if it keeps one.
        """
        if self.own_state is None:
            return None
        if wanted:
            self.own_state.ask(self._num_items, ended=self._ended)
        return self.own_state.reached(self._num_items, ended=self._ended)

    def _iterate(self, resume: WorkerState, worker: int) -> Any:
        """The iterable's items, from where it stood.

        Raises: ValueError: it does not take its own state.
        """
        has_own = resume.state is not None
        field = f"workers[{worker}].state (of_dataset={resume.of_dataset})"
        if has_own and resume.of_dataset:
            give_state(self._dataset, resume.state, field)
        iterator: Any = iter(self._dataset)
        if has_own and not resume.of_dataset and not resume.ended:
            give_state(iterator, resume.state, field)
        self._num_items = resume.num_items
        if not resume.ended:
            num_made_again = resume.num_behind if has_own else resume.num_items
            self._pass_over(iterator, resume.num_items - num_made_again)
        return iterator

    def _pass_over(self, iterator: Iterator[Any], first: int) -> None:
        """Items from number ``first`` on that were handed out, and errors in their place. What they
        draw they draw as they did then: it may decide what comes after them.
        """
        if self._streams is not None and self._key is not None:
            self._streams.begin(self._key, first)
        for place in range(self._num_items - first):
            if self._streams is not None:
                self._streams.at(place)
            try:
                if next(iterator, END) is END:
                    return
            except Exception:  # it was told of when the item's turn was
                continue

    def begin(self, first: int, bad: list[BadSample] | None = None) -> None:
        """On this thread, samples of the batch whose first is at ``first`` of the epoch follow.

        ``bad``: where those that fail are noted, if several threads make the batch.
        """
        self._first, self._bad, self._is_collating = first, [] if bad is None else bad, False
        if self._streams is not None and self._key is not None:
            self._streams.begin(self._key, first)

    def sample_at(self, place: int, index: Any) -> Any:
        """The sample at ``place`` of the batch that was begun; MISSING: it failed and may."""
        if self._streams is not None:
            self._streams.at(place)
        if self._tolerance is None:
            return self.sample(index)
        try:
            return self.sample(index)
        except Exception as error:
            self._note_bad(place, index, error)
        return self._instead_of(place, index)

    def sample(self, index: Any) -> Any:
        """One sample of a map-style dataset."""
        try:
            return timed_sample(self._fetch_cell, self._fetch_one, index)
        except BaseException as error:
            raise noted_sample(error, index) from cause_of(error)

    def _only_sample(self, index: Any) -> Any:
        """Without batches: it is the first of its own, and may fail."""
        return self.sample_at(0, index)

    def collate(self, samples: Any, index: Any, number: int) -> Any:
        """Samples as batch ``number``, for which the sampler gave ``index``."""
        self._is_collating = True
        if self._streams is not None:
            self._streams.at_collate()
        if self._collate_fn is default_collate:
            batch = getattr(samples, "collated", None)
            if batch is not None:
                return batch  # the dataset wrote its samples into one batch already
        try:
            return timed(self._collate_cell, self._collate_fn, samples)
        except BaseException as error:
            which = describe_batch(number, index) if self._iterator is None else self._items(number)
            given = f"{which}, given {describe(samples)}"
            raise noted_call(error, "collate_fn", "in collate_fn", given) from cause_of(error)

    def _items(self, number: int) -> str:
        """A batch of an iterable's items, in one short line."""
        first, last = self._first, self._num_items - 1
        items = f"item {last}" if first >= last else f"items {first} to {last}"
        return f"batch {number}, {items} of the iterator of {self._dataset_name}"

    def _as_rows(self, index: Any) -> Any:
        reader: Any = self._rows
        rows = reader.find(index)
        if rows is None:
            return self._one_by_one(index)  # which says what sample is wrong, if one is
        return timed(self._fetch_cell, rows.read, tasks=len(index))

    def _one_by_one(self, index: Any) -> list[Any]:
        indices = index if isinstance(index, list | tuple) else list(index)
        samples = self._under_way = []
        try:
            timed(
                self._fetch_cell,
                samples_into,
                samples,
                self._dataset,
                indices if self._streams is None else self._streams.over(indices, samples),
                into=samples,
            )
        except BaseException as error:
            place, self._under_way = len(samples), []
            if self._tolerance is None or not isinstance(error, Exception):
                raise noted_sample(error, indices[place]) from cause_of(error)
            bad = cast("Exception", noted_sample(error, indices[place]))
            self._note_bad(place, indices[place], bad)
            del bad
        if len(samples) < len(indices):
            place = len(samples)
            samples.append(self._instead_of(place, indices[place]))
            samples += [self.sample_at(n, indices[n]) for n in range(place + 1, len(indices))]
        self._under_way = []  # or the batch would stay alive while this thread waits
        return samples

    def _in_one_call(self, index: Any) -> Any:
        try:
            return timed(self._fetch_cell, self._dataset.__getitems__, index)
        except BaseException as error:
            tolerates = self._tolerance is not None and isinstance(error, Exception)
            if not tolerates or not isinstance(index, list | tuple):
                where = f"in {self._dataset_name}.__getitems__"
                raise noted_call(
                    error, "__getitems__", where, describe_indices(index)
                ) from cause_of(error)
        if self._fetch_cell is not None:  # its samples are counted now
            self._fetch_cell.num_tasks -= 1
            self._fetch_cell.num_failures -= 1
        self._begin_streams(0)
        return [self.sample_at(place, each) for place, each in enumerate(index)]

    def _instead_of(self, place: int, index: Any) -> Any:
        """What takes the place of a sample that failed; MISSING: nothing does.

        It depends on the indices alone, and draws what the first one would have drawn.
        """
        tolerance = self._tolerance
        assert tolerance is not None, "guaranteed by the callers: it is their branch"
        if not tolerance.replaces:
            return MISSING
        for instead in tolerance.instead_of(index):
            self._begin_streams(place)
            try:
                return self.sample(instead)
            except Exception as error:
                self._note_bad(place, instead, error)
        raise nothing_good([each for each in self._bad if each.place == place])

    def _begin_streams(self, place: int) -> None:
        """Of the batch's samples anew: none of them has drawn anything."""
        if self._streams is not None and self._key is not None:
            self._streams.begin(self._key, self._first)
            self._streams.at(place)

    def _note_bad(self, place: int, key: Any, error: Exception) -> None:
        self._bad.append(BadSample(place, key, error))

    def _next_group(self, index: Sequence[Any]) -> list[Any]:
        samples: list[Any] = []
        if self._tolerance is None:
            self._take_items(samples, index)
        else:
            for _ in index:
                try:
                    samples.append(self._next_item())
                except EndOfIterable:
                    break
        if not samples or (self._drop_last and len(samples) < len(index)):
            raise EndOfIterable
        return samples

    def _take_items(self, samples: list[Any], index: Sequence[Any]) -> None:
        """Fill ``samples`` with items of the iterable, as many as the index has entries or as there
        are left; none of them may fail."""
        if self._ended:
            return
        self._under_way = samples
        turns = index if self._streams is None else self._streams.over(index, samples)
        try:
            self._ended = timed(
                self._fetch_cell, items_into, samples, self._iterator, turns, into=samples
            )
        except BaseException as error:
            if isinstance(error, Exception):  # an iterable that goes on has left that item behind
                self._num_items += 1
            add_thread_note(error, f"in the iterator of {self._dataset_name}")
            raise
        finally:
            self._num_items += len(samples)
            self._under_way = []

    def _next_item(self, _: Any = None) -> Any:
        """The next good item of the iterable."""
        num_bad = 0
        while True:
            place = self._num_items - self._first
            if self._streams is not None:
                self._streams.at(place)
            try:
                return self._next_of_iterable()
            except EndOfIterable:
                if num_bad:
                    _logger.warning(
                        "DataLoader: the iterator of %s ended right behind an error that was "
                        "skipped. If it reads from a generator, that ended there, and the rest "
                        "of its data is lost.",
                        self._dataset_name,
                    )
                raise
            except Exception as error:
                if self._tolerance is None:
                    raise
                if inspect.isgenerator(self._iterator):
                    attach_note(
                        error,
                        'on_error="skip" cannot go on behind it: a generator ends at its first '
                        "error. Catch it inside, or return an iterator that has __next__.",
                    )
                    raise
                self._note_bad(place, self._num_items - 1, error)
                num_bad += 1
            if (failure := too_many_in_a_row(self._bad[-num_bad:])) is not None:
                raise failure

    def _next_of_iterable(self) -> Any:
        assert self._iterator is not None, "guaranteed by __init__: only iterables come here"
        if self._ended:
            raise EndOfIterable
        try:
            item = timed_sample(self._fetch_cell, next, self._iterator, END)
        except BaseException as error:
            if isinstance(error, Exception):  # an iterable that goes on has that item behind it
                self._num_items += 1
            add_thread_note(error, f"in the iterator of {self._dataset_name}")
            raise
        if item is END:
            self._ended = True
            raise EndOfIterable
        self._num_items += 1
        return item
