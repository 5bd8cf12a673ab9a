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

from .checkpoint.epoch import BaseSeed, EpochStart, HandedOut
from .checkpoint.order import END, Order, next_index
from .checkpoint.resume_state import (
    draw_again_from,
    drawing_of,
    generators_of,
    order_drawn_again,
    skipped,
    stateful_sampler,
    tell_order,
)
from .checkpoint.user_state import WorkerState, pass_of_workers
from .fetching.bad_samples import SkippedSamples, Tolerance
from .rng.keys import StreamKey, epoch_seed
from .sampling.sampler_chain import epoch_of, nested_samplers, shard_of

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
            if resume is not None and not resume.base.drew_base_seed:
                draw_again_from(loader, redrawn.states)
                if self._draws_at_once():
                    self._sampler_iter = iter(self._index_sampler)
            else:
                self._begin_again(loader, resume, redrawn)
            self._begin_epoch(loader, resume, redrawn)

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """Begin another epoch of a persistent loader."""
        resume = loader._state.position.begin(loader)
        with order_drawn_again(loader, resume) as redrawn:
            super()._reset(loader)
            self._base = self._base.following()
            if resume is not None and resume.base.drew_base_seed:
                # As torch does for a new iterator.
                seed = torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
                self._base = BaseSeed(int(seed))
                self._begin_again(loader, resume, redrawn)
            self._begin_epoch(loader, resume, redrawn)

    def _draws_at_once(self) -> bool:
        """Whether the sampler may have drawn its order before it was asked for an index. One that
        was restored goes on at its first beginning."""
        sampler = self._index_sampler
        if inspect.isgenerator(self._sampler_iter) or stateful_sampler(sampler) is not None:
            return False
        return not any(hasattr(each, "start_at") for each in nested_samplers(sampler))

    def _begin_again(
        self, loader: DataLoader[Any], resume: ResumeState | None, redrawn: Redrawn
    ) -> None:
        """Begin the sampler a second time, as torch does for a new iterator with workers: what
        draws its order at once draws another one, after the base seed."""
        is_within = resume is not None and not resume.finished
        if self._num_workers and not is_within and self._draws_at_once():
            redrawn.states = [each.get_state() for each in generators_of(loader)]
            self._base = self._base._replace(drew_base_seed=False)
            self._sampler_iter = iter(self._index_sampler)

    def _begin_epoch(
        self, loader: DataLoader[Any], resume: ResumeState | None, redrawn: Redrawn
    ) -> None:
        """Begin an epoch at its first sample, or where ``resume`` stands."""
        position, sampler = loader._state.position, self._index_sampler
        before, sampler_epoch = position.order, epoch_of(sampler)
        within = None if resume is None or resume.finished else resume
        if resume is not None:
            position.num_epochs_begun = resume.epoch + resume.finished
            if not resume.base.drew_base_seed:
                self._base = resume.base
        is_iterable = isinstance(self._dataset, IterableDataset)
        self._tolerance = self._skipped = None
        if loader.on_error == "skip":
            replaces = loader.replace and not is_iterable
            self._tolerance = Tolerance(len(cast("Sized", self._dataset)) if replaces else 0)
            self._skipped = SkippedSamples(loader.error_budget, self._tolerance)
        self._begun_from = self._worker_states(resume) if is_iterable else []
        number = position.num_epochs_begun
        position.num_epochs_begun += 1
        named = number if sampler_epoch is None else sampler_epoch
        seed = self._base.epoch_seed if loader.seed is None else epoch_seed(loader.seed, named)
        keeps_datasets = self._num_workers == 0 or bool(loader.persistent_workers)
        start = EpochStart(
            sampler=sampler,
            in_batches=self._auto_collation,
            world=shard_of(sampler)[0],
            epoch=number,
            epoch_seed=seed if within is None else within.epoch_seed,
            base=self._base,
            generators=redrawn.states,
            persistent=bool(loader.persistent_workers),
            keeps_datasets=keeps_datasets,
            begins_late=within is None and inspect.isgenerator(self._sampler_iter),
            left_before=() if before is None or resume else before.left_of_resumed,
            last=() if tell_order(sampler) else None,
        )
        drawing = drawing_of(sampler, self._sampler_iter, resume)
        if drawing is not None:
            self._sampler_iter = drawing
        known: Sequence[WorkerState] = self._begun_from
        if resume is None and self._base.num_epochs and before is not None and known:
            known = before.left_to_next() or known  # as persistent workers have left theirs
        so_far = HandedOut(workers=tuple(known))
        if within is not None:
            num_skipped = 0
            if not self._begun_from:  # workers with their own iterables skip in those
                start, num_skipped = skipped(start, within, self._sampler_iter)
            # With workers, indices are drawn ahead anyway.
            own = () if self._num_workers else generators_of(loader)[1:]
            before_look = [each.get_state() for each in own]
            nothing_left = self._look_ahead(within, drawing, redrawn)
            start = start._replace(nothing_left=nothing_left, before_look=before_look)
            sampler_epoch = epoch_of(sampler)  # it may be set at the first index
            so_far = so_far._replace(
                local_samples=num_skipped,
                ahead=frozenset(within.ahead),
                next_worker=within.next_worker,
            )
        number_of_pass = None
        if is_iterable:
            number_of_pass = pass_of_workers(self._dataset, resume, self._num_workers)
        start = start._replace(number_of_pass=number_of_pass)
        self._key = StreamKey(
            start.epoch_seed,
            start.first,
            *shard_of(sampler),
            epoch=named,
            is_seeded=loader.seed is not None,
            number_of_pass=number_of_pass,
        )
        self._order = position.order = Order(
            start,
            so_far,
            drawing=drawing,
            sampler_epoch=sampler_epoch,
            is_wanted=position.is_collected(inline=self._num_workers == 0),
        )

    def _look_ahead(self, resume: ResumeState, drawing: Drawing | None, redrawn: Redrawn) -> bool:
        """Draw the first index ahead, to go on where ``resume`` stands. Return whether there is
        none.

        A sampler seeds its order at the first draw. That has to happen here, while the generators
        are as the state says: the global one is restored right after.
        """
        # Without workers a state may be taken between an epoch's beginning and the draw of its
        # order, which is then still to be seen by the trainer.
        is_before_order = not resume.num_samples and torch.equal(
            redrawn.trainers, torch.get_rng_state()
        )
        if drawing is not None:  # its own state says where it stands, and nothing is drawn
            nothing_left = drawing.is_over
        else:
            first = next_index(self._sampler_iter, self._index_sampler, 0)
            nothing_left = first is END
            if not nothing_left:
                self._sampler_iter = itertools.chain((first,), self._sampler_iter)
        if is_before_order:
            redrawn.trainers = torch.get_rng_state()
        return nothing_left

    def _worker_states(self, resume: ResumeState | None) -> list[WorkerState]:
        """Return how far each worker's iterable advances before its first batch."""
        num_workers = max(1, self._num_workers)
        if resume is None or (resume.finished and not resume.workers):
            return [WorkerState()] * num_workers
        if (there := len(resume.workers)) != num_workers:
            then = "num_workers=0 or 1" if there == 1 else f"num_workers={there}"
            raise ValueError(
                f"load_state_dict: workers (finished={resume.finished}): the state is of a loader "
                f"with {then}, this one has num_workers="
                f"{self._num_workers}. An iterable dataset divides itself among workers, so their "
                "number must stay."
            )
        return list(resume.workers)
