"""The part of a loader's configuration that its workers need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..fetching.samples import is_read_at_once

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..fetching.batch_maker import BatchRecipe
    from ..fetching.collating import Memory


class Draws(NamedTuple):
    """How the workers of a loader draw random numbers."""

    base_seed: int
    per_sample: bool
    """True: each sample has its own random stream. False: each worker has one stream for all its
    work, and makes whole batches."""
    is_seeded: bool
    """Whether the user gave the seed: an epoch's streams then depend on its number alone."""


class LoadSpec(NamedTuple):
    """The loader's configuration when iteration began."""

    recipe: BatchRecipe
    num_workers: int
    max_outstanding: int
    """The limit of jobs given out and not yet received: ``prefetch_factor * num_workers``."""
    in_order: bool
    draws: Draws
    worker_init_fn: Callable[[int], None] | None
    stats: bool
    finalize: Callable[[Any], Any] | None
    """The function that the thread which made a batch applies to it (pinning), or None."""
    pipeline_number: int
    """The loader's number in traces."""
    device_index: int | None
    """The accelerator that is current on the trainer's thread; None = none is in use."""
    most_workers: int | None = None
    """The most workers that tuning may start; None = their number stays."""
    memory: Memory | None = None
    """The memory in which batches are made: pinned if they go to a device, shared if they go to
    another process; None = ordinary memory."""
    owns_dataset: bool = False
    """Whether nobody else uses the dataset object: its one worker needs no copy."""

    @property
    def announced_workers(self) -> int:
        """The number of workers in ``get_worker_info()``: constant, and above every worker's id."""
        return self.most_workers or self.num_workers

    @property
    def shares_jobs(self) -> bool:
        """Whether several threads can work on one batch."""
        recipe = self.recipe
        if not recipe.auto_collation or self.has_turns:
            return False
        return not is_read_at_once(recipe.dataset, recipe.collate_fn)

    @property
    def has_turns(self) -> bool:
        """Whether it matters which worker makes which batch: they take turns, as in torch."""
        return self.recipe.iterable or not self.draws.per_sample
