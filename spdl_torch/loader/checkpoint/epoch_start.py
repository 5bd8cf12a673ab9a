"""What each epoch keeps for a state: its base seed, what it has drawn from a sampler that keeps its
own state, and what it began with, which a state says again as long as the epoch runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..rng.keys import epoch_seed

if TYPE_CHECKING:
    import torch

    from .last_indices import LastIndices


class BaseSeed(NamedTuple):
    """A base seed, and the epoch that is seeded from it.

    torch draws one for each iterator, and so once for all epochs of a persistent one.
    """

    value: int = 0
    num_epochs: int = 0
    """The number of epochs begun since it was drawn, before this one."""
    is_new: bool = True
    """Whether this epoch draws it, before its order."""

    @property
    def epoch_seed(self) -> int:
        """The seed of the epoch's random streams; no two epochs have the same."""
        return epoch_seed(self.value, self.num_epochs) if self.num_epochs else self.value

    def following(self, *, is_new: bool = False) -> BaseSeed:
        """Return that of the next epoch. ``is_new``: it draws another one, which is not known."""
        return BaseSeed(self.value, self.num_epochs + 1, is_new)


class SamplerState(NamedTuple):
    """The state of a sampler, after the indices that were drawn from it."""

    state: Any = None
    """None = it keeps none."""
    pending: tuple[Any, ...] = ()
    """The indices that were drawn and not handed out."""
    left: int | None = None
    """The number of indices that it gives after those in this epoch; None = unknown."""


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
    before: LastIndices | None
    """The last indices before this iterator's first; None = they say nothing of its order."""
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
