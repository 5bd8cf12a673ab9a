"""The epochs of a mixture of map-style datasets, as the source of a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from ...errors import UnsupportedOptionError
from ..sources._base import DataSource, check_start

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .mixture import Mixture

T_co = TypeVar("T_co", covariant=True)


class MixturePart(DataSource[T_co]):
    """A mixture's samples, epoch by epoch, or every ``count``-th of them.

    As with a sampler, an epoch has the positions that follow those of the epoch before.
    """

    _deals_in_turn = True  # see deals_in_turn() of sampling.sampler_chain

    def __init__(self, mixture: Mixture[T_co]) -> None:
        self._mixture = mixture
        self._places = range(len(mixture))  # within an epoch

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} samples an epoch of {self._mixture!r}>"

    def shard(self, index: int, count: int) -> MixturePart[T_co]:
        """Return every ``count``-th sample, from ``index`` on.

        Raises: ValueError: not ``0 <= index < count``.
        """
        self._check_shard(index, count)
        return self._with(_places=self._places[index::count])

    def shuffle(self, seed: int = 0, buffer_size: int | None = None) -> MixturePart[T_co]:
        """Refuse: the mixture has shuffled each source. Raises: UnsupportedOptionError."""
        raise UnsupportedOptionError(
            f"{type(self).__name__}.shuffle: a mixture is shuffled by mix(seed=..., shuffle=True)."
        )

    def iterate(self, start: int = 0) -> Iterator[T_co]:
        """Iterate from the ``start``-th sample of the epoch on, without reading earlier ones."""
        check_start(self, start)
        first = self._epoch * len(self._mixture)
        return map(self._mixture.__getitem__, (first + place for place in self._places[start:]))
