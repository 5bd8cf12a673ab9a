"""The order of an epoch: its seed, its sampler, and where a loop that was saved goes on in it.

It derives from torch's ``_BaseDataLoaderIter``: its constructor draws from the generators in
torch's order, and Lightning recognises by it an iterator that must not be pickled.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from .checkpoint.epoch import BaseSeed, EpochStart, HandedOut, LookAhead
from .checkpoint.order import END, Order, next_index
from .checkpoint.resume_state import (
    draw_again_from,
    drawing_of,
    drawn_base_seed,
    generators_of,
    order_drawn_again,
    skipped,
    tell_order,
)
from .checkpoint.user_state import WorkerState, pass_of_workers
from .fetching.bad_samples import SkippedSamples, Tolerance
from .rng.keys import StreamKey, epoch_seed
from .sampling.sampler_chain import epoch_of, shard_of

if TYPE_CHECKING:
    from .checkpoint.drawing import Drawing
    from .checkpoint.resume_state import Redrawn
    from .checkpoint.saved_state import ResumeState
    from .dataloader import DataLoader


class EpochIterator(_BaseDataLoaderIter):
    """The base of a loader's iterator: it draws the indices, and knows the position."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        resume = loader._state.position.begin(loader)
        with order_drawn_again(loader, resume) as redrawn:
            super().__init__(loader)
            self._base = BaseSeed(int(self._base_seed))
            if resume is not None and not resume.drew_base_seed:
                draw_again_from(loader, redrawn.states)
            self._begin_epoch(loader, resume, redrawn)

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """Begin another epoch of a persistent loader."""
        resume = loader._state.position.begin(loader)
        with order_drawn_again(loader, resume) as redrawn:
            super()._reset(loader)
            self._base = self._base.following()
            if resume is not None and resume.drew_base_seed:
                self._base = BaseSeed(drawn_base_seed(loader.generator))
            self._begin_epoch(loader, resume, redrawn)

    def _begin_epoch(
        self, loader: DataLoader[Any], resume: ResumeState | None, redrawn: Redrawn
    ) -> None:
        """Begin an epoch at its first sample, or where ``resume`` stands."""
        position, before = loader._state.position, loader._state.position.order
        if resume is not None:
            position.num_epochs_begun = resume.epoch + resume.finished
            if not resume.drew_base_seed:
                self._base = resume.base
        within = None if resume is None or resume.finished else resume
        self._tolerance = self._skipped = None
        if loader.on_error == "skip":
            replaces = loader.replace and not isinstance(self._dataset, IterableDataset)
            self._tolerance = Tolerance(len(cast("Sized", self._dataset)) if replaces else 0)
            self._skipped = SkippedSamples(loader.error_budget, self._tolerance)
        self._begun_from = self._worker_states(resume)
        sampler, sampler_epoch = self._index_sampler, epoch_of(self._index_sampler)
        start = self._epoch_start(loader, resume, redrawn, sampler_epoch)
        drawing = drawing_of(sampler, self._sampler_iter, resume)
        if drawing is not None:
            self._sampler_iter = drawing
        known: Sequence[WorkerState] = self._begun_from
        if resume is None and self._base.num_epochs and before is not None and known:
            known = before.left_to_next() or known  # as persistent workers have left theirs
        so_far = HandedOut(workers=tuple(known))
        streams_seed, looked_ahead = start.epoch_seed, LookAhead()
        number = start.epoch if sampler_epoch is None else sampler_epoch
        if within is not None:
            start, num_skipped = start._replace(epoch_seed=within.epoch_seed, begins_late=False), 0
            if not self._begun_from:  # workers with their own iterables skip in those
                start, num_skipped = skipped(start, within, self._sampler_iter)
            looked_ahead = self._look_ahead(within, drawing, loader, redrawn)
            sampler_epoch = epoch_of(sampler)  # it may be set at the first index
            so_far = so_far._replace(
                local_samples=num_skipped,
                ahead=frozenset(within.ahead),
                next_worker=within.next_worker,
            )
            streams_seed = within.epoch_seed
        ranks = shard_of(sampler)
        number_of_pass = pass_of_workers(self._dataset, resume, self._num_workers)
        start = start._replace(number_of_pass=number_of_pass)
        self._key = StreamKey(
            streams_seed,
            start.first,
            *ranks,
            epoch=number,
            is_seeded=loader.seed is not None,
            number_of_pass=number_of_pass,
        )
        self._order = position.order = Order(
            start,
            so_far,
            drawing=drawing,
            sampler_epoch=sampler_epoch,
            looked_ahead=looked_ahead,
            is_wanted=position.is_collected(inline=self._num_workers == 0),
        )

    def _epoch_start(
        self,
        loader: DataLoader[Any],
        resume: ResumeState | None,
        redrawn: Redrawn,
        sampler_epoch: int | None,
    ) -> EpochStart:
        """Return what an epoch begins with at its first sample, and count it as begun."""
        position, sampler = loader._state.position, self._index_sampler
        before, number = position.order, position.num_epochs_begun
        position.num_epochs_begun += 1
        seed = self._base.epoch_seed
        if loader.seed is not None:
            seed = epoch_seed(loader.seed, number if sampler_epoch is None else sampler_epoch)
        return EpochStart(
            sampler=sampler,
            in_batches=self._auto_collation,
            world=shard_of(sampler)[0],
            epoch=number,
            epoch_seed=seed,
            base=self._base,
            generators=redrawn.states,
            persistent=bool(loader.persistent_workers),
            keeps_datasets=self._num_workers == 0 or bool(loader.persistent_workers),
            begins_late=inspect.isgenerator(self._sampler_iter),
            left_before=() if before is None or resume else before.left_of_resumed,
            last=() if tell_order(sampler) else None,
        )

    def _look_ahead(
        self,
        resume: ResumeState,
        drawing: Drawing | None,
        loader: DataLoader[Any],
        redrawn: Redrawn,
    ) -> LookAhead:
        """Draw the first index ahead, to go on where ``resume`` stands.

        A sampler seeds its order at the first draw. That has to happen here, while the generators
        are as the state says: the global one is restored right after.
        """
        is_before_order = redrawn.is_before_order(resume)
        # With workers, indices are drawn ahead anyway.
        own = () if self._num_workers else generators_of(loader)[1:]
        before = [generator.get_state() for generator in own]
        if drawing is not None:  # its own state says where it stands, and nothing is drawn
            nothing_left = drawing.is_over
        else:
            first = next_index(self._sampler_iter, self._index_sampler, 0)
            nothing_left = first is END
            if not nothing_left:
                self._sampler_iter = itertools.chain((first,), self._sampler_iter)
        if is_before_order:
            redrawn.trainers = torch.get_rng_state()
        return LookAhead(nothing_left, before)

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


def _in_words(num_parts: int) -> str:
    return "num_workers=0 or 1" if num_parts == 1 else f"num_workers={num_parts}"
