"""The loop's progress in an epoch, from which a loader's state is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from .epoch_start import SamplerState
from .last_indices import NUM_LAST, checksum_of, last_of
from .resume_state import encoded, packed_index
from .user_state import WorkerState

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from .drawing import Drawing
    from .epoch_start import EpochStart
    from .last_indices import LastIndices
    from .saved_state import ResumeState
    from .user_state import OwnState


class _SoFar(NamedTuple):
    """The part of the progress that changes with every batch."""

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
class Progress:
    """The progress of one epoch. The iterator writes it, on the trainer's thread; the loader reads
    it. It does not refer to the iterator, so dropping the iterator ends its threads.
    """

    begun: EpochStart
    workers: list[WorkerState]
    """The states of the workers' iterables; [] = map-style."""
    sampler_epoch: int | None = None
    next_worker: int = 0
    is_wanted: bool
    """Whether states are wanted: those of iterables are taken after every batch. An iterable
    without a state counts its items, and resuming makes them again."""
    own: OwnState | None = None
    """The state of an iterable loaded on the trainer's thread. Nothing is prefetched there, so it
    is asked when the loader is."""
    local_samples: int = 0
    """The number of samples handed out on this rank, up to the first batch that was not."""
    drawing: Drawing | None = None
    """The indices of a sampler that keeps its own state."""
    ahead: set[int] = field(default_factory=set)
    """The batches handed out before their turn: at first those of the resumed state, drawn or
    not, then also this iterator's."""
    finished: bool = False
    """Whether the loop has seen the end."""
    num_resumed: tuple[int, ...] = ()
    """The number of items of each worker before the state with which the epoch began."""
    left_before: tuple[int, ...] = ()
    """The number of items that the resumed epoch before this one had left; see
    ``left_of_resumed``."""
    _num_in_order: int = 0
    _drawn: dict[int, tuple[int, Any]] = field(default_factory=dict)
    """The drawn batches that were not handed out in order, and the last ones that were. Keys are
    batch numbers, ascending; values the samples of this rank up to the batch's end, and its index,
    or the end of it."""
    _before: tuple[Any, ...] | None = None
    """The fields of the ``_SoFar`` before the last batch was handed out."""
    _before_two: tuple[Any, ...] | None = None
    """The same, before the last two."""

    def asked(self, number: int, local_samples: int, index: Any) -> None:
        """Record that batch ``number`` was drawn from the sampler, which has given
        ``local_samples`` up to its end."""
        if self.workers:
            return  # iterables have no sampler; their workers report their own progress
        if self.drawing is not None:
            # Without a call in between, so that Ctrl-C finds it here or there.
            self._drawn[number] = local_samples, index
            self.drawing.given = ()
            return
        if self.begun.in_batches and type(index) is list:
            index = index[-NUM_LAST:]  # a copy: the dataset gets the list, and may change it
        self._drawn[number] = local_samples, index

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
        if not (self.finished and self.begun.keeps_datasets):
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
        return self.sampler_epoch, self.begun.start + samples * self.begun.world

    @property
    def is_vague(self) -> bool:
        """Whether a later epoch has just begun on lasting datasets whose states are unknown."""
        has_begun_alike = self.own is not None or self.begun.base.num_epochs == 0 or self.finished
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
                epoch=self.begun.epoch,
                epoch_seed=self.begun.epoch_seed,
                finished=True,
                base=self.begun.base.following(is_new=not self.begun.persistent),
                sampler_epoch=self.sampler_epoch,
                sampler=SamplerState(None if self.drawing is None else self.drawing.at_end()),
                generators=tuple(map(encoded, generators)),
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
            epoch=self.begun.epoch,
            epoch_seed=self.begun.epoch_seed,
            finished=False,
            num_samples=self.begun.start + so_far.local_samples * self.begun.world,
            ahead=so_far.ahead,
            sampler_epoch=self.sampler_epoch,
            sampler=sampler,
            order=checksum_of(self._last_before(so_far.num_in_order)),
            generators=tuple(map(encoded, self.begun.generators)),
            base=self.begun.base,
            workers=so_far.workers,
            next_worker=so_far.next_worker,
        )

    def _last_before(self, number: int) -> LastIndices:
        """Return the last indices before batch ``number``; () if they say nothing."""
        if self.begun.before is None or self.drawing is not None or self.workers:
            return ()
        drawn = [index for each, (_, index) in self._drawn.items() if each < number]
        last = last_of(drawn[-NUM_LAST:], in_batches=self.begun.in_batches)
        return (*self.begun.before, *last)[-NUM_LAST:]

    @property
    def left_of_resumed(self) -> tuple[int, ...]:
        """The number of items that each worker made in an epoch that was resumed in its middle, and
        whose datasets stay; () = this is another one."""
        if not (self.finished and self.begun.keeps_datasets and any(self.num_resumed)):
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
        is_known = self.finished and self.begun.keeps_datasets
        return [
            each._replace(num_items=0, num_after=0, ended=False)
            if is_known and (each.of_dataset or each.keeper == "dataset")
            else WorkerState(keeper=each.keeper)  # an iterator's state ends with its epoch
            for each in self.workers
        ]

    def _at_end(self) -> tuple[WorkerState, ...]:
        """Return the states that the datasets keep for the next epoch; () if their copies end with
        this one."""
        if not self.begun.keeps_datasets:
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
