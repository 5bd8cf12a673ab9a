"""Whose turn it is among the workers of an epoch, and whether there is room for one more job."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backends.jobs import Result


class Dealing:
    """The jobs of an epoch as its workers get them, in turns, from ``first`` on.

    A worker whose iterable has ended loses its turn, as in torch, once it has said so.

    evenly: no worker has more than its share of ``max_outstanding`` jobs.
    """

    def __init__(
        self,
        num_workers: int,
        first: int,
        *,
        max_outstanding: int,
        evenly: bool,
    ) -> None:
        self._turns = deque([*range(first, num_workers), *range(first)])
        self._evenly = evenly
        self._jobs = [0] * num_workers  # that each of them has
        self.max_outstanding = max_outstanding
        """The most jobs that may be given out and not yet received; tuning may change it."""
        self.num_out = 0
        """The number of those jobs."""
        self.held: Result | None = None
        """What was received and not handed out: it waits here while the next jobs are given out, so
        that an error of the sampler, which comes first, does not cost the loop this batch."""

    def next_worker(self) -> int | None:
        """Return the worker that gets the next job; None = no one has room for another one.

        Where order does not matter, a worker with its full share of jobs is passed over:
        otherwise one that is stuck would in the end have every job.
        """
        turns = self._turns
        for _ in range(len(turns)):
            worker: int = turns[0]
            turns.rotate(-1)
            if not self._evenly or self._jobs[worker] < max(1, self.max_outstanding // len(turns)):
                return worker
        return None

    def give(self, worker: int) -> None:
        """Count a job that is given out."""
        self._jobs[worker] += 1
        self.num_out += 1

    def receive(self, worker: int, result: Result, *, is_last: bool) -> None:
        """Hold the result of a worker's job. ``is_last``: of its last one."""
        self.held = result
        self._jobs[worker] -= 1
        self.num_out -= 1
        if is_last and worker in self._turns:
            self._turns.remove(worker)
