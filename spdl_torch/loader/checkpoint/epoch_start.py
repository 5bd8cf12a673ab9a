"""What an epoch begins with. A state says it again for as long as the epoch runs, and has the
fields of ``BaseSeed`` and ``SamplerState`` under the same names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..rng.keys import epoch_seed

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from .last_indices import LastIndices


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
    """None = it keeps none."""
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

    def count(self, index: Any) -> int:
        """Return the number of samples of an index."""
        if not self.in_batches:
            return 1
        try:
            return len(index)
        except TypeError:  # a slice, for __getitems__
            return 1

    def num_samples(self, local_samples: int) -> int:
        """Return the number of samples on all ranks up to a position on this one."""
        return self.first + local_samples * self.world


class LookAhead(NamedTuple):
    """What was found by drawing an index ahead, to go on within an epoch."""

    nothing_left: bool = False
    """Whether the epoch began after its last batch: the saved loop had not seen the end."""
    before: Sequence[torch.Tensor] = ()
    """The user's generators before that; () = nothing was drawn that may have to be drawn again."""
