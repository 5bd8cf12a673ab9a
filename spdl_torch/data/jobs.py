"""What passes between the trainer's thread and the workers: jobs out, results back."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..observe.probes import ProbeCounters
    from ..pipeline.channel import Channel
    from ..pipeline.stats import TaskCounters

__all__ = ["Epoch", "Exhausted", "Failed", "Job", "Loaded", "Result"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A batch."""

    number: int
    batch: Any


@dataclass(frozen=True, slots=True)
class Failed:
    """What came instead of a batch: the user's own exception."""

    number: int
    error: BaseException


@dataclass(frozen=True, slots=True)
class Exhausted:
    """This worker's iterable has ended."""

    number: int


Result = Loaded | Failed | Exhausted


class Job:
    """One batch to make; if shared, also which of its samples are taken, done or failed."""

    __slots__ = ("_done", "_next", "errors", "first_error", "index", "number", "samples", "shared")

    def __init__(self, number: int, index: Any, *, shared: bool) -> None:
        self.number = number
        self.index = index
        self.shared = shared
        self.samples: list[Any] = [None] * len(index) if shared else []
        self.errors: dict[int, BaseException] = {}
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
    """One for all workers, or one each where every worker has an iterable of its own."""
    results: Channel[Result]
    """What the workers made."""
    outlet: Channel[Result]
    """What the trainer takes: the results, or behind them what was sent to its device."""
    in_order: bool
    seed: int
    fetch_before: TaskCounters
    collate_before: TaskCounters
    transfer_before: TaskCounters
    probes_before: ProbeCounters

    def jobs_of(self, worker: int) -> Channel[Job]:
        return self.jobs[worker % len(self.jobs)]

    def deliver(self, result: Result) -> None:
        """Never blocks: the outstanding jobs are bounded by the room."""
        if self.in_order:
            self.results.put_at(result.number, result)
        else:
            self.results.put(result)

    def close(self) -> None:
        for jobs in self.jobs:
            jobs.close()
        self.results.close()
        self.outlet.close()
