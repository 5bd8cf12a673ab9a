"""``memory``: photographs by ImageNet's recipe, and 20 epochs over a dataset of Python objects.

An object is a ``(path, label)``, as image folders have them. Accessing one writes its reference
count, so a forked worker ends up with a copy of its own of every page that it has accessed. Every
epoch accesses another 20th of the objects, in random order, with workers that live through all
epochs.

``ours, threads``: our ImageFolder, and objects with ``isolation="thread"``.
``ours, processes``: torchvision's ImageFolder, and objects that load in processes by default.
``ours, auto``: objects that say ``thread_safe = True``.
"""

from __future__ import annotations

import contextlib
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from .images import as_it_is, jpegs, photographs
from .loaders import our_loader
from .memory import tree_bytes
from .recipe import recipe_loader
from .report import Goal, Metric
from .tables import Contender, Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .recipe import Arrangement
    from .reporter import Reporter
    from .tables import BenchOptions

_EPOCHS = 20
_LOOKUPS = 2048
"""Objects in a batch; few enough for many batches, enough for the loaders' own cost to vanish."""
METRICS = (
    Metric(key="peak_mib", heading="peak MiB", higher_is_better=False),
    Metric(key="first_mib", heading="MiB, epoch 1", higher_is_better=False),
    Metric(key="last_mib", heading="MiB, epoch 20", higher_is_better=False),
    Metric(key="growth", heading="epoch 20 / epoch 1", digits=2, higher_is_better=False),
    Metric(key="seconds", heading="all epochs, s", digits=1, higher_is_better=False),
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
        import torch

        samples = self.samples
        return torch.tensor([(len(samples[n][0]), samples[n][1]) for n in indices])

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]


class SafeRecords(Records):
    """The same, declared thread-safe: nothing in it changes when it is read."""

    thread_safe = True


class _Share:
    """Batches of random indices: each pass another 20th of all, and no objects of its own."""

    def __init__(self, count: int, batch_size: int) -> None:
        self.count = count
        self.batch_size = batch_size
        self.epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        import torch

        generator = torch.Generator().manual_seed(self.epoch)
        share = torch.randint(0, self.count, (self.count // _EPOCHS,), generator=generator)
        self.epoch += 1
        for first in range(0, len(share), self.batch_size):
            yield share[first : first + self.batch_size].tolist()

    def __len__(self) -> int:
        return -(-(self.count // _EPOCHS) // self.batch_size)


def measure(contender: Contender, settings: dict[str, Any], reporter: Reporter) -> dict[str, float]:
    """Measure photographs or objects; the parent looks at the memory meanwhile, too."""
    if contender.run is recipe_loader:
        return _photographs(contender, settings, reporter)
    return _objects(contender, settings, reporter)


def _photographs(
    contender: Contender, settings: dict[str, Any], reporter: Reporter
) -> dict[str, float]:
    """Measure one epoch; memory is read with the last batch in hand, while its workers live."""
    loader = recipe_loader(
        settings["folder"],
        num_workers=settings["num_workers"],
        num_samples=settings["images"],
        **contender.arguments,
    )
    reporter.phase("the epoch", len(loader))
    start, at_end, seconds = time.perf_counter(), 0.0, 0.0
    for number, _ in enumerate(loader, 1):
        if number == len(loader):
            seconds = time.perf_counter() - start
            at_end = tree_bytes(os.getpid()) or 0.0
        reporter.done(number)
    return {"seconds": seconds, "at_end_mib": at_end / 2**20}


def _objects(
    contender: Contender, settings: dict[str, Any], reporter: Reporter
) -> dict[str, float]:
    """Measure all epochs; memory is read with the last batch of each in hand."""
    import torch

    torch.set_num_threads(1)
    count = settings["objects"]
    dataset = contender.arguments.get("dataset", Records)(count)
    sampler = _Share(count, min(_LOOKUPS, max(1, count // _EPOCHS // 4)))
    loader = contender.run(dataset, sampler, settings["num_workers"])
    reporter.phase("epochs", _EPOCHS)
    seen = []
    start = time.perf_counter()
    for epoch in range(_EPOCHS):
        number = 0
        for number, _ in enumerate(loader, 1):
            if number == len(sampler):  # workers that are processes still live
                seen.append((tree_bytes(os.getpid()) or 0.0) / 2**20)
        assert number == len(sampler), f"{number=} {len(sampler)=}"
        reporter.done(epoch + 1)
    return {
        "peak_mib": max(seen),
        "first_mib": seen[0],
        "last_mib": seen[-1],
        "growth": seen[-1] / seen[0] if seen[0] else 1.0,
        "seconds": time.perf_counter() - start,
    }


def _ours(dataset: Any, sampler: Any, num_workers: int, **options: Any) -> Any:
    return our_loader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=as_it_is,
        persistent_workers=True,
        **options,
    )


def _torch(dataset: Any, sampler: Any, num_workers: int, context: str) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=as_it_is,
        persistent_workers=True,
        multiprocessing_context=context,
    )


@contextlib.contextmanager
def _prepare(options: BenchOptions) -> Iterator[dict[str, Any]]:
    count = 10_000_000 if options.full else 1_000_000
    with photographs(options.data, 16 if options.smoke else 200) as folder:
        yield {
            "folder": str(folder),
            "files": len(jpegs(folder)),
            "images": 64 if options.smoke else 2000,
            "objects": 20_000 if options.smoke else count,
            "num_workers": options.num_workers,
        }


def _of_photographs(name: str, arrangement: Arrangement, *, smoke: bool = False) -> Contender:
    return Contender(
        name=_PHOTOGRAPHS + name,
        run=recipe_loader,
        arguments={"arrangement": arrangement},
        smoke=smoke,
    )


_PHOTOGRAPHS, _OBJECTS = "photographs: ", "objects: "
_OURS, _CHILDREN = "ours, threads", "ours, processes"
_FORKED, _SPAWNED = "torch, forked", "torch, spawned"
_goal = partial(Goal, metric="peak_mib")
TABLES = {
    "memory": Table(
        name="memory",
        title="Memory of the process tree: photographs, and 20 epochs of Python objects",
        metrics=METRICS,
        contenders=(
            _of_photographs(_OURS, "threads", smoke=True),
            _of_photographs(_CHILDREN, "processes"),
            _of_photographs(_FORKED, "fork"),
            _of_photographs(_SPAWNED, "spawn"),
            Contender(name=_OBJECTS + _OURS, run=partial(_ours, isolation="thread"), smoke=True),
            Contender(name=_OBJECTS + "ours, auto", run=_ours, arguments={"dataset": SafeRecords}),
            Contender(name=_OBJECTS + _CHILDREN, run=_ours),
            Contender(name=_OBJECTS + "ours, process", run=partial(_ours, isolation="process")),
            Contender(name=_OBJECTS + _FORKED, run=partial(_torch, context="fork"), smoke=True),
            Contender(name=_OBJECTS + _SPAWNED, run=partial(_torch, context="spawn")),
        ),
        prepare=_prepare,
        measure=measure,
        goals=(
            *(
                _goal(row=kind + row, over=kind + over, at_most=most)
                for kind in (_PHOTOGRAPHS, _OBJECTS)
                for row, over, most in (
                    (_OURS, _FORKED, 1.0),
                    (_CHILDREN, _FORKED, 1.0),
                    (_OURS, _SPAWNED, 0.6),
                )
            ),
            Goal(metric="growth", row=_OBJECTS + _OURS, at_most=1.05),
            Goal(metric="growth", row=_OBJECTS + _FORKED),
        ),
    )
}
