"""The jobs of an epoch: which worker has which, and what the loop has had of them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from .backends.jobs import Exhausted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .backends.jobs import Result
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
        self._given: dict[int, tuple[int, int]] = {}
        self._num_given = 0
        self.num_received = 0
        self.held: Result | None = None
        """What was received and not handed out: it waits here while the next jobs are given out, so
        that an error of the sampler, which comes first, does not cost the loop this batch."""

    @property
    def all_received(self) -> bool:
        """Whether no job is out."""
        return self.num_received == self._num_given

    def next_worker(self) -> int | None:
        """Return the worker that gets the next job; None = there is no room for another one.

        Where order does not matter, a worker with its full share of jobs is passed over:
        otherwise one that is stuck would in the end have every job.
        """
        if self._num_given - self.num_received >= self.max_outstanding:
            return None
        for worker in itertools.islice(self._turns, self._num_workers):
            if worker not in self._active:
                continue
            if not self._evenly or self._has_room(worker):
                return worker
        return None

    def _has_room(self, worker: int) -> bool:
        held = None if self.held is None else self.held.number  # this one is done
        jobs = sum(of == worker for number, (of, _) in self._given.items() if number != held)
        return jobs < max(1, self.max_outstanding // len(self._active))

    def give(self, worker: int, batch: int) -> int:
        """Return the number of a new job, for this batch in the sampler's order."""
        number = self._num_given
        self._given[number] = worker, batch
        self._num_given = number + 1
        return number

    def receive(self, result: Result) -> None:
        """Hold the result of a job."""
        self.held = result
        self.num_received += 1
        if type(result) is Exhausted:  # the worker's iterable
            self._active.discard(self._given[result.number][0])

    def release(self) -> Result | None:
        """Return the result that was held; None = there was none."""
        held, self.held = self.held, None
        return held

    def hand_out(self, number: int) -> tuple[int, int]:
        """Forget a job that the loop has had. Return its worker and its batch in the sampler's
        order."""
        return self._given.pop(number)
