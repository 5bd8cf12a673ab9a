"""One pass over the dataset: how its batches reach the loop, and what its workers know of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..fetching.bad_samples import record_bad
from .jobs import Failed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...engine.channel import Channel
    from ...engine.recorder import FlightRecorder
    from ...engine.rings import ConsumerRing
    from ..checkpoint.user_state import WorkerState
    from ..rng.keys import StreamKey
    from .jobs import Job, Result


class Epoch(NamedTuple):
    """The one outlet of a pass, whoever its workers are. Another pass gets new queues, so nothing
    stale can reach it."""

    results: Channel[Result]
    """The results of the workers."""
    outlet: Channel[Result]
    """The queue that the trainer takes from: ``results``, or that of batches on its device."""
    in_order: bool
    key: StreamKey
    workers: Sequence[WorkerState]
    """The state to which each worker's iterable advances before its first batch; () = map-style."""
    recorder: FlightRecorder
    consumer: ConsumerRing
    """The ring in which the trainer's waits are recorded."""

    def key_of(self, worker: int) -> StreamKey:
        """Return the worker's stream key. Workers with their own iterables number their items
        separately, as ranks do."""
        if not self.workers:
            return self.key
        return self.key._replace(num_replicas=len(self.workers), rank=worker)

    def deliver(self, result: Result) -> None:
        """Hand a result to the trainer. Never blocks: the queue has room for all outstanding
        jobs.
        """
        record(self.recorder, result)
        if self.in_order:
            self.results.put_at(result.number, result)
        else:
            self.results.put(result)

    def close(self) -> None:
        """End every wait for a batch."""
        self.consumer.end()
        self.results.close()
        self.outlet.close()


def record(recorder: FlightRecorder, result: Result) -> None:
    """Record what failed, before anybody has the result: then all of it is in the trace."""
    record_bad(recorder, result.number, result.tries)
    if isinstance(result, Failed):
        recorder.failed("worker", result.number, result.error)


# If a whole batch takes less than this, waking other threads costs more than they gain (a wake-up
# takes 10 to 50 µs, measured), so one thread makes the batch alone.
_SHARE_ABOVE_NS = 1_000_000


class Sharing:
    """How many workers share a job. Workers write the time of a sample, and the loop's thread reads
    it: a stale value costs a batch a little time."""

    def __init__(self, *, may_share: bool) -> None:
        self._may_share = may_share
        self.sample_ns = 0.0
        """The time of a sample in the last job; 0.0 = none was made yet."""

    def hands(self, index: Any, num_workers: int) -> int:
        """Return how many workers share a batch: all, or one if it is too small to share."""
        if not self._may_share or not isinstance(index, list | tuple):
            return 1
        if 0 < self.sample_ns * len(index) < _SHARE_ABOVE_NS:
            return 1
        return max(1, min(num_workers, len(index)))


class Shift(NamedTuple):
    """An epoch as the workers of one process have it: with their jobs."""

    epoch: Epoch
    jobs: tuple[Channel[Job], ...]
    """One queue for all workers, or one each where they take turns."""
    sharing: Sharing | None
    """How many workers share a job; None = each has its own jobs, or the process to itself."""

    def jobs_of(self, worker: int) -> Channel[Job]:
        """Return the queue from which a worker takes its jobs."""
        return self.jobs[worker % len(self.jobs)]

    def idle_ns(self) -> int:
        """Return the time that all workers together had no job."""
        return sum(jobs.counters().get_wait[0] for jobs in self.jobs)

    def close(self) -> None:
        """End the workers' waits for jobs."""
        for jobs in self.jobs:
            jobs.close()
