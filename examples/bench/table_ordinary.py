"""``ordinary``: datasets as people write them, torch's DataLoader and ours, one import changed.

A row is a dataset. A round of it is one process, in which both loaders make two epochs each without
workers and then with each number of them, and the second epoch counts. Where nothing is random, our
batches must equal torch's, bit by bit; otherwise the row fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .losses import add_mean, disturbance, least_ratio, losses
from .ordinary.catalogue import ORDINARY
from .report import Metric
from .tables import Contender, Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from .report import Report
    from .tables import BenchOptions


_WORKERS = (2, 4)
"""The numbers of workers besides 0, unless others are given."""
MEAN = "geometric mean"
"""The last row, over the datasets, a value each round."""


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


def measure(contender: Contender, settings: Mapping[str, Any]) -> dict[str, float]:
    """Measure one round of one dataset."""
    from .ordinary.passes import speeds  # imports torch, which the parent does not need

    return speeds(contender.arguments["ordinary"], settings)


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
    return lines + disturbance(report, datasets)


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


TABLES = (_table(),)
