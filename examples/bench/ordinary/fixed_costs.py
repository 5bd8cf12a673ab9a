"""The cost of a loader without workers besides its dataset, fitted over batches of two sizes."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any

import torch.utils.data

import spdl_torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..reporter import Reporter


_SMALL, _LARGE = 8, 128
_BATCHES_PER_SECOND = 2000
_REPEATS = 5


class Constant(torch.utils.data.Dataset[int]):
    """Samples that cost nothing."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return 0


def fixed_costs(settings: Mapping[str, Any], reporter: Reporter) -> dict[str, float]:
    """Measure both loaders without workers, over numbers that torch's collate function joins.

    Returns: µs per batch and µs per sample, ``torch_batch_us`` to ``ours_sample_us``, and ours over
        torch's, ``batch_ratio`` and ``sample_ratio``.
    """
    batches = max(4, round(_BATCHES_PER_SECOND * settings["seconds"] / _REPEATS))
    loaders: dict[str, Any] = {
        "torch": torch.utils.data.DataLoader,
        "ours": spdl_torch.DataLoader,
    }
    torch.set_num_threads(1)
    reporter.phase("measuring", _REPEATS)
    seconds: dict[tuple[str, int], list[float]] = {}
    for repeat in range(_REPEATS):
        for size in (_SMALL, _LARGE):
            for name in sorted(loaders, reverse=repeat % 2 == 0):
                loader = loaders[name](Constant(size * (batches + 1)), batch_size=size)
                seconds.setdefault((name, size), []).append(_seconds_per_batch(loader, batches))
        reporter.done(repeat + 1)
    figures = {}
    for name in loaders:
        microseconds = {size: 1e6 * median(seconds[name, size]) for size in (_SMALL, _LARGE)}
        costs = cost_of_sizes(microseconds)
        figures[f"{name}_batch_us"], figures[f"{name}_sample_us"] = costs
    for part in ("batch", "sample"):
        figures[f"{part}_ratio"] = figures[f"ours_{part}_us"] / figures[f"torch_{part}_us"]
    return figures


def cost_of_sizes(costs: Mapping[int, float]) -> tuple[float, float]:
    """Return the costs of a batch and of a sample, from the costs of batches of two sizes."""
    (small, of_small), (large, of_large) = costs.items()
    sample = (of_large - of_small) / (large - small)
    return of_small - small * sample, sample


def _seconds_per_batch(loader: Any, batches: int) -> float:
    """Measure from the first batch in hand to the last, so without an epoch's one-time costs."""
    for _ in loader:  # what the loader learns in its first epoch
        pass
    iterator = iter(loader)
    next(iterator)
    start = time.perf_counter()
    for _ in iterator:
        pass
    return (time.perf_counter() - start) / batches
