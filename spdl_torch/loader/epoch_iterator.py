"""The order of an epoch: its seed, its sampler, and where a loop that was saved goes on in it.

It derives from torch's ``_BaseDataLoaderIter``: its constructor draws from the generators in
torch's order, and Lightning recognises by it an iterator that must not be pickled.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..errors import PipelineFailure
from .checkpoint.epoch_start import BaseSeed, EpochStart
from .checkpoint.last_indices import tell_order
from .checkpoint.progress import Progress
from .checkpoint.resume_state import (
    draw_again_from,
    drawing_of,
    drawn_base_seed,
    generators_of,
    is_packed_batch,
    order_drawn_again,
    skipped,
)
from .checkpoint.user_state import WorkerState
from .error_notes import add_thread_note
from .fetching.bad_samples import SkippedSamples, Tolerance, Tries
from .fetching.batch import BatchRecipe
from .rng.keys import StreamKey, epoch_seed
from .sampling.sampler_chain import epoch_of, nested_samplers, num_ranks, shard_of, unshared

if TYPE_CHECKING:
    from collections.abc import Callable, Sized

    from .base_loader import BaseLoader
    from .checkpoint.drawing import Drawing
    from .checkpoint.last_indices import LastIndices
    from .checkpoint.resume_state import Redrawn
    from .checkpoint.saved_state import ResumeState

_logger = logging.getLogger("spdl_torch.data")

_END = object()


class EpochIterator(_BaseDataLoaderIter):
    """The base of a loader's iterator: it draws the indices, and knows the position."""

    def __init__(self, loader: BaseLoader[Any]) -> None:
        resume = loader._state.position.begin(loader)
        with order_drawn_again(loader, resume) as redrawn:
            self._begin_sampler(loader, super().__init__)
            self._base = BaseSeed(int(self._base_seed))
            if resume is not None and not resume.base.is_new:
                draw_again_from(loader, redrawn.states)
            self._begin_epoch(loader, resume, redrawn)

    def _reset(self, loader: BaseLoader[Any], first_iter: bool = False) -> None:
        """Begin another epoch of a persistent loader."""
        resume = loader._state.position.begin(loader)
        with order_drawn_again(loader, resume) as redrawn:
            self._begin_sampler(loader, super()._reset)
            self._base = self._base.following()
            if resume is not None and resume.base.is_new:
                self._base = BaseSeed(drawn_base_seed(loader.generator))
            self._begin_epoch(loader, resume, redrawn)

    def _begin_epoch(
        self, loader: BaseLoader[Any], resume: ResumeState | None, redrawn: Redrawn
    ) -> None:
        """Begin an epoch at its first sample, or where ``resume`` stands."""
        known = loader._state.position
        if resume is not None:
            known.num_epochs_begun = resume.epoch + resume.finished
            if not resume.base.is_new:
                self._base = resume.base
        tolerance = self._tolerance(loader)
        self._skipped = None
        if tolerance is not None:
            self._skipped = SkippedSamples(loader.error_budget, tolerance)
        epoch, seed = self._new_seed(loader)
        streams_seed = seed
        start = 0  # of the epoch's samples on all ranks
        self._num_samples_submitted = self._num_taken = 0
        self._resume = None if resume is None or resume.finished else resume
        self._begins_late = self._resume is None and inspect.isgenerator(self._sampler_iter)
        drawing = drawing_of(self._index_sampler, self._sampler_iter, resume)
        if drawing is not None:
            self._sampler_iter = drawing
        first, passed, before_first = [None], (), list[torch.Tensor]()
        if self._resume is not None:
            seed = streams_seed = self._resume.epoch_seed
            if loader.rng == "worker":
                streams_seed = self._resume.seed_of_rest()
            start, self._num_samples_submitted, passed = self._skipped_to(self._resume)
            is_before_order = redrawn.is_before_order(self._resume)
            if not self._num_workers:  # else indices are drawn ahead anyway
                before_first = [each.get_state() for each in generators_of(loader)[1:]]
            first = self._draw_first_index(drawing)
            if is_before_order:
                redrawn.trainers = torch.get_rng_state()
        self._key = StreamKey(
            streams_seed,
            start,
            *shard_of(self._index_sampler),
            epoch=epoch,
            is_seeded=loader.seed is not None,
        )
        self._begun_from = self._worker_states(resume)
        self._progress = known.progress = self._new_progress(
            loader, seed, resume, redrawn, drawing, passed, before_first, nothing_left=not first
        )

    def _new_seed(self, loader: BaseLoader[Any]) -> tuple[int, int]:
        """Return the number of the epoch that begins, and the seed of its random streams."""
        known = loader._state.position
        epoch = epoch_of(self._index_sampler)
        if epoch is None:
            epoch = known.num_epochs_begun
        known.num_epochs_begun += 1
        if loader.seed is not None:
            return epoch, epoch_seed(loader.seed, epoch)
        return epoch, self._base.epoch_seed

    def _new_progress(
        self,
        loader: BaseLoader[Any],
        seed: int,
        resume: ResumeState | None,
        redrawn: Redrawn,
        drawing: Drawing | None,
        passed: LastIndices,
        before_first: list[torch.Tensor],
        *,
        nothing_left: bool,
    ) -> Progress:
        """Return the progress of an epoch whose beginning is known."""
        known, within = loader._state.position, self._resume
        before = known.progress
        begun = EpochStart(
            epoch=known.num_epochs_begun - 1,
            epoch_seed=seed,
            start=self._key.start,
            world=self._key.num_replicas,
            in_batches=self._auto_collation,
            before=passed if tell_order(self._index_sampler) else None,
            nothing_left=nothing_left,
            before_first=before_first,
            generators=redrawn.states,
            base=self._base,
            persistent=bool(loader.persistent_workers),
            keeps_datasets=self._num_workers == 0 or bool(loader.persistent_workers),
        )
        return Progress(
            begun=begun,
            workers=self._known_of_workers(resume, before),
            sampler_epoch=epoch_of(self._index_sampler),
            next_worker=0 if within is None else within.next_worker,
            local_samples=self._num_samples_submitted,
            is_wanted=known.is_collected(inline=self._num_workers == 0),
            drawing=drawing,
            ahead=set() if within is None else set(within.ahead),
            num_resumed=tuple(worker.num_items for worker in self._begun_from),
            left_before=() if before is None or resume else before.left_of_resumed,
        )

    def _skipped_to(self, resume: ResumeState) -> tuple[int, int, LastIndices]:
        """Skip what the trainer has already received; return as ``skipped``."""
        if isinstance(self._dataset, IterableDataset):
            return 0, 0, ()  # the workers skip in their own iterables
        if self._auto_collation and not all(map(is_packed_batch, resume.sampler.pending)):
            raise ValueError(
                "load_state_dict: pending must be a list of batches, a list of indices each."
            )
        return skipped(
            self._sampler_iter,
            resume,
            list(nested_samplers(self._index_sampler)),
            self._count,
            in_batches=self._auto_collation,
        )

    def _draw_first_index(self, drawing: Drawing | None) -> list[Any]:
        """Draw the first index ahead and return it in a list; [] if there is none.

        A sampler seeds its order at the first draw. That has to happen here, while the generators
        are as the state says: the global one is restored right after.
        """
        if drawing is not None:  # its own state says where it stands, and nothing is drawn
            return [] if drawing.is_over else [None]
        try:
            first = unshared(next(self._sampler_iter, _END))
        except BaseException as error:
            self._note_draw(error)
            raise
        if first is _END:
            return []
        self._sampler_iter = itertools.chain((first,), self._sampler_iter)
        return [first]

    def _worker_states(self, resume: ResumeState | None) -> list[WorkerState]:
        """Return how far each worker's iterable advances before its first batch; [] = map-style."""
        if not isinstance(self._dataset, IterableDataset):
            return []
        num_workers = max(1, self._num_workers)
        if resume is None or (resume.finished and not resume.workers):
            return [WorkerState()] * num_workers
        if len(resume.workers) != num_workers:
            raise ValueError(
                f"load_state_dict: workers (finished={resume.finished}): the state is of a loader "
                f"with {_in_words(len(resume.workers))}, this one has num_workers="
                f"{self._num_workers}. An iterable dataset divides itself among workers, so their "
                "number must stay."
            )
        return list(resume.workers)

    def _known_of_workers(
        self, resume: ResumeState | None, before: Progress | None
    ) -> list[WorkerState]:
        """Return the states of the workers' iterables before the first batch.

        For persistent workers without a state to resume, it is how the previous epoch left them.
        """
        known = self._begun_from
        if resume is None and self._base.num_epochs and before is not None and known:
            known = before.left_to_next() or known
        return list(known)

    def _take_index(self) -> tuple[Any, int] | None:
        """Return the sampler's next index, and the position of its first sample in the epoch;
        None = there is none left.

        The end is a value: StopIteration would not differ from one that user code lets escape.
        """
        if not self._num_taken and self._begins_late:
            # A generator begins at its first next(): without workers that may be long after
            # iter(), so the epoch given last to set_epoch() counts.
            self._progress.sampler_epoch = epoch_of(self._index_sampler)
        while True:
            try:
                index = unshared(next(self._sampler_iter, _END))
            except BaseException as error:
                self._note_draw(error)
                raise
            if index is _END:
                return None
            first = self._num_samples_submitted
            if type(index) is list and self._auto_collation:
                self._num_samples_submitted += len(index)
            else:
                if self._auto_collation and hasattr(index, "__next__"):
                    index = list(index)
                self._num_samples_submitted += self._count(index)
            number, self._num_taken = self._num_taken, self._num_taken + 1
            self._progress.asked(number, self._num_samples_submitted, index)
            if self._resume is None or number not in self._resume.ahead:
                return index, first
            # Received out of order before the state was taken: it is not loaded again.

    def _note_draw(self, error: BaseException) -> None:
        """Note on an error that it came from the sampler, as it was asked for an index."""
        where = f"in the sampler ({self._name_of_sampler()})"
        add_thread_note(error, where, f"asked for batch {self._num_taken}")

    def _name_of_sampler(self) -> str:
        """Return the classes of the sampler and of those inside it, from the outside in."""
        samplers = nested_samplers(self._index_sampler)
        return " of ".join(dict.fromkeys(type(each).__name__ for each in samplers))

    def _begin_sampler(self, loader: BaseLoader[Any], begin: Callable[[Any], None]) -> None:
        """Have torch begin an epoch, with ``iter(sampler)``; note on an error that it came from
        there.
        """
        self.__dict__.pop("_sampler_iter", None)
        try:
            begin(loader)
        except BaseException as error:
            # torch's warnings, which may be errors, come before it, and the base seed after it.
            if "_sampler_iter" in self.__dict__ or "_collate_fn" not in self.__dict__:
                raise
            name = type(loader._index_sampler).__name__
            add_thread_note(error, f"in iter() of the sampler ({name})")
            raise

    def _tolerance(self, loader: BaseLoader[Any]) -> Tolerance | None:
        """Return how workers treat samples that fail; None = the batch fails with them."""
        if loader.on_error != "skip":
            return None
        replaces = loader.replace and not isinstance(self._dataset, IterableDataset)
        return Tolerance(len(cast("Sized", self._dataset)) if replaces else 0)

    def _recipe(self, loader: BaseLoader[Any]) -> BatchRecipe:
        """Return what the workers make batches of."""
        return BatchRecipe(
            self._dataset,
            self._collate_fn,
            self._auto_collation,
            self._drop_last,
            self._tolerance(loader),
        )

    def _failure_of(self, tries: Tries | None, number: int, *, empty: bool) -> Any:
        """Return the error that the trainer gets in place of batch ``number``; None = no error."""
        if self._skipped is None:
            return None
        failure = self._skipped.hand_out(tries)
        if failure is not None or not empty or tries is None:
            return failure
        if num_ranks(self._index_sampler) > 1:
            return PipelineFailure(
                f"DataLoader: batch {number} has no good sample, and the other ranks would wait "
                "for this one to load as many batches as they. Pass replace=True",
                [each.error for each in tries.bad],
            )
        _logger.warning(
            "DataLoader: batch %d has no good sample and is left out: the epoch has one batch "
            "less than len(loader). With replace=True it would be whole.",
            number,
        )
        return None

    def _count(self, index: Any) -> int:
        """Return the number of samples of an index."""
        if not self._auto_collation:
            return 1
        try:
            return len(index)
        except TypeError:  # a slice, for __getitems__
            return 1


def _in_words(num_parts: int) -> str:
    return "num_workers=0 or 1" if num_parts == 1 else f"num_workers={num_parts}"
