"""What a loader remembers between epochs: its position, its statistics, what its workers showed.

And what trainers need of it beside its public methods: a loader of other samples.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch.utils.data import IterableDataset

from ..engine.recorder import new_pipeline_number
from ..objects.copies import shallow_copy
from .checkpoint.epoch import SamplerState
from .checkpoint.resume_state import before_first_epoch, generators_of
from .checkpoint.user_state import (
    check_no_passes_inside,
    give_state,
    keeps_state,
    left_for_another_pass,
    name_saved_pass,
    passes_of,
    state_of,
)
from .sampling.sampler_chain import epoch_of, keeper_of_unknown_epoch, set_sampler_epoch
from .user_warnings import GilWatch, warn

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import DataLoader as TorchDataLoader

    from ..autotune.tuning import TuningState
    from ..io._transfer.kept import TransferKeeper
    from ..observe.verdict.placement import Placement
    from .backends.processes.hearing import Unpacking
    from .checkpoint.order import Order
    from .checkpoint.saved_state import ResumeState
    from .dataloader import DataLoader
    from .stats.stats import EpochStats


_logger = logging.getLogger("spdl_torch.data")

_OTHER_NUMBERS = (
    'DataLoader.load_state_dict: with rng="worker" the rest of this epoch draws the random numbers '
    "of its beginning again: each worker has a stream of its own, which no state holds. With "
    'rng="sample", the default, they would be those that it would have drawn.'
)
_OTHER_RANKS = (
    "DataLoader.load_state_dict: made_by: {} rank(s) load here, {} when the state was saved. If "
    "the iterable dataset divides itself among them, items are lost, or come twice."
)

_UNKNOWN_EPOCH = (
    "DataLoader.load_state_dict: sampler_epoch: the state lacks the number of the epoch, since "
    "{0} does not keep what its set_epoch() is given in an attribute named epoch. Call set_epoch() "
    "with that number before iter(); or set self.epoch in {0}.set_epoch(), and states have it."
)


class LoaderPosition:
    """Where one loader is, written by its iterators."""

    def __init__(self) -> None:
        self.num_epochs_begun = 0
        self.order: Order | None = None
        """The order of the running epoch or, between epochs, of the last one."""
        self.to_resume: ResumeState | None = None
        """The state that the next epoch resumes. It stays until that epoch has begun, so an error
        or Ctrl-C in ``iter()`` does not lose it."""
        self.before_draws: list[Tensor] | None = None
        """The generators before the draws of an epoch that is about to begin; None = none is."""
        self._is_wanted = self._is_wanted_before = False

    def want(self, order: Order | None = None, *, before: bool = False) -> None:
        """Collect states from now on. ``before``: also those before the last batch, which can no
        longer be asked for once the loop has that batch. ``order``: as for ``state``.
        """
        self._is_wanted = True
        self._is_wanted_before = self._is_wanted_before or before
        if (order := order or self.order) is not None:
            order.is_wanted = self.is_collected(inline=order.own is not None)

    def is_collected(self, *, inline: bool) -> bool:
        """Return whether an iterable is asked for its state after every batch.

        Without workers it can be asked at any time, except for the state before the last batch.
        """
        return self._is_wanted_before if inline else self._is_wanted

    def state(
        self, loader: TorchDataLoader[Any], order: Order | None = None, *, num_back: int = 0
    ) -> dict[str, Any]:
        """Return the state as it was before the last ``num_back`` batches, two at most. ``order``:
        that of a pass which another one has interrupted; None = of the last one."""
        from .checkpoint.saved_state import made_by

        was_wanted, order = self._is_wanted, order or self.order
        self.want(order, before=num_back > 0)
        passes = passes_of(loader.dataset)
        if passes and not was_wanted:
            passes.want()
        if self.to_resume is not None:
            return self._not_begun(loader, self.to_resume)
        # A handler may ask while an epoch begins: its draws come again.
        generators = self.before_draws or [each.get_state() for each in generators_of(loader)]
        if order is None:
            state = before_first_epoch(loader, generators)
        else:
            unknown = order.unknown_ends()
            if unknown and loader._iterator is not None:
                loader._iterator.ask_ended(unknown)  # type: ignore[attr-defined]  # is ours
            state = order.state(generators, num_back=num_back)
            if state.finished:  # the next epoch is the one that set_epoch() has named since
                state = replace(state, sampler_epoch=epoch_of(loader._index_sampler))
            if order.is_vague or (order.num_counted and not was_wanted):
                _warn_counted(loader.dataset, order)
        values = {**state.as_dict(), "made_by": made_by(loader)}
        # With workers, each has a copy of the dataset, and the copies diverge.
        is_alone = loader.num_workers == 0 and not isinstance(loader.dataset, IterableDataset)
        if is_alone and keeps_state(loader.dataset):
            values["dataset"] = state_of(loader.dataset)
        if passes and state.finished:
            is_named = passes.named_epoch is not None
            if is_named or not state.workers:  # else these know it
                values["dataset"] = passes.of_next_pass()
        elif passes and order and (number := order.start.number_of_pass) is not None:
            values["dataset"] = {**passes.of_next_pass(), "epoch": number}
        return values

    @staticmethod
    def _not_begun(loader: TorchDataLoader[Any], resume: ResumeState) -> dict[str, Any]:
        """Return the state of a loader that has loaded ``resume`` and has begun no epoch since:
        the same, but for an epoch that ``set_epoch`` has named meanwhile."""
        resume, passes = _for_named_epoch(loader, resume), passes_of(loader.dataset)
        named = epoch_of(loader._index_sampler)
        if resume.finished and None not in (named, resume.sampler_epoch):
            resume = replace(resume, sampler_epoch=named)
        if resume.finished and passes and passes.named_epoch is not None:
            resume = replace(resume, dataset=passes.of_next_pass())
        return resume.as_dict()

    def load(self, loader: TorchDataLoader[Any], state: dict[str, Any]) -> None:
        """Resume ``state`` at the next epoch. Raises: ValueError: not a loader's state."""
        from .checkpoint.saved_state import ResumeState

        resume, own = ResumeState.checked(state), loader._index_sampler
        if resume.sampler_epoch is not None:
            set_sampler_epoch(own, resume.sampler_epoch)
        elif resume.drawn.sampler is None and (keeper := keeper_of_unknown_epoch(own)):
            warn(_UNKNOWN_EPOCH.format(type(keeper).__name__))
        if passes := passes_of(loader.dataset):
            passes.named_epoch = None
            passes.want()
        self.to_resume = resume
        self.want()

    def undo_look_ahead(self, loader: TorchDataLoader[Any]) -> None:
        """Put the user's generators back to where the saved loop had them, for a trainer that
        leaves the resumed epoch before its first batch.

        Beginning within an epoch draws an index ahead. Without workers that loop had not asked for
        it, and a sampler may draw from a generator for it, even to find that there is none.
        """
        if self.order is not None:
            states = self.order.start.before_look
            for generator, state in zip(generators_of(loader)[1:], states, strict=False):
                generator.set_state(state)

    def begin(self, loader: TorchDataLoader[Any]) -> ResumeState | None:
        """Return the state that the new iterator resumes, if any, and give the dataset its part."""
        resume = self.to_resume
        if resume is None:
            return None
        resume = _for_named_epoch(loader, resume)
        if passes := passes_of(loader.dataset):
            if not resume.finished:
                passes.named_epoch = None  # it is that of the state
            elif resume.dataset is not None:
                name_saved_pass(loader.dataset, resume.dataset)
        elif resume.dataset is not None:
            if isinstance(loader.dataset, IterableDataset):
                raise ValueError(
                    "load_state_dict: dataset is of a map-style dataset; an iterable one has its "
                    "state in workers. Load it into a loader that is made as it was then."
                )
            give_state(loader.dataset, resume.dataset, "dataset")
        is_within, is_iterable = not resume.finished, isinstance(loader.dataset, IterableDataset)
        if bool(resume.workers) != is_iterable and (resume.workers or is_within):
            then, now = ("a map-style", "iterable") if is_iterable else ("an iterable", "map-style")
            raise ValueError(
                f"load_state_dict: workers: the state is of {then} dataset, "
                f"{type(loader.dataset).__name__} is {now}. Make the loader as it was then."
            )
        if is_within:
            _check_within(loader, resume)
        return resume


def _check_within(loader: Any, resume: ResumeState) -> None:
    """Check that a state within an epoch is one of this loader's; warn of what is not restored."""
    from .checkpoint.saved_state import check_made_by, made_by

    if loader.num_workers == 0 or loader.persistent_workers:
        check_no_passes_inside(loader.dataset, resume)
    here = made_by(loader)
    check_made_by(resume, here)
    if resume.workers and here["ranks"] != resume.made_by["ranks"]:
        warn(_OTHER_RANKS.format(here["ranks"], resume.made_by["ranks"]))
    has_begun = resume.num_samples or resume.ahead or any(w.state for w in resume.workers)
    if has_begun and loader.rng == "worker" and loader.num_workers:
        warn(_OTHER_NUMBERS)


def _for_named_epoch(loader: TorchDataLoader[Any], resume: ResumeState) -> ResumeState:
    """Return the state to begin with: that of an epoch left, if ``set_epoch`` named another one,
    which begins as it would have after a ``break``."""
    named = epoch_of(loader._index_sampler)
    is_other = None not in (named, resume.sampler_epoch) and named != resume.sampler_epoch
    is_other = is_other or left_for_another_pass(loader.dataset, resume)
    if resume.finished or not is_other:
        return resume
    base = resume.base.following(is_new=not loader.persistent_workers)
    return replace(resume, finished=True, base=base, drawn=SamplerState(), workers=())


def _warn_counted(dataset: object, order: Order) -> None:
    _logger.warning(
        "DataLoader.state_dict: nobody had asked for a state before, so this one counts the items "
        "of %s instead of holding its state: resuming makes %d items again%s. Call state_dict() "
        "once before training.",
        type(dataset).__name__,
        order.num_counted,
        ", and is exact only if all its epochs are alike" if order.start.base.num_epochs else "",
    )


class LoaderState:
    """The memory of one loader, written by its iterators. A copy of the loader begins without."""

    def __init__(self) -> None:
        self.position = LoaderPosition()
        self.pipeline_number = new_pipeline_number()
        """The number of the loader in traces, the same for all its epochs."""
        self.stats: EpochStats | None = None
        """The statistics of the running epoch or, between epochs, of the last one."""
        self.cached_step: float | None = None
        """The seconds of a training step over cached batches, if ``headspace()`` measured it."""
        self.unpacking: Unpacking | None = None
        """How long batches of worker processes take to be unpacked; None = there were none."""
        # Not a WeakSet, in whose callbacks, written in Python, Ctrl-C would be lost.
        self._iterators: list[ref[Any]] = []
        self._num_processes: int | None = None
        self.gil = GilWatch()
        self.keeper: TransferKeeper | None = None
        """The owner of pinned memory between epochs; None = no epoch went to a device."""
        self.tuning: TuningState | None = None
        """The findings of ``num_workers="auto"`` so far."""

    def add(self, iterator: Any) -> None:
        """Know a ``LoaderIterator`` for as long as somebody holds it, and report what it
        measures."""
        self._iterators = [*map(ref, self.iterators()), ref(iterator)]
        self.stats = iterator.stats

    def iterators(self) -> list[Any]:
        """Return the iterators of the loader that somebody still holds."""
        return [each for known in self._iterators if (each := known()) is not None]

    def log_placement(self, placement: Placement) -> None:
        """Log where the workers live, once and whenever that changes."""
        is_new = placement.num_processes != self._num_processes
        self._num_processes = placement.num_processes
        if is_new:
            _logger.info("DataLoader: the workers live %s", placement)


_CHOOSING = (
    *("dataset", "_dataset_kind", "_IterableDataset_len_called", "generator"),
    *("batch_size", "sampler", "batch_sampler", "drop_last"),
)
"""Attributes of torch's loader that such a library may have exchanged. By name they are
read-only."""


def choosing_as(loader: DataLoader[Any], plain: TorchDataLoader[Any], device: Any) -> Any:
    """Return a copy of our loader, of whatever class, whose samples are chosen as by a plain one.

    Not built anew: the constructor of a user's subclass may take anything.
    """
    own = shallow_copy(loader)
    vars(own).update({name: vars(plain)[name] for name in _CHOOSING}, device=device)
    return own
