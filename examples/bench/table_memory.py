"""``memory``: photographs by ImageNet's recipe, and 20 epochs over a dataset of Python objects.

An object is a ``(path, label)``, as image folders have them. Accessing one writes its reference
count, so a forked worker ends up with a copy of its own of every page that it has accessed. Every
epoch accesses another 20th of the objects, in random order, with workers that live through all
epochs.

``ours, threads``: our ImageFolder, and objects with ``isolation="thread"``.
``ours, processes``: torchvision's ImageFolder, and objects that load in processes by default.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, RandomSampler

from .passes import measure_pass
from .peers import imported
from .processes import tree_bytes
from .recipe import as_it_is, photographs, recipe_loader
from .report import Goal, Metric
from .tables import Contender, Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from .recipe import Arrangement
    from .tables import BenchOptions

_EPOCHS = 20
_LOOKUPS = 2048
"""Objects in a batch; few enough for many batches, enough for the loaders' own cost to vanish."""
METRICS = (
    Metric("peak_mib", "peak MiB"),
    Metric("first_mib", "MiB, epoch 1"),
    Metric("last_mib", "MiB, epoch 20"),
    Metric("growth", "epoch 20 / epoch 1", 2),
    Metric("seconds", "all epochs, s", 1),
)


class Records:
    """``(path, label)`` for every sample, in a list, as ``ImageFolder.samples`` is."""

    def __init__(self, count: int) -> None:
        labels = list(range(1000))
        self.samples = [
            (f"train/n{n % 1000:08}/{n:08}.JPEG", labels[n % 1000]) for n in range(count)
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return labels and lengths of the paths: an object has to be accessed for them."""
        samples = self.samples
        return torch.tensor([(len(samples[n][0]), samples[n][1]) for n in indices])

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]


def measure(contender: Contender, settings: dict[str, Any]) -> dict[str, float]:
    """Measure photographs or objects; the parent looks at the memory meanwhile, too."""
    if contender.run is recipe_loader:
        return _photographs(contender, settings)
    return _objects(contender, settings)


def _photographs(contender: Contender, settings: dict[str, Any]) -> dict[str, float]:
    """Measure one epoch; memory is read with the last batch in hand, while its workers live."""
    loader = recipe_loader(
        settings["folder"],
        num_workers=settings["num_workers"],
        num_samples=settings["images"],
        **contender.arguments,
    )
    num_images = settings["images"]
    found = measure_pass(lambda: iter(loader), num_images, lambda batch: len(batch[0]))
    return {"seconds": num_images / found["end_to_end"], "at_end_mib": found["at_end_mib"]}


def _objects(contender: Contender, settings: dict[str, Any]) -> dict[str, float]:
    """Measure all epochs; memory is read with the last batch of each in hand."""
    torch.set_num_threads(1)
    count = settings["objects"]
    records, share = Records(count), count // _EPOCHS
    one_by_one = RandomSampler(records, replacement=True, num_samples=share)
    sampler = BatchSampler(one_by_one, min(_LOOKUPS, max(1, share // 4)), drop_last=False)
    loader = contender.run(records, sampler, settings["num_workers"], **contender.arguments)
    seen = []
    start = time.perf_counter()
    for _ in range(_EPOCHS):
        number = 0
        for number, _batch in enumerate(loader, 1):
            if number == len(sampler):  # workers that are processes still live
                seen.append(tree_bytes(os.getpid()) / 2**20)
        assert number == len(sampler), f"{number=} {len(sampler)=}"
    return {
        "peak_mib": max(seen),
        "first_mib": seen[0],
        "last_mib": seen[-1],
        "growth": seen[-1] / seen[0] if seen[0] else 1.0,
        "seconds": time.perf_counter() - start,
    }


def _loader_of_objects(
    dataset: Any, sampler: Any, num_workers: int, *, module: str, **options: Any
) -> Any:
    return imported(module).DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=as_it_is,
        persistent_workers=True,
        **options,
    )


def _prepare(options: BenchOptions, folder: Path) -> dict[str, Any]:
    count = 10_000_000 if options.full else 1_000_000
    return {
        **photographs(options, folder),
        "images": 64 if options.smoke else 2000,
        "objects": 20_000 if options.smoke else count,
    }


def _of_photographs(name: str, arrangement: Arrangement, *, smoke: bool = False) -> Contender:
    arguments = {"arrangement": arrangement}
    return Contender(f"photographs: {name}", recipe_loader, arguments=arguments, smoke=smoke)


def _of_objects(name: str, *, smoke: bool = False, **options: Any) -> Contender:
    module = "spdl_torch" if name.startswith("ours") else "torch.utils.data"
    arguments = {"module": module, **options}
    return Contender(f"objects: {name}", _loader_of_objects, arguments=arguments, smoke=smoke)


def _goals() -> Iterator[Goal]:
    for kind in ("photographs: ", "objects: "):
        goal = partial(Goal, "peak_mib")
        yield goal(f"{kind}ours, threads", f"{kind}torch, forked", at_most=1.0)
        yield goal(f"{kind}ours, processes", f"{kind}torch, forked", at_most=1.0)
        yield goal(f"{kind}ours, threads", f"{kind}torch, spawned", at_most=0.6)
    yield Goal("growth", "objects: ours, threads", at_most=1.05)
    yield Goal("growth", "objects: torch, forked")


TABLE = Table(
    name="memory",
    title="Memory of the process tree: photographs, and 20 epochs of Python objects",
    metrics=METRICS,
    contenders=(
        _of_photographs("ours, threads", "threads", smoke=True),
        _of_photographs("ours, processes", "processes"),
        _of_photographs("torch, forked", "fork"),
        _of_photographs("torch, spawned", "spawn"),
        _of_objects("ours, threads", isolation="thread", smoke=True),
        _of_objects("ours, processes"),
        _of_objects("torch, forked", multiprocessing_context="fork", smoke=True),
        _of_objects("torch, spawned", multiprocessing_context="spawn"),
    ),
    prepare=_prepare,
    measure=measure,
    goals=tuple(_goals()),
)
