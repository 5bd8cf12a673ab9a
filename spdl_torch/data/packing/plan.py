"""The plan of an epoch: which samples make which group, from their sizes alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..sources._base import seed_of
from .grouping import packed
from .sizes import Pieces, volumes_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from .grouping import Grouping

_WINDOW_GROUPS = 1024  # groups that are made together: with more, they would hardly be fuller
_LEAST_GROUPS = 64


class Groups:
    """The groups of one epoch.

    Memory: 4 bytes a sample (8 for 2**31 and more), and 12 a group.
    """

    def __init__(
        self, pieces: Pieces, samples: NDArray[Any], ends: NDArray[np.int64], turns: Any
    ) -> None:
        self.pieces = pieces
        """What is grouped; groups have numbers in it."""
        self._samples = samples
        self._ends = ends
        self._turns = turns

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, number: int) -> list[int]:
        group = int(self._turns[number])
        first = int(self._ends[group - 1]) if group else 0
        samples: list[int] = self._samples[first : int(self._ends[group])].tolist()
        return samples

    def first(self, number: int) -> NDArray[Any]:
        """Return the samples of the first ``number`` groups."""
        groups = self._turns[:number]
        starts = np.where(groups > 0, self._ends[groups - 1], 0)
        lengths = self._ends[groups] - starts
        # For each sample: where its group starts, and its place there.
        places = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return np.asarray(self._samples[np.repeat(starts, lengths) + places])

    @property
    def total(self) -> int:
        """The sum of the sizes of all samples."""
        return int(volumes_of(self.pieces.sizes).sum(dtype=np.int64))

    def capacity(self, *, padded: bool, budget: int) -> int:
        """Return the room of all groups together: the budget each or, padded, the largest size in
        each dimension, times the number of samples.
        """
        if not padded or not len(self):
            return len(self) * budget
        starts = np.concatenate([[0], self._ends[:-1]])
        largest = np.maximum.reduceat(self.pieces.sizes[self._samples], starts)
        return int((volumes_of(largest) * (self._ends - starts)).sum())


class GroupPlan:
    """The groups of every epoch; those of the last epoch that was asked for are kept.

    An epoch's samples are shuffled, then grouped in windows that make some 1024 groups each, and
    the groups are shuffled. Within a window, sizes decide which samples meet, so a sample meets
    others in another epoch only because its window is another one: even a small dataset has four,
    a tiny one fewer. Windows also bound the memory that grouping takes. The samples of a window's
    last group, which is seldom full, begin the next window.

    sizes: those of the first epoch. pieces_at: the pieces of any epoch, where they are not always
        the same.
    """

    def __init__(
        self,
        sizes: NDArray[Any],
        budget: int,
        grouping: Grouping,
        *,
        seed: int,
        shuffle: bool,
        pieces_at: Callable[[int], Pieces] | None = None,
    ) -> None:
        self.sizes = sizes
        self._pieces_at = pieces_at
        self.budget = budget
        self._grouping = grouping
        self._seed = seed
        self._shuffle = shuffle
        num_groups = max(1, int(volumes_of(sizes).sum(dtype=np.int64)) // budget)
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
        room = groups.capacity(padded=self.is_padded, budget=self.budget)
        return 1 - groups.total / room if room else 0.0

    @property
    def is_padded(self) -> bool:
        """Whether the samples of a group are padded to the largest, and not put end to end."""
        return self._grouping is not packed

    def _grouped(self, epoch: int) -> Groups:
        pieces = Pieces(self.sizes, None, None)
        if self._pieces_at is not None:
            pieces = self._pieces_at(epoch)
        sizes = pieces.sizes
        samples = self._order(len(sizes), "samples", epoch)
        ends: list[NDArray[np.int64]] = []
        first, is_last = 0, not len(samples)
        while not is_last:
            window = samples[first : first + self.window]
            is_last = first + len(window) == len(samples)
            places, own = self._grouping(sizes[window], self.budget)
            window[:] = window[places]  # in place: the order of all samples exists once
            if not is_last and len(own) > 1:
                own.pop()
            ends.append(np.array(own, np.int64) + first)
            first += own[-1]
        all_ends = np.concatenate(ends) if ends else np.zeros(0, np.int64)
        return Groups(pieces, samples, all_ends, self._order(len(all_ends), "groups", epoch))

    def _order(self, length: int, what: str, epoch: int) -> NDArray[Any]:
        dtype = torch.int32 if length < 1 << 31 else torch.int64
        if not self._shuffle:
            return torch.arange(length, dtype=dtype, device="cpu").numpy()
        seed = seed_of("budget", self._seed, what, epoch)
        generator = torch.Generator(device="cpu").manual_seed(seed)
        return torch.randperm(length, generator=generator, dtype=dtype, device="cpu").numpy()
