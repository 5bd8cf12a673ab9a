"""A loader in every seat that its workers can have, for promises that hold in all of them.

``@in_every_seat`` gives a test ``seat``; ``seat.loader(dataset, ...)`` is our loader there, and
``seat.peer(dataset, ...)`` torch's own loader with as many workers. Options of the test win over
those of the seat.

Spawned workers differ from a fork server's in how they are started alone, and the seat belongs to
the long forms, but for tests that ask for it (``in_seats(*SEATS)``).
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess, SpawnContext
from typing import Any

import pytest

from spdl_torch import DataLoader
from support.covering import by_pairs
from support.loaders import torch_loader

NUM_WORKERS = 2


@dataclass(frozen=True, eq=False)
class Seat:
    """Where the workers are."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    are_threads: bool = False
    are_processes: bool = False

    @property
    def num_workers(self) -> int:
        return self.options["num_workers"]

    @property
    def pickles(self) -> bool:
        """Whether the dataset is pickled on its way to the workers."""
        return self.name in ("forkserver", "spawned")

    def loader(self, dataset: Any, *args: Any, **options: Any) -> DataLoader:
        """Return our loader in this seat. Without workers, options about workers are left out."""
        return DataLoader(dataset, *args, **_fitting({**self.options, **options}))

    def peer(self, dataset: Any, *args: Any, **options: Any) -> Any:
        """Return torch's loader with as many workers, forked where it can."""
        fork = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
        given = {"num_workers": self.num_workers, "multiprocessing_context": fork, **options}
        return torch_loader(dataset, *args, **_fitting(given))

    def __str__(self) -> str:
        return self.name


def _fitting(options: dict[str, Any]) -> dict[str, Any]:
    if options["num_workers"]:
        return options
    of_workers = ("persistent_workers", "prefetch_factor", "timeout", "multiprocessing_context")
    return {name: value for name, value in options.items() if name not in of_workers}


def _in_processes(method: Any) -> dict[str, Any]:
    return {"num_workers": NUM_WORKERS, "isolation": "process", "multiprocessing_context": method}


class _SpawnContext(SpawnContext):
    """``spawn`` by its name, whose children need not import torch: the fork server has it."""

    Process = ForkServerProcess


SPAWN = _SpawnContext()
_ON_THREADS = {"num_workers": NUM_WORKERS, "isolation": "thread"}

NONE = Seat("none", {"num_workers": 0})
THREADS = Seat("threads", _ON_THREADS, are_threads=True)
ONE = Seat("one thread", {**_ON_THREADS, "num_workers": 1}, are_threads=True)
"""For few tests: to an iterable no worker and one are alike."""
FORKED = Seat("forked", _in_processes("fork"), are_processes=True)
SERVED = Seat("forkserver", _in_processes("forkserver"), are_processes=True)
SPAWNED = Seat("spawned", _in_processes(SPAWN), are_processes=True)
SEATS = (NONE, THREADS, FORKED, SERVED, SPAWNED)
WITH_WORKERS = tuple(seat for seat in SEATS if seat is not NONE)


def in_seats(*seats: Seat) -> Any:
    """Parametrize a test by ``seat``, over these."""
    return pytest.mark.parametrize("seat", [pytest.param(seat, id=seat.name) for seat in seats])


def _params(seats: tuple[Seat, ...]) -> list[Any]:
    """The same, of which one is a long form."""
    long = [pytest.mark.long]
    return [pytest.param(s, id=s.name, marks=long if s is SPAWNED else []) for s in seats]


def in_every_seat_by_pairs(**values: Any) -> Any:
    """Like ``in_every_seat`` for a test of other parameters, too: every seat meets every value of
    each, and these meet each other. The whole table is a long form."""
    return by_pairs(seat=_params(SEATS), **values)


in_every_seat = pytest.mark.parametrize("seat", _params(SEATS))
with_workers = pytest.mark.parametrize("seat", _params(WITH_WORKERS))
