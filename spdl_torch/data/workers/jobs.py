"""What passes between the trainer's thread and the workers: jobs out, results back."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...observe.verdict.probes import ProbeCounters
    from ...pipeline.channel.channel import Channel
    from ...pipeline.recorder.flight_recorder import FlightRecorder
    from ...pipeline.recorder.rings import ConsumerRing
    from ...pipeline.stats.counters import TaskCounters
    from ..checkpoint.resume_state import WorkerState
    from ..fetching.bad_samples import BadSample, Tries
    from ..rng.keys import StreamKey
    from .contention import Crowd

__all__ = ["Epoch", "Exhausted", "Failed", "Job", "Loaded", "NoBatch", "Result"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A batch."""

    number: int
    batch: Any
    progress: WorkerState | None = None
    """Of the worker's iterable, behind this batch; None = map-style."""
    tries: Tries | None = None
    """None = no sample may fail."""


@dataclass(frozen=True, slots=True)
class NoBatch:
    """None of the batch's samples was good."""

    number: int
    tries: Tries
    progress: WorkerState | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """What came instead of a batch: the user's own exception."""

    number: int
    error: BaseException
    progress: WorkerState | None = None
    tries: Tries | None = None


@dataclass(frozen=True, slots=True)
class Exhausted:
    """This worker's iterable has ended."""

    number: int
    progress: WorkerState | None = None
    tries: Tries | None = None


Result = Loaded | Failed | Exhausted | NoBatch


class Job:
    """One batch to make; if shared, also which of its samples are taken, done or failed."""

    __slots__ = (
        *("_done", "_next", "bad", "errors", "first", "first_error", "index", "number", "samples"),
        *("shared", "size", "wants_state"),
    )

    def __init__(
        self, number: int, index: Any, first: int, *, shared: bool, wants_state: bool = False
    ) -> None:
        self.number = number
        self.first = first  # the position of its first sample in the epoch
        self.index = index
        self.shared = shared
        self.wants_state = wants_state  # that of the worker's iterable is asked for after it
        self.size = len(index) if isinstance(index, list | tuple) else 1
        self.samples: list[Any] = [None] * len(index) if shared else []
        self.errors: dict[int, BaseException] = {}
        self.bad: list[BadSample] = []  # those that are tolerated
        self.first_error = len(index) if shared else 0
        self._next = itertools.count()  # a step is one C call, so it is atomic
        self._done = itertools.count(1)

    def take(self) -> int | None:
        """The position of a sample that nobody has taken yet."""
        position = next(self._next)
        return position if position < len(self.index) else None

    def finish_one(self) -> bool:
        """Count a sample as done; True for the last one."""
        return next(self._done) == len(self.index)


@dataclass(frozen=True, slots=True)
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
