"""Map-style datasets whose samples come in groups, and the sampler of the groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from ...loader.error_notes import add_thread_note
from ...loader.fetching.samples import takes_batches
from ...loader.rng.streams import borrowers_in
from ...loader.sampling.distributed_sampler import DistributedSampler
from ...loader.state_fields import is_whole_number
from ..mixing.mixture import Mixture
from .collate import Document, PackCollate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ...loader.sampling.sharding import Tail
    from .plan import GroupPlan, Groups
    from .sizes import Pieces


class GroupedDataset(Dataset[Any]):
    """A map-style dataset whose samples come in groups, made by :func:`spdl_torch.data.pack` or
    :func:`spdl_torch.data.bucket`.

    ``grouped[group]`` is the batch of a group, a list as ``sampler()`` gives it: the dataset's
    indices or, if samples were split, the numbers of their pieces. Packs of a mixture's later
    epochs have the position of each piece, its size and start, and whether the sample goes on.
    """

    def __init__(
        self,
        dataset: Any,
        pieces: Pieces,
        plan: GroupPlan,
        collate_fn: Callable[[list[Any]], Any],
    ) -> None:
        self.dataset = dataset
        """The dataset whose samples are grouped."""
        self.collate_fn = collate_fn
        """The function that makes a batch of a group's samples."""
        self._pieces = pieces
        self._plan: GroupPlan | None = plan

    def __getitem__(self, group: Sequence[Any]) -> Any:
        """Return the batch of a group. Raises: what the dataset or the collate function raises; if
        samples are fetched one by one, with a note that names the sample.
        """
        _, origins, _ = self._pieces
        if isinstance(group[0], tuple):
            indices = [position for position, *_ in group]
        else:
            indices = list(group) if origins is None else origins[group].tolist()
        samples = self._samples(indices)
        if isinstance(self.collate_fn, PackCollate):
            samples = [*map(self._document, group, indices, samples)]
        return self.collate_fn(samples)

    def __len__(self) -> int:
        """Refuse: every epoch has its own number of groups. Raises: TypeError."""
        raise TypeError(
            "a grouped dataset has no length of its own: its sampler has one, for each epoch. Pass "
            "sampler=grouped.sampler() to the loader."
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a worker's copy or pickle, which needs no plan."""
        return {**self.__dict__, "_plan": None}

    def sampler(
        self,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        tail: Tail = "drop",
    ) -> GroupSampler:
        """Return a sampler of this rank's groups, for a loader's ``sampler``. Arguments as for
        :class:`spdl_torch.DistributedSampler`; by default ``tail`` gives all ranks the same number
        of groups.
        """
        return GroupSampler(self, num_replicas, rank, tail=tail)

    def waste(self, epoch: int = 0) -> float:
        """Return the share of the room in an epoch's groups that no sample fills, 0 to 1: of the
        budget in packs, of the padded batches in buckets.
        """
        return self.plan().waste(epoch)

    def loading_remarks(self) -> tuple[str, ...]:
        """Return the remark for a loader's report on the groups of the first epoch."""
        if self._plan is None:
            return ()
        number, what = len(self._plan.groups(0)), "padding" if self._plan.is_padded else "unused"
        return (f"An epoch has {number} groups; {self.waste():.2%} of their room is {what}.",)

    def progress_stats(self, epoch: int, num_groups: int) -> dict[str, float]:
        """Return the waste of an epoch as ``packing/waste``, 0 to 1, and, for groups of a mixture,
        the number of samples that each source gave in its first ``num_groups`` as ``mixture/NAME``.
        """
        if self._plan is None:
            return {}
        stats = {"packing/waste": self.waste(epoch)}
        if isinstance(self.dataset, Mixture):
            groups = self._plan.groups(epoch)
            samples, (_, origins, starts) = groups.first(num_groups), groups.pieces
            if origins is not None and starts is not None:
                samples = origins[samples[starts[samples] == 0]]
            counts = self.dataset.counts_at(samples + epoch * len(self.dataset))
            stats |= {f"mixture/{name}": count for name, count in counts.items()}
        return stats

    def plan(self) -> GroupPlan:
        """Return the plan of the groups. Raises: RuntimeError: this is a worker's copy."""
        if self._plan is None:
            raise RuntimeError(
                "a copy of a grouped dataset, such as a worker's, has no plan. Make the sampler "
                "from the dataset that pack() or bucket() returned."
            )
        return self._plan

    def _samples(self, indices: list[int]) -> list[Any]:
        # A dataset that gives each sample its own random stream takes it from the loader, which
        # has one for each group.
        if takes_batches(self.dataset) and not borrowers_in(self.dataset):
            samples: list[Any] = self.dataset.__getitems__(indices)
            return samples
        return [self._sample(index) for index in indices]

    def _entries(self, epoch: int, groups: Groups, number: int) -> list[Any]:
        """Return a group of an epoch as ``self[...]`` takes it, in a worker that has no plan."""
        group = groups[number]
        if not (epoch and isinstance(self.dataset, Mixture)):
            return group
        first = epoch * len(self.dataset)
        if not isinstance(self.collate_fn, PackCollate):
            return [first + number for number in group]
        pieces = map(groups.pieces.piece, group)
        return [(first + sample, *piece) for sample, *piece in pieces]

    def _document(self, number: Any, index: int, sample: Any) -> Document:
        piece = number if isinstance(number, tuple) else self._pieces.piece(number)
        _, size, start, has_more = piece
        return Document(sample, size, f"sample {index}", start, has_more)

    def _sample(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            add_thread_note(error, f"in sample {index} of a group")
            raise


class GroupSampler(DistributedSampler):
    """This rank's groups of a grouped dataset, which is regrouped in every epoch.

    Arguments and members are those of :class:`spdl_torch.DistributedSampler`, which count groups
    here. Call ``set_epoch`` before each epoch. ``len()`` is that of the epoch that is set.
    """

    def __init__(
        self,
        grouped: GroupedDataset,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        tail: Tail = "drop",
    ) -> None:
        self._grouped = grouped
        self._epoch_groups = EpochGroups(grouped.plan())
        super().__init__(self._epoch_groups, num_replicas, rank, shuffle=False, tail=tail)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the passes that begin from now on, and of ``len()``."""
        super().set_epoch(epoch)
        self._epoch_groups.epoch = epoch

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume a state in the next pass, with any number of ranks. Raises: ValueError: it does
        not fit.
        """
        if isinstance(state_dict, dict) and is_whole_number(state_dict.get("epoch")):
            self.set_epoch(state_dict["epoch"])  # the length to compare with is this epoch's
        super().load_state_dict(state_dict)

    def __iter__(self) -> Iterator[Any]:
        groups, epoch = self._epoch_groups.groups(), self._epoch_groups.epoch
        numbers = super().__iter__()
        return (self._grouped._entries(epoch, groups, number) for number in numbers)


class EpochGroups:
    """The groups of one sampler's epoch, whose number is the length that the sampler divides."""

    def __init__(self, plan: GroupPlan) -> None:
        self.epoch = 0
        self._plan = plan

    def __len__(self) -> int:
        return len(self.groups())

    def groups(self) -> Groups:
        """Return the groups."""
        return self._plan.groups(self.epoch)
