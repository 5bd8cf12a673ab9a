"""What an epoch began with, which a state says again as long as the epoch runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...named_tuples import NamedTuple

if TYPE_CHECKING:
    import torch

    from .base_seed import BaseSeed
    from .last_indices import LastOfRank


class EpochStart(NamedTuple):
    """The beginning of one iterator's epoch."""

    epoch: int
    """The number of epochs begun before this one."""
    epoch_seed: int
    start: int
    """The number of samples on all ranks before this iterator's first."""
    world: int
    in_batches: bool
    """Whether the sampler gives the indices of a batch at once."""
    before: LastOfRank
    """The last indices before this iterator's first; the rank is that of its own, too."""
    nothing_left: bool
    """Whether the epoch began after its last batch: the saved loop had not seen the end."""
    before_first: list[torch.Tensor]
    """The user's generators before the first index was drawn ahead, to go on within an epoch; [] =
    nothing was drawn ahead that may have to be drawn again."""
    generators: list[torch.Tensor]
    base: BaseSeed
    persistent: bool
    keeps_datasets: bool
    """Whether later epochs use the same dataset objects."""
