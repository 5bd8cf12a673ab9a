"""``ordinary``: datasets as people write them, torch's DataLoader and ours, one import changed.

A row is a dataset. A round of it is one process, in which both loaders make two epochs each without
workers and then with each number of them, and the second epoch counts. Where nothing is random, our
batches must equal torch's, bit by bit; otherwise the row fails.
"""

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

from .losses import add_mean, least_ratio, losses
from .ordinary.catalogue import ORDINARY
from .passes import measure_pass
from .report import Metric
from .tables import Contender, Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .ordinary.catalogue import Ordinary
    from .report import Report
    from .tables import BenchOptions

_WORKERS = (2, 4)
"""The numbers of workers besides 0, unless others are given."""
MEAN = "geometric mean"
"""The last row, over the datasets, a value each round."""
_AHEAD = 2
"""The batches that each worker of either loader is asked for at ``iter()``."""
_LEAST_BATCHES = 8
"""The fewest batches in an epoch for each worker. The first ``_AHEAD`` of each are made before the
clock runs, and further ones are half done when it starts; in a short epoch that would be much of
the work, and a share of it that varies by chance."""

_LOADERS = {"torch": torch.utils.data.DataLoader, "ours": spdl_torch.DataLoader}
"""The one import that users change."""


def _pair(count: int) -> Iterator[Metric]:
    """Yield the columns for one number of workers."""
    yield Metric(f"torch_{count}", f"{_workers(count)}: torch, 1/s", has_spread=False)
    yield Metric(f"ours_{count}", "ours, 1/s", has_spread=False)
    yield Metric(f"ratio_{count}", "ours / torch", 2, loss_below=least_ratio(count))


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _prepare(options: BenchOptions, folder: Path) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "workers": options.workers,
        "seconds": 1e-3 if options.smoke else options.seconds,
    }


class DifferentBatches(AssertionError):
    """Our batches are not those of torch's loader."""


def measure(contender: Contender, settings: Mapping[str, Any]) -> dict[str, float]:
    """Measure one round of one dataset.

    The batches are compared in the first round, before anything is timed. Which loader comes
    first changes with the round.

    Returns: samples a second, ``torch_0`` and ``ours_0`` without workers, ``torch_2`` and
        ``ours_2`` with 2, and so on; their ratios ``ratio_0``, ``ratio_2``.
    Raises: DifferentBatches: a batch differs from torch's.
    """
    ordinary: Ordinary = contender.arguments["ordinary"]
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


def conclude(report: Report) -> list[str]:
    """Add the row of geometric means, each round's by itself; return a line for the losses, unless
    the run was too short to judge.
    """
    datasets = [row for row, series in report.rows.items() if "ratio_0" in series]
    ratios = [metric.key for metric in report.metrics if metric.key.startswith("ratio_")]
    add_mean(report, MEAN, datasets, ratios)
    if not report.shows_goals:
        return []
    lines = []
    for key in ratios:
        count = int(key.removeprefix("ratio_"))
        where = f"with {_workers(count)}"
        lines.append(losses(report, datasets, key, least_ratio(count), where))
    return lines


def _table(counts: tuple[int, ...] = _WORKERS) -> Table:
    """Return the table for these numbers of workers, besides 0."""
    return Table(
        name="ordinary",
        title="Datasets as people write them: ours over torch's DataLoader, second epoch",
        metrics=(*(metric for count in (0, *counts) for metric in _pair(count)),),
        contenders=tuple(
            Contender(
                one.name,
                measure,
                one.needs,
                {"ordinary": one},
                smoke=one.name in ("rows, arithmetic", "lines, iterable"),
            )
            for one in ORDINARY
        ),
        prepare=_prepare,
        measure=measure,
        conclude=conclude,
        seconds=(4.0 + 3.0 * len(counts), 4.0),
        is_strict=True,
        workers=_WORKERS,
        with_workers=_table,
    )


TABLE = _table()
