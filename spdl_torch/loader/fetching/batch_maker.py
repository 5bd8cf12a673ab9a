"""Make a batch from its indices, by torch's rules for fetching and collating: one call a batch.

Used by the worker threads and, for ``num_workers=0``, on the trainer's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import IterableDataset, default_collate

from ...engine.failures import describe
from ...io._storage import batch_room
from ..error_notes import describe_batch, is_of_handler, noted_call
from .bad_samples import MISSING, BadSample, NoGoodSample, Tries
from .collating import collate_into, is_torchs_collate, odd_sample, refused_part
from .items import Items, SingleItems
from .samples import Rows, Samples, samples_of
from .timing import timed

if TYPE_CHECKING:
    from ...engine.counters import TaskCell
    from ..checkpoint.user_state import WorkerState
    from ..rng.keys import StreamKey
    from ..rng.streams import SampleStreams
    from .bad_samples import Tolerance
    from .collating import Memory


class BatchRecipe(NamedTuple):
    """The dataset of a loader and how its samples become batches; a worker has a copy of it with
    its own dataset and functions."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    auto_collation: bool
    drop_last: bool
    tolerance: Tolerance | None = None
    """The treatment of samples that fail; None = the batch fails with them."""

    @property
    def iterable(self) -> bool:
        """Whether the dataset gives its samples itself, without indices."""
        return isinstance(self.dataset, IterableDataset)


class Batch:
    """The current batch of one thread, reused for every batch.

    streams: the thread's; None = draws are left as they are.
    key: the epoch's, from which every stream follows.
    tolerance: None = an error of a sample is an error of its batch.
    """

    __slots__ = ("bad", "first", "key", "num_good", "streams", "tolerance")

    def __init__(
        self, streams: SampleStreams | None, key: StreamKey | None, tolerance: Tolerance | None
    ) -> None:
        self.streams = None if key is None else streams
        self.key = key
        self.tolerance = tolerance
        self.first = 0
        """The position in the epoch of the batch's first sample."""
        self.bad: list[BadSample] = []
        self.num_good = 0
        """The number of its other samples, once that is known."""

    def begin_again_at(self, place: int) -> None:
        """Restart every stream, as if no sample had drawn; the sample at ``place`` is next."""
        if self.streams is not None and self.key is not None:
            self.streams.begin(self.key, self.first)
            self.streams.at(place)

    def at(self, place: int) -> None:
        """Go to the stream of the sample at ``place`` of the batch."""
        if self.streams is not None:
            self.streams.at(place)

    def note_bad(self, place: int, key: Any, error: Exception) -> None:
        """Keep an error that is tolerated. Raises: the error, if a signal's handler raised it."""
        if is_of_handler(error):
            raise error
        self.bad.append(BadSample(place, key, error))

    def forget_bad(self) -> None:
        """Let go of the errors, which may refer to the frames of the training loop."""
        self.bad, self.num_good = [], 0


class BatchMaker:
    """Fetches and collates for one worker, and counts the time of each in its cell (None: off).

    ``memory``: large tensors of a batch are made there. Errors are the user's own, with a note that
    names the sample or batch.
    Raises: for an iterable dataset, as :class:`Items`.
    """

    def __init__(
        self,
        recipe: BatchRecipe,
        *,
        streams: SampleStreams | None = None,
        key: StreamKey | None = None,
        resume: WorkerState | None = None,
        worker: int = 0,
        memory: Memory | None = None,
        cells: Sequence[TaskCell | None] = (None, None),
    ) -> None:
        collate_fn = recipe.collate_fn
        fetch_cell, self._collate_cell = cells
        self._auto_collation = auto_collation = recipe.auto_collation
        self._batch = batch = Batch(streams, key, recipe.tolerance)
        self.items: Items | None = None
        """The items of an iterable dataset; None = map-style."""
        self._samples: Samples | None = None
        if recipe.iterable:
            kind = Items if auto_collation else SingleItems
            self.items = kind(recipe, batch, fetch_cell, resume=resume, worker=worker)
        else:
            self._samples = samples_of(recipe, batch, fetch_cell)
            self.sample_at = self._samples.fetch_at
            """Returns a sample of a batch that several threads make, as ``Samples.fetch_at``: the
            bound method itself, to save a call per sample."""
        self._is_torchs = collate_fn is default_collate
        # All large tensors of torch's batches go to the device. Another function could keep views
        # of the memory, from which the loop might begin copies that nobody knows of.
        self._memory = memory if is_torchs_collate(collate_fn) else None
        self._collate = collate_fn if self._memory is None else collate_into(self._memory)
        self._is_collating = False
        self.rows: Rows | None = None
        """Reads batches that need nothing else, as ``make_plain``; None = there are none."""
        if isinstance(self._samples, Rows) and memory is None and recipe.tolerance is None:
            self.rows = self._samples

    def make_plain(self, index: Any) -> Any:
        """Return the batch of ``index`` where no code of the user's takes part, so that nothing is
        drawn for it; else None."""
        if self.rows is None or type(index) is not list:
            return None
        rows = self.rows.read(index)
        return None if rows is None else rows.collated

    def make(
        self, first: int, index: Any, number: int, samples: Any = None
    ) -> tuple[Any, Tries | None]:
        """Return batch ``number``, and the tries that it took if samples may fail; who gets both
        has them forgotten.

        ``index`` is the sampler's, ``first`` the position in the epoch of the first sample.
        ``samples``: these, of a batch that has begun; None = they are to be fetched.

        Raises: EndOfIterable, NoGoodSample, or what the user's code raises.
        """
        if samples is None:
            source: Any = self._samples or self.items
            self.begin(first if self.items is None else self.items.num_taken)
            if self._memory is None:
                samples = source.fetch(index)
            else:
                with batch_room(self._memory.room):
                    samples = source.fetch(index)
        if self._batch.tolerance is None:
            return self.collate(samples, index, number), None
        samples, tries = self._good_of(samples)
        return self.collate(samples, index, number), tries

    def begin(self, first: int, bad: list[BadSample] | None = None) -> None:
        """Begin the batch whose first sample is at position ``first`` of the epoch, on this thread.

        ``bad``: the list for samples that fail, if several threads make the batch.
        """
        self._is_collating = False
        batch = self._batch
        batch.first, batch.num_good, batch.bad = first, 0, [] if bad is None else bad
        if batch.streams is not None and batch.key is not None:
            batch.streams.begin(batch.key, first)
        if self._memory is not None:
            self._memory.begin()

    def collate(self, samples: Any, index: Any, number: int) -> Any:
        """Collate the samples into batch ``number``, for which the sampler gave ``index``.

        Raises: what ``collate_fn`` raises, with a note that names the batch.
        """
        self._is_collating = True
        try:
            if self._batch.streams is not None:
                self._batch.streams.at_collate()
            if self._is_torchs and (made := getattr(samples, "collated", None)) is not None:
                return made  # the dataset has already written its samples into one batch
            try:
                return timed(self._collate_cell, self._collate, samples)
            except BaseException as error:
                name = describe_batch if self.items is None else self.items.describe_batch
                given = f"{name(number, index)}, given {describe(samples)}"
                if odd := odd_sample(samples) or (self._is_torchs and refused_part(samples)):
                    given = f"{given}; {odd}"
                raise noted_call(error, "collate_fn", "in collate_fn", given)  # noqa: B904
        finally:
            if self._memory is not None:
                self._memory.end()

    def _good_of(self, samples: Any) -> tuple[Any, Tries]:
        """Return the samples to collate, without those that failed.

        Raises: NoGoodSample, with the tries.
        """
        num_good, bad = 1, self._batch.bad
        if self._auto_collation:
            if bad:
                samples = [sample for sample in samples if sample is not MISSING]
            num_good = len(samples) if hasattr(samples, "__len__") else 1
        elif samples is MISSING:
            num_good = 0
        self._batch.num_good = num_good
        tries = Tries.of(num_good, bad)
        if bad and not num_good:
            raise NoGoodSample(tries)
        return samples, tries

    def at_work(self, index: Any) -> str:
        """Describe the work on the batch of ``index``. Called from other threads."""
        if self._is_collating:
            return "stage 'collate'"
        source: Any = self._samples or self.items
        return f"stage 'fetch', {source.describe(index)}"

    def forget_bad(self) -> None:
        """Let go of the errors of the batch, which may refer to the frames of the training loop."""
        self._batch.forget_bad()

    def tries(self) -> Tries | None:
        """Return the tries of a batch that failed, once; None = no sample may fail."""
        bad, num_good = self._batch.bad, self._batch.num_good
        self.forget_bad()
        return None if self._batch.tolerance is None else Tries.of(num_good, bad)

    def progress(self, *, wanted: bool) -> WorkerState | None:
        """Return an iterable's progress, as ``Items.progress``; None for a map-style dataset."""
        return None if self.items is None else self.items.progress(wanted=wanted)
