"""``remote``: a store that responds late, so that the number of samples in flight is what counts.

Every sample is 16 KB, read by Python's own ``http.client`` from a web server on this machine that
responds after 10 to 30 ms, which depends only on the sample's number and is the same for every
loader. Each thread or process keeps its connection.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from .late_store import MEAN_SECONDS, OBJECT_BYTES, late_store
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
_connections = threading.local()


class LateStore:
    """The objects of a :func:`late_store`."""

    thread_safe = True

    def __init__(self, port: int, num_samples: int) -> None:
        self.port = port
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        """Return uint8, shape (16384,)."""
        import torch

        connection = _connection(self.port)
        connection.request("GET", f"/{index}")
        content = bytearray(OBJECT_BYTES)
        with connection.getresponse() as answer:
            answer.readinto(content)
        return torch.frombuffer(content, dtype=torch.uint8)


def _connection(port: int) -> http.client.HTTPConnection:
    """Return the connection of this thread, in this process."""
    owner = os.getpid(), port
    if getattr(_connections, "owner", None) != owner:
        _connections.owner = owner
        _connections.connection = _Connection("127.0.0.1", port)
    connection: http.client.HTTPConnection = _connections.connection
    return connection


class _Connection(http.client.HTTPConnection):
    """A connection that is closed with the thread that it belongs to."""

    def __del__(self) -> None:
        self.close()


@contextlib.contextmanager
def _prepare(options: BenchOptions) -> Iterator[dict[str, Any]]:
    workers = 2 if options.smoke else max(_IN_FLIGHT, options.num_workers)
    # Loaders begin two batches a worker: a pass must be many times as long.
    batches = max(round(workers / MEAN_SECONDS * options.seconds / _BATCH), 6 * workers)
    with late_store() as port:
        yield {
            "port": port,
            "num_workers": workers,
            "in_flight": workers,
            "batch_size": _BATCH,
            "num_samples": batches * _BATCH,
        }


def make_work(settings: dict[str, Any], num_samples: int) -> Work:
    """Return the store's objects, with as many workers as samples are to be in flight."""
    return Work(
        dataset=LateStore(settings["port"], num_samples),
        num_samples=num_samples,
        batch_size=settings["batch_size"],
        num_workers=settings["num_workers"],
    )


def measure(contender: Contender, settings: dict[str, Any], reporter: Reporter) -> dict[str, float]:
    """Measure one pass over the store."""
    return measure_loader(contender, settings, reporter, make_work)


_goal = partial(Goal, row="ours")
TABLES = {
    "remote": Table(
        name="remote",
        title=f"A web server that answers after 10 to 30 ms, {_IN_FLIGHT} workers",
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
