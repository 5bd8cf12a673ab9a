"""What an epoch keeps for a state beside numbers: its base seed, and what it has drawn from a
sampler that keeps its own state. A state has their fields under the same names."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..rng.keys import epoch_seed


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
