"""Whole training programs: seven datasets, two networks, epochs, workers, kept or not.

``python examples/bench/program.py LOADER JSON`` trains a network as people write it, and ends.
LOADER is the module of ``DataLoader``, the import that users change; nothing else of ours is
imported, since imports are measured. JSON has the arguments of ``train``. It prints what it saw as
JSON; how long it takes is measured from outside.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from dataclasses import dataclass
from itertools import product
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad

# Python puts this folder there; its files are a package, whose place is the folder above.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.ordinary.catalogue import ORDINARY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.ordinary.catalogue import Ordinary

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
_PIXELS = 32
_FEATURES = 3 * _PIXELS * _PIXELS
_CLASSES = 10


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


class Features(nn.Module):
    """The first 3,072 numbers of each sample, whatever its shape; shorter ones end with zeros."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return float32 (N, 3072)."""
        found = inputs.float().flatten(1)[:, :_FEATURES]
        return pad(found, (0, _FEATURES - found.shape[1]))


def make_network(name: str) -> nn.Module:
    """Return ``light``: one matrix, or ``heavy``: resnet18 over pictures of 32 x 32."""
    if name == "light":
        return nn.Sequential(Features(), nn.Linear(_FEATURES, _CLASSES))
    from torchvision.models import resnet18

    as_pictures = nn.Unflatten(1, (3, _PIXELS, _PIXELS))
    return nn.Sequential(Features(), as_pictures, resnet18(num_classes=_CLASSES))


def train(
    loader_module: str, plan: ProgramPlan, folder: Path, num_samples: int
) -> dict[str, float]:
    """Train; return the milliseconds of the wait for the first batch.

    Raises: RuntimeError: an epoch has another number of samples than asked for.
    """
    loader_class: Any = importlib.import_module(loader_module).DataLoader
    torch.set_num_threads(1)  # more would spin on the cores that the workers need
    torch.manual_seed(0)
    loader = loader_class(
        **plan.ordinary.arguments(folder, num_samples),
        num_workers=plan.num_workers,
        persistent_workers=plan.is_persistent,
    )
    network = make_network(plan.network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    first_batch: float | None = None
    for _ in range(plan.num_epochs):
        count, asked = 0, time.perf_counter()
        for inputs, *_, labels in loader:
            if first_batch is None:
                first_batch = time.perf_counter() - asked
            loss = cross_entropy(network(inputs), labels % _CLASSES)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
            optimizer.step()
            count += len(labels)
        if count != num_samples:
            raise RuntimeError(f"the loader gave {count} samples, not {num_samples}.")
    assert first_batch is not None, "guaranteed by the number of samples"
    return {"first_batch_ms": 1e3 * first_batch}


if __name__ == "__main__":
    job = json.loads(sys.argv[2])
    plan, folder = ProgramPlan(**job["plan"]), Path(job["folder"])
    print(json.dumps(train(sys.argv[1], plan, folder, job["num_samples"])))
