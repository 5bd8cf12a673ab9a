"""One pass over the dataset: its queues, and the readings from which its statistics start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...named_tuples import NamedTuple
from ..fetching.bad_samples import record_bad
from .budget import budget
from .jobs import Failed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...machine.probes import ProbeCounters
    from ...pipeline.channel.channel import Channel
    from ...pipeline.recorder.flight_recorder import FlightRecorder
    from ...pipeline.recorder.rings import ConsumerRing
    from ...pipeline.stats.counters import TaskCounters
    from ..checkpoint.user_state import WorkerState
    from ..rng.keys import StreamKey
    from .contention import Contention
    from .jobs import Job, Result


class Epoch(NamedTuple):
    """The queues of one pass. Another pass gets new ones, so nothing stale can reach it."""

    jobs: tuple[Channel[Job], ...]
    """One queue for all workers, or one each where they take turns."""
    results: Channel[Result]
    """The results of the workers."""
    outlet: Channel[Result]
    """The queue that the trainer takes from: ``results``, or that of batches on its device."""
    in_order: bool
    key: StreamKey
    workers: Sequence[WorkerState]
    """The state to which each worker's iterable advances before its first batch; () = map-style."""
    fetch_before: TaskCounters
    collate_before: TaskCounters
    transfer_before: TaskCounters
    probes_before: ProbeCounters
    contention: Contention
    recorder: FlightRecorder
    consumer: ConsumerRing
    """The ring in which the trainer's waits are recorded."""
    first: int = 0
    """The number of the first job; later ones follow without a gap."""

    def key_of(self, worker: int) -> StreamKey:
        """Return the worker's stream key. Workers with their own iterables number their items
        separately, as ranks do."""
        if not self.workers:
            return self.key
        return self.key._replace(num_replicas=len(self.workers), rank=worker)

    def jobs_of(self, worker: int) -> Channel[Job]:
        return self.jobs[worker % len(self.jobs)]

    def idle_ns(self) -> int:
        """Return the time that all workers together had no job."""
        return sum(jobs.counters().get_wait[0] for jobs in self.jobs)

    def parked_ns(self) -> int:
        """Return the time that all workers together left the work to one of them."""
        return self.contention.parked.counters().get_wait[0]

    def deliver(self, result: Result) -> None:
        """Hand a result to the trainer. Never blocks: the queue has room for all outstanding
        jobs.

        What failed is recorded before: whoever has the batch finds all of it in the trace.
        """
        record_bad(self.recorder, result.number, result.tries)
        if isinstance(result, Failed):
            self.recorder.failed("worker", result.number, result.error)
        if self.in_order:
            self.results.put_at(result.number - self.first, result)
        else:
            self.results.put(result)

    def close(self) -> None:
        """End every wait."""
        self.consumer.end()
        for jobs in self.jobs:
            jobs.close()
        self.contention.parked.close()
        self.results.close()
        self.outlet.close()
        budget.close(self.results)
