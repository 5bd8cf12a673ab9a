"""``remote``: a store that answers late, so that samples in flight are what counts.

Every sample waits 10 to 30 ms (the same for every loader, by its number) and is 16 KB. The wait is
a sleep: it holds no core and no GIL, as a socket does not.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from .loaders import Work, loader_contenders
from .loading import measure_loader
from .report import Goal
from .tables import LOADER_METRICS, Contender, Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..measuring.reporter import Reporter
    from .tables import BenchOptions

__all__ = ["TABLES", "LateStore"]

_BATCH = 8
_IN_FLIGHT = 16
_MEAN_SECONDS = 0.02
_BYTES = 16 << 10


class LateStore:
    """Objects of 16 KB behind a wait of 10 to 30 ms."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        """uint8, shape (16384,)."""
        import torch

        share = index * 2654435761 % 1024 / 1023  # spread evenly, in no order
        time.sleep(_MEAN_SECONDS * (0.5 + share))
        return torch.full((_BYTES,), index % 256, dtype=torch.uint8)


@contextlib.contextmanager
def _prepare(options: BenchOptions) -> Iterator[dict[str, Any]]:
    workers = 2 if options.smoke else max(_IN_FLIGHT, options.num_workers)
    # Loaders begin two batches a worker: a pass must be many times as long.
    batches = max(round(workers / _MEAN_SECONDS * options.seconds / _BATCH), 6 * workers)
    yield {
        "num_workers": workers,
        "in_flight": workers,
        "batch_size": _BATCH,
        "num_samples": batches * _BATCH,
    }


def make_work(settings: dict[str, Any], num_samples: int) -> Work:
    """As many workers as samples shall be in flight."""
    return Work(
        dataset=LateStore(num_samples),
        num_samples=num_samples,
        batch_size=settings["batch_size"],
        num_workers=settings["num_workers"],
    )


def measure(contender: Contender, settings: dict[str, Any], reporter: Reporter) -> dict[str, float]:
    """One pass over the store."""
    return measure_loader(contender, settings, reporter, make_work)


_goal = partial(Goal, row="ours, threads")
TABLES = {
    "remote": Table(
        name="remote",
        title=f"A store that answers after 10 to 30 ms, {_IN_FLIGHT} workers",
        metrics=LOADER_METRICS,
        contenders=loader_contenders(
            spawned=False, smoke=False
        ),  # 16 of them take 5 GB and a minute
        prepare=_prepare,
        measure=measure,
        peer="torch, forked",
        goals=(
            _goal(metric="per_second", over="torch, forked"),
            _goal(metric="per_second", over="SPDL*"),
            _goal(metric="first_batch_ms", over="torch, forked"),
            _goal(metric="peak_mib", over="torch, forked"),
        ),
    )
}
