"""Mixtures of sources, for a pipeline, and of iterable datasets, for a loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import IterableDataset

from ...errors import UnsupportedOptionError
from ..sources._base import DataSource, check_start
from .items import DatasetReader, MixedItems, SourceReader
from .plan import MixturePlan

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .mixture import Stop
    from .weights import Shares

T_co = TypeVar("T_co", covariant=True)


class MixedSource(DataSource[T_co]):
    """Several sources as one, made by :func:`spdl_torch.data.mix`, for a pipeline.

    ``shard`` mixes the same part of every source. ``iterate(start)`` begins each source at the item
    whose turn it then is: at once if the source can, and knows its length.
    """

    def __init__(
        self,
        sources: Mapping[str, DataSource[Any]],
        phases: Sequence[Shares],
        *,
        seed: int,
        stop: Stop,
    ) -> None:
        self.sources = dict(sources)
        """The sources by name."""
        self._has_all_it_counts = all(each._has_all_it_counts for each in sources.values())
        self._phases = tuple(phases)
        self._seed = seed
        self._stop: Stop = stop

    def __repr__(self) -> str:
        return f"<MixedSource of {self.sources!r}>"

    def __len__(self) -> int:
        """Return the number of items of the epoch that is set. Raises: TypeError: a source does not
        know its length, or the mixture has no end.
        """
        sources: list[Any] = [*self.sources.values()]
        lengths = [len(source) for source in sources]
        plan = self._plan()
        drawn = plan.sources_drawn()
        # The positions at which the sources would begin again.
        ends = [plan.position_of(number, lengths[number]) for number in drawn]
        known = [end for end in ends if end is not None]
        if self._stop == "never" or not known or (self._stop == "all" and len(known) < len(ends)):
            raise TypeError("MixedSource has no length: the mixture has no end.")
        return min(known) if self._stop == "first" else max(known)

    def shard(self, index: int, count: int) -> MixedSource[T_co]:
        """Return the mixture of part ``index`` of ``count`` of every source.

        Raises: ValueError: not ``0 <= index < count``.
        """
        self._check_shard(index, count)
        parts = {name: source.shard(index, count) for name, source in self.sources.items()}
        return self._with(sources=parts)

    def shuffle(self, seed: int = 0, buffer_size: int | None = None) -> MixedSource[T_co]:
        """Refuse: the mixture has shuffled each source. Raises: UnsupportedOptionError."""
        raise UnsupportedOptionError(
            "MixedSource.shuffle: a mixture is shuffled by mix(seed=..., shuffle=True). Shuffle "
            "the sources themselves and pass shuffle=False for another buffer size."
        )

    def iterate(self, start: int = 0) -> Iterator[T_co]:
        """Iterate from the ``start``-th item on.

        Raises (while iterating): ValueError: a source is empty when its turn comes.
        """
        check_start(self, start)
        readers = [SourceReader(*named, self._epoch) for named in self.sources.items()]
        items = MixedItems(readers, self._plan(), self._stop)
        if start:
            items.go_to(start)
        return items

    def _plan(self) -> MixturePlan:
        return MixturePlan(tuple(self.sources), self._phases, self._seed, "epoch", self._epoch)


class MixedIterable(IterableDataset[T_co]):
    """Several iterable datasets as one, made by :func:`spdl_torch.data.mix`.

    Each dataset divides itself among ranks and workers. The iterator's ``state_dict()``
    has the position of each and the datasets' own states, if they keep any; a loader's state
    contains it.
    """

    def __init__(
        self,
        datasets: Mapping[str, Any],
        phases: Sequence[Shares],
        *,
        seed: int,
        stop: Stop,
    ) -> None:
        self.datasets = dict(datasets)
        """The datasets by name."""
        self._phases = tuple(phases)
        self._seed = seed
        self._stop: Stop = stop

    def __iter__(self) -> Iterator[T_co]:
        """Iterate from the beginning."""
        readers = [DatasetReader(*named) for named in self.datasets.items()]
        plan = MixturePlan(tuple(self.datasets), self._phases, self._seed)
        return MixedItems(readers, plan, self._stop)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of every dataset that has ``set_epoch``."""
        for dataset in self.datasets.values():
            if callable(getattr(dataset, "set_epoch", None)):
                dataset.set_epoch(epoch)

    def __repr__(self) -> str:
        return f"<MixedIterable of {self.datasets!r}>"
