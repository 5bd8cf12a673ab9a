"""Make a batch from its indices, by torch's rules for fetching and collating: one call a batch.

Used by the worker threads and, for ``num_workers=0``, on the trainer's thread. How the samples are
fetched is a subclass's matter: :mod:`.samples` and :mod:`.items`.

Calls of user code are timed: counted in a worker's cells, and long ones recorded in its ring. The
wall clock is read for every call. The thread's CPU clock is read for long ones and for some of the
others (see :class:`CallClock`), and only long ones are kept one by one: after a decoder, which
leaves nothing in the processor's caches, reading that clock twice and writing a record takes 9 µs
(measured), on warm caches less than 1 µs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Sized
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import default_collate

from ...engine.counters import LONG_NS
from ...engine.failures import describe
from ...io._storage import batch_room
from ..checkpoint.user_state import WorkerState
from ..error_notes import describe_batch, is_of_handler, noted_call
from .bad_samples import MISSING, BadSample, NoGoodSample, Tries
from .collating import collate_into, is_torchs_collate, odd_sample, refused_part

if TYPE_CHECKING:
    from ...engine.counters import TaskCell
    from ...engine.rings import Ring
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
    iterable: bool
    """Whether the dataset gives its samples itself, without indices."""
    tolerance: Tolerance | None = None
    """The treatment of samples that fail; None = the batch fails with them."""


class BatchMaker(ABC):
    """Fetches and collates for one worker, and counts the time of each in its cell (None: off).

    ``streams``: the thread's; None = draws are left as they are. ``key``: the epoch's, from which
    every stream follows; None = none is begun. ``memory``: large tensors of a batch are made there.
    Errors are the user's own, with a note that names the sample or batch.
    Raises: as ``_open``.
    """

    reads_rows = False
    """Whether ``make_plain`` may return a batch."""

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
        self._dataset = recipe.dataset
        self._name = type(recipe.dataset).__name__
        self._tolerance = recipe.tolerance
        self._auto_collation = recipe.auto_collation
        self._cell, self._collate_cell = cells
        self._streams = None if key is None else streams
        self._key = key
        # Of the batch that is being made:
        self._first = 0  # the position in the epoch of its first sample
        self._bad: list[BadSample] = []
        self._num_good = 0  # its other samples, once that is known
        self._is_collating = False
        self._is_torchs = recipe.collate_fn is default_collate
        # All large tensors of torch's batches go to the device. Another function could keep views
        # of the memory, from which the loop might begin copies that nobody knows of.
        self._memory = memory if is_torchs_collate(recipe.collate_fn) else None
        self._collate_fn = recipe.collate_fn
        if self._memory is not None:
            self._collate_fn = collate_into(self._memory)
        self._open(recipe, resume or WorkerState(), worker)

    # How a dataset gives its samples:

    @abstractmethod
    def _open(self, recipe: BatchRecipe, resume: WorkerState, worker: int) -> None:
        """Begin to read the dataset. ``resume``: where worker ``worker`` goes on in an iterable."""

    @abstractmethod
    def fetch(self, index: Any) -> Any:
        """Return the samples of the batch that has begun, with MISSING in place of tolerated
        failures. ``index``: the sampler's."""

    @abstractmethod
    def describe(self, index: Any) -> str:
        """Describe what is being fetched for the batch of ``index``. Called from other threads."""

    def describe_batch(self, number: int, index: Any) -> str:
        """Name batch ``number``, whose samples were just fetched, in one short line."""
        return describe_batch(number, index)

    def progress(self, *, wanted: bool) -> WorkerState | None:
        """Return an iterable's progress after the last batch; None for a map-style dataset.
        ``wanted``: include its own state, if it keeps one."""
        return None

    def make_plain(self, index: Any) -> Any:
        """Return the batch of ``index`` where no code of the user's takes part, so that nothing is
        drawn for it; else None."""
        return None

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
            self.begin(first)
            if self._memory is None:
                samples = self.fetch(index)
            else:
                with batch_room(self._memory.room):
                    samples = self.fetch(index)
        if self._tolerance is None:
            return self._collate(samples, index, number), None
        samples, tries = self._good_of(samples)
        return self._collate(samples, index, number), tries

    def begin(self, first: int, bad: list[BadSample] | None = None) -> None:
        """Begin the batch whose first sample is at position ``first`` of the epoch, on this thread.

        ``bad``: the list for samples that fail, if several threads make the batch.
        """
        self._is_collating = False
        self._first, self._num_good, self._bad = first, 0, [] if bad is None else bad
        if self._streams is not None and self._key is not None:
            self._streams.begin(self._key, first)
        if self._memory is not None:
            self._memory.begin()

    def _begin_again_at(self, place: int) -> None:
        """Restart every stream, as if no sample had drawn; the sample at ``place`` is next."""
        if self._streams is not None and self._key is not None:
            self._streams.begin(self._key, self._first)
            self._streams.at(place)

    def _note_bad(self, place: int, key: Any, error: Exception) -> None:
        """Keep an error that is tolerated. Raises: the error, if a signal's handler raised it."""
        if is_of_handler(error):
            raise error
        self._bad.append(BadSample(place, key, error))

    def _collate(self, samples: Any, index: Any, number: int) -> Any:
        """Collate the samples into batch ``number``, for which the sampler gave ``index``.

        Raises: what ``collate_fn`` raises, with a note that names the batch.
        """
        self._is_collating = True
        try:
            if self._streams is not None:
                self._streams.at_collate()
            if self._is_torchs and (made := getattr(samples, "collated", None)) is not None:
                return made  # the dataset has already written its samples into one batch
            try:
                return timed(self._collate_cell, self._collate_fn, samples)
            except BaseException as error:
                given = f"{self.describe_batch(number, index)}, given {describe(samples)}"
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
        num_good, bad = 1, self._bad
        if self._auto_collation:
            if bad:
                samples = [sample for sample in samples if sample is not MISSING]
            num_good = len(samples) if hasattr(samples, "__len__") else 1
        elif samples is MISSING:
            num_good = 0
        self._num_good = num_good
        tries = Tries.of(num_good, bad)
        if bad and not num_good:
            raise NoGoodSample(tries)
        return samples, tries

    def at_work(self, index: Any) -> str:
        """Describe the work on the batch of ``index``. Called from other threads."""
        return "stage 'collate'" if self._is_collating else f"stage 'fetch', {self.describe(index)}"

    def forget_bad(self) -> None:
        """Let go of the errors of the batch, which may refer to the frames of the training loop."""
        self._bad, self._num_good = [], 0

    def tries(self) -> Tries | None:
        """Return the tries of a batch that failed, once; None = no sample may fail."""
        bad, num_good = self._bad, self._num_good
        self.forget_bad()
        return None if self._tolerance is None else Tries.of(num_good, bad)


END = object()
"""The result of a call that had nothing to do: it is not counted."""

_LONG_PARTS = 5
"""The factor by which a part of a batch has to take longer than a batch to be recorded: the records
of a batch of 0.1 ms and its two parts would take 1.5 % of it (measured)."""
LONG_SAMPLES = 100
"""The factor by which a sample of many has to take longer than a batch to be recorded: from 10 ms
on, or always at item level."""


def timed(
    cell: TaskCell | None,
    call: Callable[..., Any],
    *args: Any,
    tasks: int = 1,
    into: Sized | None = None,
    recorded_from: int = _LONG_PARTS,
) -> Any:
    """Return ``call(*args)``, and count its wall and CPU time on this thread in ``cell``.

    tasks: the number of tasks that the call counts for. ``into``: an empty list that it fills; each
    entry counts as a task, also those before an error. ``recorded_from``: the factor.
    """
    if cell is None:
        return call(*args)
    clock, cpu, wall = cell.clock, -1, perf_counter_ns()
    if clock.num_unclocked < 1 or wall >= clock.due_ns:
        wall = clock.read()
    try:
        result = call(*args)
    except BaseException:
        took_ns = (now := perf_counter_ns()) - wall
        is_unclocked = took_ns < LONG_NS and clock.num_unclocked
        cell.add_failure(took_ns, -1 if is_unclocked else clock.cpu_of(wall, now))
        cell.num_tasks += 0 if into is None else len(into)
        raise
    if result is END:
        return result
    now = perf_counter_ns()
    took_ns = now - wall
    if took_ns < LONG_NS and clock.num_unclocked:
        clock.num_unclocked -= 1
    else:
        cpu = clock.cpu_of(wall, now)
    if into is not None:
        tasks = len(into)
    if tasks:
        cell.add(took_ns, cpu, tasks)
    ring = cell.ring
    if ring is not None and took_ns >= ring.shortest_ns * recorded_from:
        ring.add_part(cell.part, wall, now, cpu)
    return result


def record_parts(ring: Ring, cells: Iterable[TaskCell | None]) -> None:
    """Record the calls timed with the cells of fetching and collating in ``ring`` from now on."""
    for name, cell in zip(("fetch", "collate"), cells, strict=True):
        if cell is not None:
            cell.part, cell.ring = name, ring
