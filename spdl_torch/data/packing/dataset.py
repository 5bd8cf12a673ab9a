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
from .rule import Piece

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ...loader.sampling.parts import Tail
    from .plan import GroupPlan


class GroupedDataset(Dataset[Any]):
    """A map-style dataset whose samples come in groups, made by :func:`spdl_torch.data.pack` or
    :func:`spdl_torch.data.bucket`.

    ``grouped[group]`` is the batch of a group, a list as ``sampler()`` gives it: the dataset's
    indices or, if samples were split, the numbers of their pieces. Packs of a mixture's later
    epochs have the position of each piece, its size and start, and whether the sample goes on.
    """

    def __init__(self, dataset: Any, plan: GroupPlan) -> None:
        self.dataset = dataset
        """The dataset whose samples are grouped."""
        self.collate_fn = plan.rule.collate_fn
        """The function that makes a batch of a group's samples."""
        self._pieces = plan.pieces
        self._plan: GroupPlan | None = plan

    def __getitem__(self, group: Sequence[Any]) -> Any:
        """Return the batch of a group. Raises: what the dataset or the collate function raises; if
        samples are fetched one by one, with a note that names the sample.
        """
        if not isinstance(self.collate_fn, PackCollate):
            return self.collate_fn(self._samples(list(group)))
        pieces = [
            Piece(*each) if isinstance(each, tuple) else self._pieces.piece(each) for each in group
        ]
        samples = self._samples([piece.sample for piece in pieces])
        return self.collate_fn([*map(Document, samples, pieces)])

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
        number, waste = self._plan.first_epoch
        what = self._plan.rule.waste
        return (f"An epoch has {number} groups; {waste:.2%} of their room is {what}.",)

    def progress_stats(self, epoch: int, num_groups: int) -> dict[str, float]:
        """Return the waste of an epoch as ``packing/waste``, 0 to 1, and, for groups of a mixture,
        the number of samples that each source gave in its first ``num_groups`` as ``mixture/NAME``.
        """
        if self._plan is None:
            return {}
        stats = {"packing/waste": self.waste(epoch)}
        if isinstance(self.dataset, Mixture):
            positions = self._plan.groups(epoch).samples_begun(num_groups)
            counts = self.dataset.counts_at(positions)
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
        self._plan = grouped.plan()
        super().__init__(grouped, num_replicas, rank, shuffle=False, tail=tail)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume a state in the next pass, with any number of ranks. Raises: ValueError: it does
        not fit.
        """
        if isinstance(state_dict, dict) and is_whole_number(state_dict.get("epoch")):
            self.set_epoch(state_dict["epoch"])  # the length to compare with is this epoch's
        super().load_state_dict(state_dict)

    def __iter__(self) -> Iterator[Any]:
        return map(self._plan.groups(self.epoch).entries, super().__iter__())

    def _length(self) -> int:
        return len(self._plan.groups(self.epoch))
