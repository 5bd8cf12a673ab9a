"""One pass over the dataset: how its batches reach the loop, and what its workers know of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...named_tuples import NamedTuple
from ..fetching.bad_samples import record_bad
from .jobs import Failed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...engine.channel.channel import Channel
    from ...engine.recorder.flight_recorder import FlightRecorder
    from ...engine.recorder.rings import ConsumerRing
    from ..checkpoint.user_state import WorkerState
    from ..rng.keys import StreamKey
    from .contention import Contention
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

        What failed is recorded before: whoever has the batch finds all of it in the trace.
        """
        record_bad(self.recorder, result.number, result.tries)
        if isinstance(result, Failed):
            self.recorder.failed("worker", result.number, result.error)
        if self.in_order:
            self.results.put_at(result.number, result)
        else:
            self.results.put(result)

    def close(self) -> None:
        """End every wait for a batch."""
        self.consumer.end()
        self.results.close()
        self.outlet.close()


class Shift(NamedTuple):
    """An epoch as the workers of one process have it: with their jobs."""

    epoch: Epoch
    jobs: tuple[Channel[Job], ...]
    """One queue for all workers, or one each where they take turns."""
    contention: Contention | None
    """Who works while they contend for the GIL; None = each has its own jobs, or the process to
    itself."""

    def jobs_of(self, worker: int) -> Channel[Job]:
        """Return the queue from which a worker takes its jobs."""
        return self.jobs[worker % len(self.jobs)]

    def idle_ns(self) -> int:
        """Return the time that all workers together had no job."""
        return sum(jobs.counters().get_wait[0] for jobs in self.jobs)

    def parked_ns(self) -> int:
        """Return the time that all workers together left the work to one of them."""
        contention = self.contention
        return 0 if contention is None else contention.parked.counters().get_wait[0]

    @property
    def is_one_alone(self) -> bool:
        """Whether one of several workers does all the work."""
        return self.contention is not None and self.contention.alone is not None

    def close(self) -> None:
        """End the workers' waits for jobs."""
        for jobs in self.jobs:
            jobs.close()
        if self.contention is not None:
            self.contention.parked.close()
