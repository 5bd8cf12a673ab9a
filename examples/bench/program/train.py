"""The program: ``python examples/bench/program/train.py LOADER JSON`` trains a network and ends.

LOADER is the module of ``DataLoader``, the import that users change. JSON has the arguments of
``train``. It prints what it saw as JSON; how long it takes is measured from outside.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad

# Python puts this folder there; its files are part of a package two folders above.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from bench.program.plans import ProgramPlan

_PIXELS = 32
_FEATURES = 3 * _PIXELS * _PIXELS
_CLASSES = 10


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
    """Train; return milliseconds of the loader's import and of the wait for the first batch.

    Raises: RuntimeError: an epoch has another number of samples than asked for.
    """
    began = time.perf_counter()
    loader_class: Any = importlib.import_module(loader_module).DataLoader
    imported = time.perf_counter()
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
    return {"import_ms": 1e3 * (imported - began), "first_batch_ms": 1e3 * first_batch}


if __name__ == "__main__":
    job = json.loads(sys.argv[2])
    plan, folder = ProgramPlan(**job["plan"]), Path(job["folder"])
    print(json.dumps(train(sys.argv[1], plan, folder, job["num_samples"])))
