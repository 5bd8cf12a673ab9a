"""How long training waits for its first batch: threads against worker processes.

A fresh process imports what a training script imports and builds its dataset and its loader; the
clock runs from ``iter(loader)`` until the first batch of 32 is in hand. The recipe is ImageNet's:
RandomResizedCrop(224), flip, ToTensor, Normalize.

- ours: ``spdl_torch.DataLoader`` over ``spdl_torch.ImageFolder``, 2 threads;
- torch's DataLoader over torchvision's ImageFolder, 2 worker processes, forked or spawned.

``set up`` is what building the dataset and the loader took, which is not in the first figure.

Goals: at most 0.6 of what forked workers take, and a 30th of what spawned ones take.

    python examples/benchmark_start.py [--data DIR] [--rounds N] [--json FILE] [--smoke]
"""

from __future__ import annotations

import gc
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.utils.data
from _bench import (
    Goal,
    Metric,
    Report,
    argument_parser,
    in_fresh_process,
    interleaved,
    jpegs,
    machine,
    photographs,
    run_program,
)

if TYPE_CHECKING:
    import argparse

BATCH = 32
WORKERS = 2
OURS = "ours, threads"
FORKED = "torch, forked"
SPAWNED = "torch, spawned"
METRICS = (
    Metric(key="first_batch_ms", heading="first batch, ms"),
    Metric(key="set_up_ms", heading="set up, ms"),
)


def main(options: argparse.Namespace) -> Report:
    """Measure the three, in fresh processes that take turns."""
    with photographs(options.data, 40 if options.smoke else 200) as folder:
        report = Report(
            title=f"Time to the first batch of {BATCH} photographs, {WORKERS} workers",
            metrics=METRICS,
            settings=machine(files=len(jpegs(folder)), rounds=options.rounds),
        )
        measure_one = partial(in_fresh_process, __file__, folder=str(folder))
        interleaved(
            report, (OURS, FORKED, SPAWNED), options.rounds, lambda row: measure_one(row=row)
        )
    goal = partial(Goal, metric="first_batch_ms", row=OURS)
    report.goals = [goal(over=FORKED, at_most=0.6), goal(over=SPAWNED, at_most=1 / 30)]
    return report


def measure(row: str, folder: str) -> dict[str, float]:
    """From ``iter()`` to the first batch, in this process, which has done nothing before."""
    import torchvision  # noqa: F401 - imports are not measured

    if row == OURS:
        from spdl_torch import DataLoader, ImageFolder  # noqa: F401 - imports are not measured
    before = time.perf_counter()
    loader = make_loader(row, folder)
    set_up = time.perf_counter() - before
    gc.collect()  # 100 ms after torch's imports, and else part of some rows' time by chance
    start = time.perf_counter()
    images, _ = next(iter(loader))
    seconds = time.perf_counter() - start
    assert images.shape == (BATCH, 3, 224, 224), images.shape
    return {"first_batch_ms": seconds * 1e3, "set_up_ms": set_up * 1e3}


def make_loader(row: str, folder: str, num_images: int | None = None) -> Any:
    """The loader of a training script; over ``num_images``, the folder's again and again."""
    from torchvision import datasets, transforms

    recipe = transforms.Compose(
        [
            transforms.RandomResizedCrop(224),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    loader_class, folder_class = torch.utils.data.DataLoader, datasets.ImageFolder
    options: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "num_workers": WORKERS}
    if row == OURS:
        from spdl_torch import DataLoader, ImageFolder

        loader_class, folder_class = DataLoader, ImageFolder
    else:
        options["multiprocessing_context"] = "fork" if row == FORKED else "spawn"
    dataset = folder_class(folder, recipe)
    if num_images is not None:
        indices = [index % len(dataset) for index in range(num_images)]
        dataset = torch.utils.data.Subset(dataset, indices)
    return loader_class(dataset, **options)


if __name__ == "__main__":
    run_program(main, argument_parser(__doc__, rounds=7), child=measure)
