"""One pass over the dataset: its queues, and the readings that its figures start from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...observe.verdict.probes import ProbeCounters
    from ...pipeline.channel.channel import Channel
    from ...pipeline.recorder.flight_recorder import FlightRecorder
    from ...pipeline.recorder.rings import ConsumerRing
    from ...pipeline.stats.counters import TaskCounters
    from ..checkpoint.resume_state import WorkerState
    from ..rng.keys import StreamKey
    from .contention import Crowd
    from .jobs import Job, Result

__all__ = ["Epoch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """The queues of one pass. Another pass gets new ones, so nothing stale can reach it."""

    jobs: tuple[Channel[Job], ...]
    """One for all workers, or one each where they take turns."""
    results: Channel[Result]
    """What the workers made."""
    outlet: Channel[Result]
    """What the trainer takes: the results, or behind them what was sent to its device."""
    in_order: bool
    key: StreamKey
    workers: Sequence[WorkerState]
    """How far each worker's iterable is to go before its first batch; () = map-style."""
    fetch_before: TaskCounters
    collate_before: TaskCounters
    transfer_before: TaskCounters
    probes_before: ProbeCounters
    crowd: Crowd
    recorder: FlightRecorder
    consumer: ConsumerRing
    """The trainer's."""

    def key_of(self, worker: int) -> StreamKey:
        """Workers with iterables of their own count their items each for itself."""
        if not self.workers:
            return self.key
        return replace(self.key, num_replicas=len(self.workers), rank=worker)

    def jobs_of(self, worker: int) -> Channel[Job]:
        return self.jobs[worker % len(self.jobs)]

    def idle_ns(self) -> int:
        """For which all workers together had no job."""
        return sum(jobs.counters().get_wait[0] for jobs in self.jobs)

    def parked_ns(self) -> int:
        """For which all workers together left the work to one of them."""
        return self.crowd.parked.counters().get_wait[0]

    def deliver(self, result: Result) -> None:
        """Never blocks: the outstanding jobs are bounded by the room."""
        if self.in_order:
            self.results.put_at(result.number, result)
        else:
            self.results.put(result)

    def record_bad(self, result: Result) -> None:
        """Keep the moment of samples that failed and are left out."""
        for each in () if result.tries is None else result.tries.bad:
            self.recorder.failed("fetch", result.number, each.error)

    def close(self) -> None:
        """End every wait."""
        self.consumer.end()
        for jobs in self.jobs:
            jobs.close()
        self.crowd.parked.close()
        self.results.close()
        self.outlet.close()
