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
from .checkpoint.epoch_start import BaseSeed
from .checkpoint.last_indices import tell_order
from .checkpoint.order import END, Order
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
from .sampling.sampler_chain import epoch_of, nested_samplers, num_ranks, shard_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sized

    from .base_loader import BaseLoader
    from .checkpoint.resume_state import Redrawn
    from .checkpoint.saved_state import ResumeState

_logger = logging.getLogger("spdl_torch.data")


class EpochIterator(_BaseDataLoaderIter):
    """The base of a loader's iterator: it draws the indices, and knows the position."""

    def __init__(self, loader: BaseLoader[Any]) -> None:
        resume = loader._state.position.begin(loader)
        with order_drawn_again(loader, resume) as redrawn:
            self._begin_sampler(loader, super().__init__)
            self._base = BaseSeed(int(self._base_seed))
            if resume is not None and not resume.drew_base_seed:
                draw_again_from(loader, redrawn.states)
            self._begin_epoch(loader, resume, redrawn)

    def _reset(self, loader: BaseLoader[Any], first_iter: bool = False) -> None:
        """Begin another epoch of a persistent loader."""
        resume = loader._state.position.begin(loader)
        with order_drawn_again(loader, resume) as redrawn:
            self._begin_sampler(loader, super()._reset)
            self._base = self._base.following()
            if resume is not None and resume.drew_base_seed:
                self._base = BaseSeed(drawn_base_seed(loader.generator))
            self._begin_epoch(loader, resume, redrawn)

    def _begin_epoch(
        self, loader: BaseLoader[Any], resume: ResumeState | None, redrawn: Redrawn
    ) -> None:
        """Begin an epoch at its first sample, or where ``resume`` stands."""
        position = loader._state.position
        if resume is not None:
            position.num_epochs_begun = resume.epoch + resume.finished
            if not resume.drew_base_seed:
                self._base = resume.base
        within = None if resume is None or resume.finished else resume
        tolerance = self._tolerance(loader)
        self._skipped = None
        if tolerance is not None:
            self._skipped = SkippedSamples(loader.error_budget, tolerance)
        self._begun_from = self._worker_states(resume)
        order = self._new_order(loader, resume, redrawn)
        number = order.epoch if order.sampler_epoch is None else order.sampler_epoch
        if within is not None:
            self._go_to(within, order, loader, redrawn)
        streams_seed = order.epoch_seed
        if within is not None and loader.rng == "worker":
            streams_seed = within.seed_of_rest()
        self._key = StreamKey(
            streams_seed,
            order.start,
            *shard_of(self._index_sampler),
            epoch=number,
            is_seeded=loader.seed is not None,
        )
        self._order = position.order = order

    def _new_order(
        self, loader: BaseLoader[Any], resume: ResumeState | None, redrawn: Redrawn
    ) -> Order:
        """Return the order of an epoch that begins at its first sample."""
        position, sampler = loader._state.position, self._index_sampler
        before, sampler_epoch = position.order, epoch_of(sampler)
        number = position.num_epochs_begun
        position.num_epochs_begun += 1
        seed = self._base.epoch_seed
        if loader.seed is not None:
            seed = epoch_seed(loader.seed, number if sampler_epoch is None else sampler_epoch)
        order = Order(
            sampler=sampler,
            in_batches=self._auto_collation,
            world=shard_of(sampler)[0],
            epoch=number,
            epoch_seed=seed,
            base=self._base,
            generators=redrawn.states,
            persistent=bool(loader.persistent_workers),
            keeps_datasets=self._num_workers == 0 or bool(loader.persistent_workers),
            before=() if tell_order(sampler) else None,
            left_before=() if before is None or resume else before.left_of_resumed,
            num_resumed=tuple(worker.num_items for worker in self._begun_from),
            begins_late=inspect.isgenerator(self._sampler_iter),
            drawing=drawing_of(sampler, self._sampler_iter, resume),
            sampler_epoch=sampler_epoch,
            workers=self._known_of_workers(resume, before),
            is_wanted=position.is_collected(inline=self._num_workers == 0),
        )
        if order.drawing is not None:
            self._sampler_iter = order.drawing
        return order

    def _go_to(
        self, resume: ResumeState, order: Order, loader: BaseLoader[Any], redrawn: Redrawn
    ) -> None:
        """Go on within an epoch, where ``resume`` stands."""
        order.epoch_seed, order.begins_late = resume.epoch_seed, False
        order.next_worker, order.ahead = resume.next_worker, set(resume.ahead)
        order.loaded_before = frozenset(resume.ahead)
        if not order.workers:  # else the workers skip in their own iterables
            self._skip_to(resume, order)
        is_before_order = redrawn.is_before_order(resume)
        if not self._num_workers:  # else indices are drawn ahead anyway
            order.before_first = [each.get_state() for each in generators_of(loader)[1:]]
        order.nothing_left = not self._has_first_index(order)
        if is_before_order:
            redrawn.trainers = torch.get_rng_state()
        order.sampler_epoch = epoch_of(self._index_sampler)  # it may be set at the first index

    def _skip_to(self, resume: ResumeState, order: Order) -> None:
        """Skip what the trainer has already received."""
        if self._auto_collation and not all(map(is_packed_batch, resume.pending)):
            raise ValueError(
                "load_state_dict: pending must be a list of batches, a list of indices each."
            )
        samplers = list(nested_samplers(self._index_sampler))
        order.start, num_skipped, last = skipped(
            self._sampler_iter, resume, samplers, order.count, in_batches=self._auto_collation
        )
        order.samples_drawn = order.local_samples = num_skipped
        if order.before is not None:
            order.before = last

    def _has_first_index(self, order: Order) -> bool:
        """Draw the first index ahead; return whether there is one.

        A sampler seeds its order at the first draw. That has to happen here, while the generators
        are as the state says: the global one is restored right after.
        """
        if order.drawing is not None:  # its own state says where it stands, and nothing is drawn
            return not order.drawing.is_over
        first = order.next_index(self._sampler_iter)
        if first is END:
            return False
        self._sampler_iter = itertools.chain((first,), self._sampler_iter)
        return True

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
        self, resume: ResumeState | None, before: Order | None
    ) -> list[WorkerState]:
        """Return the states of the workers' iterables before the first batch.

        For persistent workers without a state to resume, it is how the previous epoch left them.
        """
        known = self._begun_from
        if resume is None and self._base.num_epochs and before is not None and known:
            known = before.left_to_next() or known
        return list(known)

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


def _in_words(num_parts: int) -> str:
    return "num_workers=0 or 1" if num_parts == 1 else f"num_workers={num_parts}"
