"""What the workers of an epoch get: jobs, and whose turn it is."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .backends.jobs import Result


class Given(NamedTuple):
    """A job, as it is given out."""

    number: int
    index: Any
    first: int
    """The position of its first sample in the epoch."""
    wants_state: bool
    """Whether an iterable that keeps a state is asked for it after this batch."""
    worker: int
    """The worker that gets it, where not any can make it."""

    @property
    def size(self) -> int:
        """The number of its samples."""
        return len(self.index) if isinstance(self.index, list | tuple) else 1


class Told(NamedTuple):
    """An error that the loop gets in place of no batch: the sampler's, or of a wait that took too
    long. The batches come at a later ``next()``."""

    error: Exception


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
