"""The parts of an epoch: what it begins with, its jobs, what the loop has had of them; and the last
indices before a position, which show whether an order drawn anew is the same.

A state says what an epoch began with for as long as the epoch runs.

A sampler may draw its order from what no state has: ``random``, numpy, a generator of its own. Then
it gives another order when it is resumed, of which a position means nothing. A state has a checksum
of the last indices.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ...handlers import unless_of_handler
from ..rng.keys import epoch_seed

if TYPE_CHECKING:
    from .user_state import WorkerState


class BaseSeed(NamedTuple):
    """A base seed, and the epoch that is seeded from it.

    torch draws one for each iterator, and so once for all epochs of a persistent one.
    """

    base_seed: int = 0
    num_epochs: int = 0
    """The number of epochs begun since it was drawn, before this one."""
    drew_base_seed: bool = True
    """Whether this epoch draws it, before its order."""

    @property
    def epoch_seed(self) -> int:
        """The seed of the epoch's random streams; no two epochs have the same."""
        return epoch_seed(self.base_seed, self.num_epochs) if self.num_epochs else self.base_seed

    def following(self, *, is_new: bool = False) -> BaseSeed:
        """Return that of the next epoch. ``is_new``: it draws another one, which is not known."""
        return BaseSeed(self.base_seed, self.num_epochs + 1, is_new)


class SamplerState(NamedTuple):
    """The state of a sampler, after the indices that were drawn from it."""

    sampler: Any = None
    """Its own; None = it keeps none."""
    pending: tuple[Any, ...] = ()
    """The indices that were drawn and not handed out."""
    sampler_left: int | None = None
    """The number of indices that it gives after those in this epoch; None = unknown."""


class EpochStart(NamedTuple):
    """What an epoch begins with."""

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
    generators: Sequence[torch.Tensor]
    """The states of the generators from which the order is drawn."""
    persistent: bool
    keeps_datasets: bool
    """Whether later epochs use the same dataset objects."""
    begins_late: bool
    """Whether the sampler's generator begins at its first index. Without workers that may be long
    after ``iter()``, so the epoch given last to ``set_epoch()`` counts."""
    left_before: tuple[int, ...]
    """The number of items that the resumed epoch before this one had left; see
    ``Order.left_of_resumed``."""
    last: LastIndices | None
    """The last indices before this iterator's first; None = they say nothing of its order."""
    first: int = 0
    """The number of samples on all ranks before this iterator's first, but for those that it has
    skipped."""
    number_of_pass: int | None = None
    """That of a ``PipelineDataset`` in workers, where they do not know it from a state."""

    nothing_left: bool = False
    """Whether it began after its last batch: the saved loop had not seen the end."""
    before_look: Sequence[torch.Tensor] = ()
    """The user's generators before an index was drawn ahead; () = none was that may have to be
    drawn again."""

    def count(self, index: Any) -> int:
        """Return the number of samples of an index."""
        if not self.in_batches:
            return 1
        try:
            return len(index)
        except TypeError:  # a slice, for __getitems__
            return 1


class Given(NamedTuple):
    """A job, as it is given out."""

    number: int
    index: Any
    first: int
    """The position of its first sample in the epoch."""
    wants_state: bool
    """Whether an iterable that keeps a state is asked for it after this batch."""
    worker: int
    """The worker that gets it, where not any can make it."""

    @property
    def size(self) -> int:
        """The number of its samples."""
        return len(self.index) if isinstance(self.index, list | tuple) else 1


class Told(NamedTuple):
    """What the loop gets in place of no batch, by what it raises: StopIteration; an error of the
    sampler, or of a wait that took too long, after which batches come at a later ``next()``; or,
    from a backend, one after which none comes."""

    error: BaseException


class HandedOut(NamedTuple):
    """What the loop has had of an epoch."""

    num_in_order: int = 0
    """The number of this iterator's batches before the first that was not handed out."""
    local_samples: int = 0
    """The number of this rank's samples in those, and in what a resumed iterator has skipped."""
    ahead: frozenset[int] = frozenset()
    """The batches handed out before their turn: at first those of the resumed state, drawn or not,
    then also this iterator's."""
    workers: tuple[WorkerState, ...] = ()
    """The states of the workers' iterables; () = map-style."""
    next_worker: int = 0


NUM_LAST = 8
"""The number of indices that count."""

LastIndices = tuple[Any, ...]
"""As plain values; () = nothing is known of them."""


def last_of(indices: Iterable[Any], *, in_batches: bool) -> LastIndices:
    """Return the last of the samples' indices in what a sampler gave.

    ``in_batches``: whether it gives those of a batch at once.
    """
    last: list[Any] = []
    for index in indices:
        is_batch = in_batches and isinstance(index, _BATCHES) and getattr(index, "ndim", 1) > 0
        last = [*last, *map(_plain, index[-NUM_LAST:] if is_batch else (index,))][-NUM_LAST:]
    return tuple(last)


def checksum_of(last: LastIndices) -> int | None:
    """Return the checksum of the last indices; None = nothing is known of them."""
    return zlib.crc32(repr(last).encode()) if last else None


def kinds_of(indices: Iterable[Any]) -> int:
    """Return a checksum of the types of indices, and of those in batches: JSON makes lists of
    tuples, which select other samples."""
    flat = [each for index in indices for each in (index if type(index) is list else (index,))]
    return zlib.crc32(" ".join(type(each).__name__ for each in flat).encode())


_BATCHES = (list, tuple, np.ndarray, torch.Tensor)


def _plain(index: Any) -> Any:
    """Return a value whose text is the same in every process."""
    try:
        return operator.index(index)
    except unless_of_handler(Exception):  # no number, or one of the user's whose method fails
        if isinstance(index, np.ndarray | torch.Tensor):
            index = index.reshape(-1)[:NUM_LAST].tolist()
        if isinstance(index, list | tuple):
            return [*map(_plain, index[:NUM_LAST])]
        return index if isinstance(index, str | bytes | float) else type(index).__name__
