"""Which worker makes which batch of an epoch."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .checkpoint.user_state import WorkerState


class Dealing:
    """The jobs of an epoch as its workers get them, in turns, from ``first`` on.

    workers: where their iterables begin; as in torch, those that have ended lose their turn.
    evenly: no worker has more than its share of ``max_outstanding`` jobs.
    """

    def __init__(
        self,
        num_workers: int,
        workers: Sequence[WorkerState],
        first: int,
        *,
        max_outstanding: int,
        evenly: bool,
    ) -> None:
        numbers = range(num_workers)
        self._num_workers = num_workers
        self._turns: Iterator[int] = itertools.cycle([*numbers[first:], *numbers[:first]])
        self._active = {n for n in numbers if not workers or not workers[n].ended}
        self._evenly = evenly
        self.max_outstanding = max_outstanding
        """The most jobs that may be given out and not yet received; tuning may change it."""
        self.given: dict[int, tuple[int, int]] = {}
        """The worker of each job that the loop has not had yet, and the number of its batch in the
        sampler's order."""

    def next_worker(self, held: int | None) -> int | None:
        """Return the worker whose turn it is; None = nobody's. ``held``: the number of a job that
        is done, while the loop has not had its batch.

        Where order does not matter, a worker with its full share of jobs is passed over:
        otherwise one that is stuck would in the end have every job.
        """
        for worker in itertools.islice(self._turns, self._num_workers):
            if worker not in self._active:
                continue
            if not self._evenly or self._has_room(worker, held):
                return worker
        return None

    def _has_room(self, worker: int, held: int | None) -> bool:
        jobs = sum(of == worker for number, (of, _) in self.given.items() if number != held)
        return jobs < max(1, self.max_outstanding // len(self._active))

    def has_ended(self, number: int) -> None:
        """Note that the iterable of the worker has ended that had this job."""
        self._active.discard(self.given[number][0])
