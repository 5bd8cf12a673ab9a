"""``small-images``: pictures of 32 x 32 in memory, flipped, as floats, in batches of 1024."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from .loaders import Work, loader_contenders
from .loading import measure_loader, samples_of
from .report import Goal
from .tables import TINY_METRICS, Contender, Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..measuring.reporter import Reporter
    from .tables import BenchOptions

__all__ = ["TABLES", "SmallImages"]

_BATCH = 1024
_PER_SECOND = 20_000
_PICTURES = 50_000


class SmallImages:
    """uint8 pictures in one array, as CIFAR comes; a sample is float32 (3, 32, 32) and a label."""

    def __init__(self, num_samples: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)
        count = min(num_samples, _PICTURES)
        self.num_samples = num_samples
        self.pictures = torch.randint(
            0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator
        )

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import torch

        place = index % len(self.pictures)
        picture = self.pictures[place]
        if torch.rand(()) < 0.5:
            picture = picture.flip(-1)
        return picture.float().div_(255), place % 10


def _size_of(batch: Any) -> int:
    return len(batch[0])


@contextlib.contextmanager
def _prepare(options: BenchOptions) -> Iterator[dict[str, Any]]:
    yield {
        "num_workers": options.num_workers,
        "batch_size": _BATCH,
        "num_samples": samples_of(options, _PER_SECOND, _BATCH),
    }


def make_work(settings: dict[str, Any], num_samples: int) -> Work:
    """Return the dataset, shuffled, as in training."""
    return Work(
        dataset=SmallImages(num_samples),
        num_samples=num_samples,
        batch_size=settings["batch_size"],
        num_workers=settings["num_workers"],
        size_of=_size_of,
        shuffle=True,
    )


def measure(contender: Contender, settings: dict[str, Any], reporter: Reporter) -> dict[str, float]:
    """Measure one pass; loaders that pass samples one by one get a tenth of them."""
    if contender.name.endswith("items"):
        share = max(4, settings["num_samples"] // 10 // _BATCH) * _BATCH
        settings = {**settings, "num_samples": min(share, settings["num_samples"])}
    return measure_loader(contender, settings, reporter, make_work)


_goal = partial(Goal, metric="per_second", row="ours")
TABLES = {
    "small-images": Table(
        name="small-images",
        title=f"Pictures of 32 x 32 in memory, random flip, to float32 batches of {_BATCH}",
        metrics=TINY_METRICS,
        contenders=loader_contenders(inline=True, smoke=False),
        prepare=_prepare,
        measure=measure,
        peer="torch, forked",
        goals=(_goal(over="torch, forked"), _goal(over="torch, 0 workers"), _goal(over="SPDL*")),
    )
}
