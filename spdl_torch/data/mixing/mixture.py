"""A mixture of map-style datasets, its epochs as a source, and the sampler of its positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import Dataset

from ...checks import whole
from ...errors import UnsupportedOptionError
from ...loader.error_notes import add_thread_note
from ...loader.fetching.samples import takes_batches
from ...loader.rng.streams import borrowers_in, contexts_of_part
from ...loader.sampling.distributed_sampler import DistributedSampler
from ..sources._base import DataSource, checked_start, seed_of
from .plan import MAX_POSITIONS, MixturePlan, Positions, Shares, Stop

if TYPE_CHECKING:
    from ...loader.rng.streams import SampleContext
    from ...loader.sampling.parts import Tail

T_co = TypeVar("T_co", covariant=True)


class Mixture(Dataset[T_co]):
    """Several map-style datasets as one, made by :func:`spdl_torch.data.mix`.

    ``mixture[position]`` is the sample at a position of the training, which may be past
    ``len(mixture)``: positions count on from epoch to epoch. Each source's samples come in an order
    of their own; when all of them have come, they come again in another.

    In a loader, its ``sampler()`` says which positions an epoch has. As the source of a pipeline,
    the mixture itself goes on from epoch to epoch, and shares its samples out among ranks.

    Everything follows from the seed, the weights and the position: any position is reached at once,
    in any order, and no order is stored. Up to some 8 million positions are cached once they are
    computed.

    If every source makes whole batches and gives each sample its own random stream, as
    ``spdl_torch.ImageFolder`` does, so does the mixture: one call for each source in a batch.
    """

    sample_context: SampleContext | None = None
    """The context of a sample's random stream, set by a loader that gives every sample its own; as
    in :class:`spdl_torch.ImageFolder`."""

    epoch = 0
    """The epoch of the next iteration; see :meth:`set_epoch`."""
    _deals_in_turn = True  # see deals_in_turn() of sampling.sampler_chain

    def __init__(
        self,
        datasets: Mapping[str, Any],
        phases: Sequence[Shares],
        *,
        seed: int,
        stop: Stop,
        shuffle: bool,
        num_samples: int | None,
    ) -> None:
        self.datasets = dict(datasets)
        """The sources by name."""
        self._names = tuple(datasets)
        self._lengths = [len(dataset) for dataset in datasets.values()]
        for name, length in zip(self._names, self._lengths, strict=True):
            if not length:
                raise ValueError(f"mix: the source {name!r} is empty.")
        self._plan = MixturePlan(self._names, phases, seed)
        keys = [seed_of("order", seed, name) for name in self._names]
        self._positions = Positions(self._plan, self._lengths, keys, shuffle=shuffle)
        if num_samples is None:
            num_samples = self._plan.end_of_epoch(self._lengths, stop)
        if num_samples is None and stop == "all":
            raise ValueError(
                'mix: with stop="all" every source has to come to its end, but the weight of one '
                'becomes 0 before. Leave it out, or pass stop="never" and num_samples.'
            )
        self._length = MAX_POSITIONS if num_samples is None else num_samples

    def __len__(self) -> int:
        """Return the number of samples of an epoch."""
        return self._length

    def __getitem__(self, position: int) -> T_co:
        """Return the sample at a position. Raises: IndexError: it is negative; what the source
        raises, with a note that names source and index.
        """
        source, index = self._positions.at(position)
        try:
            # Looked up in the dict each time: a worker thread's copy has datasets of its own.
            return self.datasets[self._names[source]][index]  # type: ignore[no-any-return]  # the user's dataset
        except Exception as error:
            add_thread_note(error, f"in sample {index} of the source {self._names[source]!r}")
            raise

    @property
    def __getitems__(self) -> Callable[[Sequence[int]], list[T_co]] | None:
        """The function that returns the samples of many positions; None = one by one."""
        # A batch that draws from one random stream would depend on what else is in the batch.
        batched = all(takes_batches(each) and borrowers_in(each) for each in self.datasets.values())
        return self._samples_of if batched else None

    def __iter__(self) -> Iterator[T_co]:
        """Iterate over the epoch that is set, at first 0."""
        return self.iterate()

    def __repr__(self) -> str:
        sources = ", ".join(f"{name!r}: {n}" for name, n in self.counts(self._length).items())
        return f"<Mixture of {self._length} samples an epoch, {{{sources}}}>"

    def sampler(
        self, num_replicas: int | None = None, rank: int | None = None, *, tail: Tail = "drop"
    ) -> MixtureSampler:
        """Return a sampler of this rank's positions, for a loader's ``sampler``. Arguments as for
        :class:`spdl_torch.DistributedSampler`.
        """
        return MixtureSampler(self, num_replicas, rank, tail=tail)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, for a pipeline; running ones keep theirs.
        Positions, and so a loader, do not depend on it. Raises: ValueError: ``epoch`` < 0.
        """
        self.epoch = whole("Mixture.set_epoch", "epoch", epoch, 0)

    def iterate(self, start: int = 0) -> Iterator[T_co]:
        """Iterate over the epoch that is set from its ``start``-th sample on, at once.

        Raises: ValueError: ``start`` < 0.
        """
        return self._as_source().iterate(start)

    def shard(self, index: int, count: int) -> MixturePart[T_co]:
        """Return a source of every ``count``-th sample of an epoch, from ``index`` on.

        Raises: ValueError: not ``0 <= index < count``.
        """
        return self._as_source().shard(index, count)

    def positions_of(self, epoch: int) -> range:
        """Return the positions of an epoch: those that follow the epoch before."""
        return range(epoch * self._length, (epoch + 1) * self._length)

    def locate(self, position: int) -> tuple[str, int]:
        """Return the name of the source that gives the sample at a position, and the sample's index
        there. Raises: IndexError: the position is negative.
        """
        source, index = self._positions.at(position)
        return self._names[source], index

    def counts(self, stop: int, start: int = 0) -> dict[str, int]:
        """Return how many samples come from each source between two positions, ``start`` included
        and ``stop`` not. It takes no longer if they are far apart.
        """
        counts = self._plan.counts(stop) - self._plan.counts(start)
        return dict(zip(self._names, counts.tolist(), strict=True))

    def loading_remarks(self) -> tuple[str, ...]:
        """Return the remark for a loader's report on the sources' shares of the first epoch."""
        counts = self.counts(self._length).values()
        parts = [
            f"{count / max(1, self._length):.1%} {name} ({count / length:.2g} times its samples)"
            for name, count, length in zip(self._names, counts, self._lengths, strict=True)
        ]
        return (f"An epoch of the mixture is {', '.join(parts)}.",)

    def _as_source(self) -> MixturePart[T_co]:
        source = MixturePart(self)
        source.set_epoch(self.epoch)
        return source

    def _samples_of(self, positions: Sequence[int]) -> list[T_co]:
        """Return the samples of a batch; bit for bit those that ``self[...]`` returns."""
        if self.sample_context is None:  # one random stream: the order of the samples counts
            return [self[position] for position in positions]
        samples: list[Any] = [None] * len(positions)
        found = [self._positions.at(position) for position in positions]
        for source, name in enumerate(self._names):
            places = [place for place, (own, _) in enumerate(found) if own == source]
            if places:
                own = self._batch_of(name, [found[place][1] for place in places], places)
                for place, sample in zip(places, own, strict=True):
                    samples[place] = sample
        return samples

    def _batch_of(self, name: str, indices: list[int], places: list[int]) -> list[Any]:
        """Return samples of one source, which are at ``places`` of the batch."""
        dataset, context = self.datasets[name], self.sample_context
        assert context is not None, "guaranteed by the caller"
        borrowers = borrowers_in(dataset)
        try:
            for each in borrowers:
                each.sample_context = contexts_of_part(context, places)
            samples: list[Any] = dataset.__getitems__(indices)
        except Exception as error:
            where = f"in samples {', '.join(map(str, indices[:8]))} of the source {name!r}"
            add_thread_note(error, where)
            raise
        finally:
            for each in borrowers:
                each.sample_context = None
        return samples


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
        index, count = self._checked_shard(index, count)
        return self._with(_places=self._places[index::count])

    def shuffle(self, seed: int = 0, buffer_size: int | None = None) -> MixturePart[T_co]:
        """Refuse: the mixture has shuffled each source. Raises: UnsupportedOptionError."""
        raise UnsupportedOptionError(
            f"{type(self).__name__}.shuffle: a mixture is shuffled by mix(seed=..., shuffle=True)."
        )

    def iterate(self, start: int = 0) -> Iterator[T_co]:
        """Iterate from the ``start``-th sample of the epoch on, without reading earlier ones."""
        start = checked_start(self, start)
        positions = self._mixture.positions_of(self.epoch)
        return map(self._mixture.__getitem__, map(positions.__getitem__, self._places[start:]))


class MixtureSampler(DistributedSampler):
    """This rank's positions in a mixture; each epoch takes those that follow the epoch before.

    All ranks together take ``mixture.positions_of(epoch)``, rank ``r`` of ``n`` every ``n``-th of
    them from the ``r``-th on. Arguments and members are those of
    :class:`spdl_torch.DistributedSampler`. Call ``set_epoch`` before each epoch: as with that
    sampler, an epoch whose number is not set repeats the one before.
    """

    def __init__(
        self,
        mixture: Mixture[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        tail: Tail = "drop",
    ) -> None:
        super().__init__(mixture, num_replicas, rank, shuffle=False, tail=tail)

    def __iter__(self) -> Iterator[int]:
        return map(self.dataset.positions_of(self.epoch).__getitem__, super().__iter__())
