"""The programs: seven datasets, two networks, epochs, workers, kept or not."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import lcm
from typing import TYPE_CHECKING

from ..ordinary.catalogue import ORDINARY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..ordinary.catalogue import Ordinary

DATASETS = {
    "CIFAR": "CIFAR, Pillow and v1, training",
    "MNIST": "MNIST, Pillow and v1",
    "ImageFolder": "ImageFolder, v1",
    "rows": "rows, arithmetic",
    "text": "text, pure Python, padded",
    "npy files": "npy files",
    "iterable": "lines, iterable",
}
"""Their names in the table, and in the list of ordinary datasets."""

_HEAVY_PER_SECOND = 250
"""Samples a second that resnet18 takes with 32 x 32 pixels, forwards and backwards, on a core."""
_TIMES_LOADING = 5
"""How much longer torch's loader and the light network take with all cores than loading alone."""
_LEAST_BATCHES = 8
"""For each worker, so that an iterable is divided into whole batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramPlan:
    """One program."""

    dataset: str
    network: str
    """``light`` or ``heavy``."""
    num_workers: int
    num_epochs: int
    is_persistent: bool = False

    @property
    def how(self) -> str:
        """The way it trains, without the dataset."""
        epochs = "1 epoch" if self.num_epochs == 1 else f"{self.num_epochs} epochs"
        kept = ", persistent" if self.is_persistent else ""
        return f"{self.network}, {self.num_workers} workers, {epochs}{kept}"

    @property
    def name(self) -> str:
        """The row's name."""
        return f"{self.how}: {self.dataset}"

    @property
    def ordinary(self) -> Ordinary:
        """The dataset and its loader options."""
        return next(one for one in ORDINARY if one.name == DATASETS[self.dataset])

    @property
    def is_usual(self) -> bool:
        """Whether it is measured unless ``--full`` or ``--only`` asks for others."""
        if self.network == "heavy":
            return (self.num_workers > 0, self.num_epochs, self.is_persistent) == (True, 3, False)
        return self.num_epochs == 3 or (self.num_workers > 0 and self.num_epochs == 1)

    def num_samples(self, seconds: float) -> int:
        """Return the samples of an epoch that takes about that long, in whole batches, equally
        many for each worker.
        """
        rate = self.ordinary.per_second / _TIMES_LOADING
        if self.network == "heavy":
            rate = min(rate, _HEAVY_PER_SECOND)
        share = self.ordinary.batch_size * lcm(2, max(1, self.num_workers))
        return max(_LEAST_BATCHES // 2, round(rate * seconds / share)) * share


def all_plans(counts: Sequence[int]) -> Iterator[ProgramPlan]:
    """Yield every program for these numbers of workers, way by way."""
    for network, workers, epochs in product(("light", "heavy"), counts, (1, 3, 10)):
        for kept in (False, True) if workers and epochs > 1 else (False,):
            for dataset in DATASETS:
                yield ProgramPlan(
                    dataset=dataset,
                    network=network,
                    num_workers=workers,
                    num_epochs=epochs,
                    is_persistent=kept,
                )
