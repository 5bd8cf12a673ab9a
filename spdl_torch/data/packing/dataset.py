"""Map-style datasets whose samples come in groups: the plan of an epoch, which says by their sizes
alone which samples make which group; the dataset of the groups, and their sampler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset

from ...loader.error_notes import add_thread_note
from ...loader.fetching.samples import takes_batches
from ...loader.rng.streams import borrowers_in
from ...loader.sampling.distributed_sampler import DistributedSampler
from ..mixing.mixture import Mixture
from .collate import Document, PackCollate
from .rule import Piece, Pieces, Rule, sizes_of, volumes_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ...loader.sampling.parts import Tail

_WINDOW_GROUPS = 1024  # groups that are made together: with more, they would hardly be fuller
_LEAST_GROUPS = 64


@dataclass(eq=False, repr=False)
class Groups:
    """The groups of one epoch, or of one window of a stream: numbers of pieces.

    Memory: 4 bytes a piece (8 for 2**31 and more), and 12 a group.
    """

    _rule: Rule
    _pieces: Pieces
    _members: NDArray[Any]
    """Of one group after another."""
    _ends: NDArray[np.int64]
    _turns: NDArray[Any]

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> list[int]:
        group = int(self._turns[number])
        first = int(self._ends[group - 1]) if group else 0
        members: list[int] = self._members[first : int(self._ends[group])].tolist()
        return members

    def entries(self, number: int) -> list[Any]:
        """Return a group for a worker, who knows the pieces of the first epoch alone."""
        group, pieces = self[number], self._pieces
        if pieces.first == 0:
            return group
        if self._rule.who == "pack":
            return [tuple(pieces.piece(member)) for member in group]
        return [pieces.first + member for member in group]

    @property
    def size(self) -> int:
        """The sum of the sizes of all samples."""
        return int(volumes_of(self._pieces.sizes).sum(dtype=np.int64))

    @property
    def room(self) -> int:
        """The room of all groups together: the budget of each pack; of a padded batch the largest
        size in each dimension, times the number of samples.
        """
        if self._rule.who == "pack" or not len(self):
            return len(self) * self._rule.budget
        starts = np.concatenate([[0], self._ends[:-1]])
        largest = np.maximum.reduceat(self._pieces.sizes[self._members], starts)
        return int((volumes_of(largest) * (self._ends - starts)).sum())


class GroupPlan:
    """The groups of every epoch; those of the last epoch that was asked for are kept.

    An epoch's samples are shuffled, then grouped in windows that make some 1024 groups each, and
    the groups are shuffled. Within a window, sizes decide which samples meet, so a sample meets
    others in another epoch only because its window is another one: even a small dataset has four,
    a tiny one fewer. Windows also bound the memory that grouping takes. The samples of a window's
    last group, which is seldom full, begin the next window.
    """

    def __init__(self, rule: Rule, dataset: Any, size_of: Any) -> None:
        self.rule = rule
        self.pieces = rule.pieces_of(sizes_of(dataset, size_of, rule.who))
        """The pieces of the first epoch; of a mixture, later epochs have others."""
        self._dataset = dataset
        self._size_of = size_of
        sizes = self.pieces.sizes
        num_groups = max(1, int(volumes_of(sizes).sum(dtype=np.int64)) // rule.budget)
        most = max(_LEAST_GROUPS, min(_WINDOW_GROUPS, num_groups // 4))
        self.window = max(2, most * len(sizes) // num_groups)
        self._kept: tuple[int, Groups] | None = None

    def groups(self, epoch: int) -> Groups:
        """Return the groups of an epoch."""
        if self._kept is None or self._kept[0] != epoch:
            self._kept = None  # two epochs are never kept together
            self._kept = epoch, self._grouped(epoch)
        return self._kept[1]

    def waste(self, epoch: int) -> float:
        """Return the share of the room in an epoch's groups that no sample fills."""
        groups = self.groups(epoch)
        room = groups.room
        return 1 - groups.size / room if room else 0.0

    @cached_property
    def first_epoch(self) -> tuple[int, float]:
        """The number of groups of the first epoch, and their waste. A report asks for it in every
        epoch, whose groups are kept.
        """
        return len(self.groups(0)), self.waste(0)

    def _grouped(self, epoch: int) -> Groups:
        rule, pieces = self.rule, self._pieces_at(epoch)
        members = rule.order(len(pieces.sizes), rule.generator("samples", epoch))
        ends: list[int] = []
        first, is_last = 0, not len(members)
        while not is_last:
            window = members[first : first + self.window]
            is_last = first + len(window) == len(members)
            places, own = rule.grouped(pieces.sizes[window])
            window[:] = window[places]  # in place: the order of all samples exists once
            if not is_last and len(own) > 1:
                own.pop()
            ends += [first + end for end in own]
            first = ends[-1]
        turns = rule.order(len(ends), rule.generator("groups", epoch))
        return Groups(rule, pieces, members, np.array(ends, np.int64), turns)

    def _pieces_at(self, epoch: int) -> Pieces:
        if not (epoch and isinstance(self._dataset, Mixture)):
            return self.pieces
        who, size_of = self.rule.who, self._size_of
        if not callable(size_of):
            raise ValueError(
                f"{who}: size_of must be a function of the position, got a "
                f"{type(size_of).__name__} of the first epoch's sizes: a mixture's later epochs "
                "have other samples. mixture.locate(position) returns the source's name and the "
                "index there."
            )
        positions = self._dataset.positions_of(epoch)
        sizes = sizes_of(self._dataset, lambda place: size_of(positions[place]), who)
        return self.rule.pieces_of(sizes, first=positions.start)


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
        self, num_replicas: int | None = None, rank: int | None = None, *, tail: Tail = "drop"
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

    def __iter__(self) -> Iterator[Any]:
        return map(self._plan.groups(self.epoch).entries, super().__iter__())

    def _length(self) -> int:
        return len(self._plan.groups(self.epoch))
