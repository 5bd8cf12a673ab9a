"""``remote-s3``: an S3 server that responds late, read by our ``Reader`` in every loader's dataset.

Every sample is an object of 16 KB; moto's server, on this machine, responds after 50 to 150 ms,
which depends only on the object's number and is the same for every loader.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from .late_s3 import MEAN_SECONDS, late_s3, storage_options
from .loaders import Work, loader_contenders
from .loading import measure_loader
from .report import Goal
from .tables import LOADER_METRICS, Contender, Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..measuring.reporter import Reporter
    from .tables import BenchOptions

__all__ = ["TABLES", "Objects"]

_BATCH = 8
_IN_FLIGHT = 16
_NAMES = ("ours", "ours, threads", "ours, process", "torch, forked")


class Objects:
    """The objects of a :func:`late_s3`."""

    thread_safe = True

    def __init__(self, port: int, num_samples: int) -> None:
        from ..io import Reader

        self.num_samples = num_samples
        self._reader = Reader(storage_options=storage_options(port))

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        """Return uint8, shape (16384,)."""
        import torch

        content = bytearray(self._reader(f"s3://bucket/{index}"))
        return torch.frombuffer(content, dtype=torch.uint8)


@contextlib.contextmanager
def _prepare(options: BenchOptions) -> Iterator[dict[str, Any]]:
    workers = 2 if options.smoke else max(_IN_FLIGHT, options.num_workers)
    # Loaders begin two batches a worker: a pass that means something is many times as long.
    least = 2 if options.smoke else 6
    batches = max(round(workers / MEAN_SECONDS * options.seconds / _BATCH), least * workers)
    with late_s3(batches * _BATCH) as port:
        yield {
            "port": port,
            "num_workers": workers,
            "in_flight": workers,
            "batch_size": _BATCH,
            "num_samples": batches * _BATCH,
        }


def make_work(settings: dict[str, Any], num_samples: int) -> Work:
    """Return the server's objects, with as many workers as samples are to be in flight."""
    return Work(
        dataset=Objects(settings["port"], num_samples),
        num_samples=num_samples,
        batch_size=settings["batch_size"],
        num_workers=settings["num_workers"],
    )


def measure(contender: Contender, settings: dict[str, Any], reporter: Reporter) -> dict[str, float]:
    """Measure one pass over the store."""
    return measure_loader(contender, settings, reporter, make_work)


def _contender(one: Contender) -> Contender:
    needs = ("s3fs", "moto", "flask")
    return Contender(
        name=one.name, run=one.run, arguments=one.arguments, needs=needs, smoke=one.smoke
    )


_goal = partial(Goal, row="ours", over="torch, forked")
TABLES = {
    "remote-s3": Table(
        name="remote-s3",
        title=f"An S3 server that answers after 50 to 150 ms, {_IN_FLIGHT} workers, through Reader",
        metrics=LOADER_METRICS,
        contenders=tuple(_contender(one) for one in loader_contenders() if one.name in _NAMES),
        prepare=_prepare,
        measure=measure,
        peer="torch, forked",
        goals=tuple(
            _goal(metric=metric) for metric in ("per_second", "first_batch_ms", "peak_mib")
        ),
    )
}
