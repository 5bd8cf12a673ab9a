"""What the workers need to know of a loader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..fetching.rows import row_reader
from ..fetching.sample_calls import takes_batches

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..fetching.bad_samples import Tolerance

__all__ = ["LoadSpec"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSpec:
    """The loader, as it was when iteration began."""

    dataset: Any
    iterable: bool
    auto_collation: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool
    num_workers: int
    max_outstanding: int
    """Jobs given out and not yet received: ``prefetch_factor * num_workers``."""
    in_order: bool
    base_seed: int
    stream_per_sample: bool
    """Otherwise each worker has one stream for all it does, and makes whole batches."""
    is_seeded: bool
    """The user gave the seed: an epoch's streams follow from its number, whatever went before."""
    worker_init_fn: Callable[[int], None] | None
    stats: bool
    finalize: Callable[[Any], Any] | None
    """Applied to every batch by the thread that made it (pinning); None = nothing to do."""
    pipeline_number: int
    """Of the loader, in traces."""
    device_index: int | None
    """The accelerator that is current on the trainer's thread; None = none is in use."""
    tolerance: Tolerance | None = None
    """Of samples that fail; None = none may."""
    most_workers: int | None = None
    """As many as there may ever be; None = their number stays."""

    @property
    def told_workers(self) -> int:
        """What workers are told of their number: every id is below it, and it stays."""
        return self.most_workers or self.num_workers

    @property
    def shares_jobs(self) -> bool:
        """Whether several threads can work on one batch."""
        if not self.auto_collation or self.has_turns or takes_batches(self.dataset):
            return False
        return row_reader(self.dataset, self.collate_fn) is None

    @property
    def has_turns(self) -> bool:
        """Whether it matters which worker makes which batch: they take turns, as in torch."""
        return self.iterable or not self.stream_per_sample
