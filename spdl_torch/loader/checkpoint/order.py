"""The order of one epoch: what it began with, what was drawn of it, and what the loop has had; from
which a loader's state is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ..error_notes import add_thread_note
from ..sampling.sampler_chain import epoch_of, names_of, unshared
from .epoch_start import BaseSeed, SamplerState
from .last_indices import NUM_LAST, checksum_of, last_of
from .resume_state import encoded, packed_index
from .user_state import WorkerState

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from .drawing import Drawing
    from .last_indices import LastIndices
    from .saved_state import ResumeState
    from .user_state import OwnState

END = object()
"""In place of an index that there is not."""


class _SoFar(NamedTuple):
    """The part of the order that changes with every batch."""

    num_in_order: int
    """The number of this iterator's batches before the first that was not handed out."""
    local_samples: int
    """The number of this rank's samples in those."""
    handed: tuple[int, ...]
    """The batches handed out before their turn, perhaps with some that are in order by now."""
    workers: tuple[WorkerState, ...]
    next_worker: int

    @property
    def ahead(self) -> tuple[int, ...]:
        """The batches handed out before their turn, counted from the first that was not."""
        numbers = (number - self.num_in_order for number in self.handed)
        return tuple(sorted(number for number in numbers if number >= 0))


@dataclass(kw_only=True, eq=False, repr=False)
class Order:
    """The order of one epoch. The iterator writes it, on the trainer's thread; the loader reads it.
    It does not refer to the iterator, so dropping that ends its threads.

    The first fields say what the epoch began with, and a state says it again as long as it runs.
    """

    sampler: Any
    """The sampler that gives the index of each batch."""
    in_batches: bool
    """Whether it gives the indices of a batch at once."""
    world: int
    """The number of ranks that share it."""
    epoch: int
    """The number of epochs begun before this one."""
    epoch_seed: int
    base: BaseSeed
    generators: list[torch.Tensor]
    persistent: bool
    keeps_datasets: bool
    """Whether later epochs use the same dataset objects."""
    start: int = 0
    """The number of samples on all ranks before this iterator's first."""
    before: LastIndices | None = None
    """The last indices before this iterator's first; None = they say nothing of its order."""
    nothing_left: bool = False
    """Whether the epoch began after its last batch: the saved loop had not seen the end."""
    before_first: list[torch.Tensor] = field(default_factory=list)
    """The user's generators before the first index was drawn ahead, to go on within an epoch; [] =
    nothing was drawn ahead that may have to be drawn again."""
    left_before: tuple[int, ...] = ()
    """The number of items that the resumed epoch before this one had left; see
    ``left_of_resumed``."""
    num_resumed: tuple[int, ...] = ()
    """The number of items of each worker before the state with which the epoch began."""
    loaded_before: frozenset[int] = frozenset()
    """The batches that were received out of order before the state was taken: they are not loaded
    again."""
    begins_late: bool = False
    """Whether the sampler's generator begins at its first index. Without workers that may be long
    after ``iter()``, so the epoch given last to ``set_epoch()`` counts."""

    drawing: Drawing | None = None
    """The indices of a sampler that keeps its own state."""
    sampler_epoch: int | None = None
    num_drawn: int = 0
    """The number of batches drawn from the sampler."""
    samples_drawn: int = 0
    """The number of this rank's samples in those, and in what a resumed iterator has skipped."""

    workers: list[WorkerState] = field(default_factory=list)
    """The states of the workers' iterables; [] = map-style."""
    next_worker: int = 0
    is_wanted: bool = False
    """Whether states are wanted: those of iterables are taken after every batch. An iterable
    without a state counts its items, and resuming makes them again."""
    own: OwnState | None = None
    """The state of an iterable loaded on the trainer's thread. Nothing is prefetched there, so it
    is asked when the loader is."""
    local_samples: int = 0
    """The number of samples handed out on this rank, up to the first batch that was not."""
    ahead: set[int] = field(default_factory=set)
    """The batches handed out before their turn: at first those of the resumed state, drawn or
    not, then also this iterator's."""
    finished: bool = False
    """Whether the loop has seen the end."""
    _num_in_order: int = 0
    _drawn: dict[int, tuple[int, Any]] = field(default_factory=dict)
    """The drawn batches that were not handed out in order, and the last ones that were. Keys are
    batch numbers, ascending; values the samples of this rank up to the batch's end, and its index,
    or the end of it."""
    _before: tuple[Any, ...] | None = None
    """The fields of the ``_SoFar`` before the last batch was handed out."""
    _before_two: tuple[Any, ...] | None = None
    """The same, before the last two."""

    def draw(self, indices: Iterator[Any]) -> tuple[Any, int, int] | None:
        """Return the next of the sampler's ``indices``, the position of its first sample in the
        epoch, and the number of its batch; None = there is none left.

        The end is a value: StopIteration would not differ from one that user code lets escape.
        """
        if self.begins_late and not self.num_drawn:
            self.sampler_epoch = epoch_of(self.sampler)
        while True:
            number, first = self.num_drawn, self.samples_drawn
            index = self.next_index(indices)
            if index is END:
                return None
            if self.in_batches and hasattr(index, "__next__"):
                index = list(index)
            end = self.samples_drawn = first + self.count(index)
            self.num_drawn = number + 1
            if self.drawing is not None:
                # Without a call in between, so that Ctrl-C finds it here or there.
                self._drawn[number] = end, index
                self.drawing.given = ()
            elif not self.workers:  # these report their own progress
                # A copy: the dataset gets the list, and may change it.
                is_list = self.in_batches and type(index) is list
                self._drawn[number] = end, index[-NUM_LAST:] if is_list else index
            if number not in self.loaded_before:
                return index, first, number

    def next_index(self, indices: Iterator[Any]) -> Any:
        """Return the next of the sampler's ``indices``, which it cannot change; END = none is left.
        An error has a note that it came from the sampler."""
        try:
            return unshared(next(indices, END))
        except BaseException as error:
            where = f"in the sampler ({names_of(self.sampler)})"
            add_thread_note(error, where, f"asked for batch {self.num_drawn}")
            raise

    def count(self, index: Any) -> int:
        """Return the number of samples of an index."""
        if not self.in_batches:
            return 1
        try:
            return len(index)
        except TypeError:  # a slice, for __getitems__
            return 1

    def handed(self, number: int) -> None:
        """Record that the trainer received a map-style batch, or the error in its place."""
        if self.ahead:
            self._advance()
        drawn = self._drawn
        while (oldest := next(iter(drawn), number)) < self._num_in_order - NUM_LAST:
            del drawn[oldest]
        now = self._num_in_order, self.local_samples, tuple(self.ahead), (), 0
        self._before, self._before_two = now, self._before
        if number == self._num_in_order and not self.ahead:
            # A single statement, which Ctrl-C cannot split: there is no call inside it.
            self.local_samples, self._num_in_order = drawn[number][0], number + 1
            return
        self.ahead |= {number}  # likewise; ``_so_far`` advances

    def _advance(self) -> None:
        """Advance past the batches that were handed out in order.

        Ctrl-C may come between any two lines here and in ``handed``: every line leaves a state
        from which another call completes the step, and ``_so_far`` makes that call.
        """
        while (number := self._num_in_order) in self.ahead and number in self._drawn:
            self.local_samples, self._num_in_order = self._drawn[number][0], number + 1
            self.ahead.discard(number)

    def handed_by(self, worker: int, state: WorkerState) -> None:
        """Record that the trainer received a batch, or an error, of this worker's iterable."""
        now, following = self._so_far(), (worker + 1) % len(self.workers)
        self._before, self._before_two = now, self._before
        self.workers[worker], self.next_worker = state, following  # as in ``handed``

    def ended(self, worker: int, state: WorkerState) -> None:
        """Record the end of this worker's iterable."""
        self.workers[worker] = state

    def unknown_ends(self) -> list[int]:
        """Return the workers whose dataset outlives this finished epoch with a state that nobody
        has asked for."""
        if not (self.finished and self.keeps_datasets):
            return []
        return [
            number
            for number, worker in enumerate(self.workers)
            if worker.keeper == "dataset" and worker.state is None and worker.failure is None
        ]

    @property
    def given(self) -> tuple[int, int] | None:
        """The sampler's epoch, and how many of its samples the trainer has had on all ranks; None =
        a sampler without epochs, or an iterable. Other threads may ask.
        """
        if self.workers or self.sampler_epoch is None:
            return None
        number, samples = self._num_in_order, self.local_samples
        while number in self.ahead and number in self._drawn:  # as ``_advance`` will
            samples, number = self._drawn[number][0], number + 1
        return self.sampler_epoch, self.start + samples * self.world

    @property
    def is_vague(self) -> bool:
        """Whether a later epoch has just begun on lasting datasets whose states are unknown."""
        has_begun_alike = self.own is not None or self.base.num_epochs == 0 or self.finished
        return not has_begun_alike and any(
            each.keeper == "dataset" and each.state is None and not each.num_items
            for each in self.workers
        )

    @property
    def num_counted(self) -> int:
        """The number of items that resuming makes again, though their iterable keeps a state."""
        if self.own is not None or self.finished:
            return 0
        return sum(w.num_items for w in self.workers if w.keeper and w.state is None)

    def state(self, generators: list[torch.Tensor], *, num_back: int = 0) -> ResumeState:
        """Return the loader's state.

        ``generators``: their states now, for a finished epoch. ``num_back``: return the state
        before the last batch, or the last two, for a caller whose consumer has not had those.

        Raises: what a user's object raises when it is asked for its state.
        """
        from .saved_state import ResumeState

        before = (None, self._before, self._before_two)[num_back]
        if self.finished and not before:
            return ResumeState(
                epoch=self.epoch,
                epoch_seed=self.epoch_seed,
                finished=True,
                sampler_epoch=self.sampler_epoch,
                sampler=None if self.drawing is None else self.drawing.at_end(),
                generators=tuple(map(encoded, generators)),
                **self.base.following(is_new=not self.persistent)._asdict(),
                workers=self._at_end(),
            )
        so_far = self._so_far()
        if before:
            so_far = _SoFar(*before)
        elif self.own is not None:
            so_far = so_far._replace(workers=self._asked_now())
        _raise_failures(so_far.workers)
        sampler = SamplerState()
        if self.drawing is not None:
            sampler = self.drawing.now()
            drawn = [index for n, (_, index) in self._drawn.items() if n >= so_far.num_in_order]
            pending = (*drawn, *sampler.pending)
            sampler = sampler._replace(pending=tuple(map(packed_index, pending)))
        return ResumeState(
            epoch=self.epoch,
            epoch_seed=self.epoch_seed,
            finished=False,
            num_samples=self.start + so_far.local_samples * self.world,
            ahead=so_far.ahead,
            sampler_epoch=self.sampler_epoch,
            **sampler._asdict(),
            order=checksum_of(self._last_before(so_far.num_in_order)),
            generators=tuple(map(encoded, self.generators)),
            **self.base._asdict(),
            workers=so_far.workers,
            next_worker=so_far.next_worker,
        )

    def _last_before(self, number: int) -> LastIndices:
        """Return the last indices before batch ``number``; () if they say nothing."""
        if self.before is None or self.drawing is not None or self.workers:
            return ()
        drawn = [index for each, (_, index) in self._drawn.items() if each < number]
        last = last_of(drawn[-NUM_LAST:], in_batches=self.in_batches)
        return (*self.before, *last)[-NUM_LAST:]

    @property
    def left_of_resumed(self) -> tuple[int, ...]:
        """The number of items that each worker made in an epoch that was resumed in its middle, and
        whose datasets stay; () = this is another one."""
        if not (self.finished and self.keeps_datasets and any(self.num_resumed)):
            return ()
        pairs = zip(self.workers, self.num_resumed, strict=True)
        return tuple(worker.num_items - num_before for worker, num_before in pairs)

    @property
    def is_short(self) -> bool:
        """Whether this whole epoch has just the items that the resumed one before it had left."""
        here = tuple(worker.num_items for worker in self.workers)
        return bool(here) and here == self.left_before

    def left_to_next(self) -> list[WorkerState]:
        """Return the states that the workers' datasets keep for the next epoch, where known."""
        is_known = self.finished and self.keeps_datasets
        return [
            each._replace(num_items=0, num_after=0, ended=False)
            if is_known and (each.of_dataset or each.keeper == "dataset")
            else WorkerState(keeper=each.keeper)  # an iterator's state ends with its epoch
            for each in self.workers
        ]

    def _at_end(self) -> tuple[WorkerState, ...]:
        """Return the states that the datasets keep for the next epoch; () if their copies end with
        this one."""
        if not self.keeps_datasets:
            return ()
        if self.own is not None:
            self.workers = list(self._asked_now())
        left = self.left_to_next()
        _raise_failures(left)
        return tuple(left) if any(worker.of_dataset for worker in left) else ()

    def _asked_now(self) -> tuple[WorkerState, ...]:
        assert self.own is not None, "guaranteed by the callers"
        (worker,) = self.workers
        self.own.ask(worker.num_items, ended=worker.ended, now=True)
        self.own.warn_of_lost(worker.num_items)
        return (self.own.reached(worker.num_items, ended=worker.ended),)

    def _so_far(self) -> _SoFar:
        self._advance()
        handed, workers = tuple(self.ahead), tuple(self.workers)
        return _SoFar(self._num_in_order, self.local_samples, handed, workers, self.next_worker)


def _raise_failures(workers: Sequence[WorkerState]) -> None:
    for worker in workers:
        if worker.failure is not None:
            raise worker.failure.taken()
