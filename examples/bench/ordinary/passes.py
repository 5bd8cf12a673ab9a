"""Second epochs of torch's DataLoader and ours over one dataset, taking turns."""

from __future__ import annotations

import itertools
from functools import partial
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.data

import spdl_torch
from spdl_torch.loader.differences import path_of_difference

from ..passes import measure_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .catalogue import Ordinary

_AHEAD = 2
"""The batches that each worker of either loader is asked for at ``iter()``."""
_LEAST_BATCHES = 8
"""The fewest batches in an epoch for each worker. The first ``_AHEAD`` of each are made before the
clock runs, and further ones are half done when it starts; in a short epoch that would be much of
the work, and a share of it that varies by chance."""

_LOADERS = {"torch": torch.utils.data.DataLoader, "ours": spdl_torch.DataLoader}
"""The one import that users change."""


class DifferentBatches(AssertionError):
    """Our batches are not those of torch's loader."""


def speeds(ordinary: Ordinary, settings: Mapping[str, Any]) -> dict[str, float]:
    """Measure one round of one dataset.

    The batches are compared in the first round, before anything is timed. Which loader comes
    first changes with the round.

    Returns: samples a second, ``torch_0`` and ``ours_0`` without workers, ``torch_2`` and
        ``ours_2`` with 2, and so on; their ratios ``ratio_0``, ``ratio_2``.
    Raises: DifferentBatches: a batch differs from torch's.
    """
    # As in torch's workers. Without workers a second thread would take its share of small tensors
    # and, beside any other program, wait for its core: tenfold slower by chance.
    torch.set_num_threads(1)
    workers = (0, *settings["workers"])
    count = samples_of(ordinary, settings["seconds"], lcm(*settings["workers"]))
    # Each loader has a dataset of its own, whose handles have not been opened before.
    make = partial(ordinary.arguments, Path(settings["folder"]), count)
    if settings["round"] == 0 and not ordinary.is_random:
        for number in workers:
            check_batches(make, number)
    names = ["torch", "ours"] if settings["round"] % 2 == 0 else ["ours", "torch"]
    figures = {}
    for number in workers:
        for name in names:
            figures[f"{name}_{number}"] = _second_epoch(name, make(), number, count)
        figures[f"ratio_{number}"] = figures[f"ours_{number}"] / figures[f"torch_{number}"]
    return figures


def samples_of(ordinary: Ordinary, seconds: float, num_workers: int) -> int:
    """Return the samples of an epoch, in whole batches, equally many for each worker, and at least
    ``_LEAST_BATCHES``: workers that divide an iterable then have no partial batches.
    """
    share = ordinary.batch_size * num_workers
    return max(_LEAST_BATCHES, round(ordinary.per_second * seconds / share)) * share


def _second_epoch(name: str, arguments: Mapping[str, Any], num_workers: int, count: int) -> float:
    """Return samples a second, starting with the last batch that ``iter()`` requested in hand."""
    loader: Any = _LOADERS[name](**arguments, num_workers=num_workers)
    for _ in loader:
        pass
    batch_size = arguments["batch_size"]
    figures = measure_pass(
        lambda: iter(loader), count, lambda batch: batch_size, num_skipped=_AHEAD * num_workers
    )
    return figures["per_second"]


def check_batches(make: Callable[[], Mapping[str, Any]], num_workers: int) -> None:
    """Compare an epoch of both loaders, bit by bit; ``make`` returns the arguments of one.

    Raises: DifferentBatches: a batch differs; the message has the path to the difference in it.
    """
    expected, found = (_seeded_epoch(name, make(), num_workers) for name in ("torch", "ours"))
    for number, (theirs, ours) in enumerate(itertools.zip_longest(expected, found)):
        difference = path_of_difference(theirs, ours)
        if difference is not None:
            raise DifferentBatches(
                f"{num_workers} workers: batch {number} is not torch's; it differs{difference}"
            )


def _seeded_epoch(name: str, arguments: Mapping[str, Any], num_workers: int) -> Iterator[Any]:
    """Iterate in the same order for both: the sampler draws it before the first batch."""
    torch.manual_seed(0)
    batches = iter(_LOADERS[name](**arguments, num_workers=num_workers))
    yield next(batches)
    yield from batches
