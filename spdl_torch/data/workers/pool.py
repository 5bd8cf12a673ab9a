"""Pools of workers, as the loader's iterator sees them: in this process or in children."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..checkpoint.user_state import WorkerState
    from ..rng.keys import StreamKey
    from .jobs import Result
    from .stats import EpochStats, PoolStats


class Pool(Protocol):
    """Makes batches ahead of the trainer, in epochs. The trainer's thread calls its methods."""

    @property
    def stats(self) -> EpochStats:
        """The statistics of the epoch that runs or, between epochs, of the last one."""
        ...

    @property
    def num_taken(self) -> int:
        """The number of results of this epoch that ``get`` has returned."""
        ...

    def start(self, key: StreamKey, workers: Sequence[WorkerState] = (), *, first: int = 0) -> None:
        """Start the workers, and an epoch whose first job has the number ``first``."""
        ...

    def restart(
        self, key: StreamKey, workers: Sequence[WorkerState] = (), *, first: int = 0
    ) -> None:
        """Drop what is outstanding, and begin another epoch."""
        ...

    def submit(
        self, number: int, index: Any, worker: int, first: int, *, wants_state: bool = False
    ) -> None:
        """Give out the job of one batch; never blocks."""
        ...

    def get(self, timeout: float | None) -> Result:
        """Wait for the next result. Raises: TimeoutError; RuntimeError: the workers have ended."""
        ...

    @property
    def loss(self) -> BaseException | None:
        """The error for which no batch comes any more in this epoch; None = all is well."""
        ...

    def at_work(self, awaited: int | None) -> str:
        """Describe what each worker does now, for the message of a loop that waited too long."""
        ...

    def rest(self) -> None:
        """Keep the statistics of an epoch that is over; the workers stay for the next one."""
        ...

    @property
    def tuned(self) -> TunedPool | None:
        """The pool whose number of workers may be changed now; None = none, for the moment."""
        ...

    def request_stop(self) -> None:
        """End every wait. Never blocks; safe in a finalizer."""
        ...

    def stop(self) -> None:
        """Stop the workers, and wait a moment for their end."""
        ...


class SinglePool(Pool, Protocol):
    """A pool whose workers all live in one kind of place, threads or processes."""

    @property
    def stats(self) -> PoolStats:
        """The statistics of the epoch that runs or, between epochs, of the last one."""
        ...


class TunedPool(Protocol):
    """A pool of threads, or of processes of one worker each, whose number may change."""

    @property
    def stats(self) -> PoolStats:
        """The statistics of its epoch."""
        ...

    def resize(self, num_workers: int, max_outstanding: int) -> int:
        """Change the number of workers, and return the new number: the old one if it stays."""
        ...
