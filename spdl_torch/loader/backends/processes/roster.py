"""Which worker process gets which job."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ...checkpoint.order import Given
    from .hearing import Hearing
    from .worker_process import WorkerProcess


class Roster:
    """The processes by the number of the worker, and who of them gets the next job. The loop's
    thread alone uses it."""

    def __init__(self, hearing: Hearing, num_workers: int, *, has_turns: bool) -> None:
        """``has_turns``: each job belongs to one worker; else to the one with the fewest."""
        self._hearing = hearing  # which has the processes
        self.numbers = range(num_workers)
        """The numbers of those that do not leave."""
        self._has_turns = has_turns
        # Those that get no jobs while others can make them: those that replace killed ones, until
        # they are up, which takes seconds.
        self._spared: tuple[WorkerProcess, ...] = ()
        self._next = 0  # of the process whose turn it is among equals

    def put(self, *children: WorkerProcess) -> None:
        """Let processes be the workers of their numbers."""
        new = {child.number: child for child in children}
        self._hearing.children = {**self._hearing.children, **new}

    def submit(self, job: Given) -> Exception | None:
        """Send a job to the worker whose turn it is, or to the idlest one. Return what pickle
        raises; None = it is sent."""
        numbers = self.numbers_at_work() if self._spared else self.numbers
        if self._has_turns:
            return self._hearing.children[numbers[job.worker % len(numbers)]].submit(job)
        return self._idlest(numbers).submit(job)

    def replace(self, successor: WorkerProcess, jobs: Iterable[Given], *, late: bool) -> bool:
        """Put a successor in the place of a process that has ended, and give out its jobs anew;
        return whether others make them. ``late``: the successor takes seconds to start, in which
        the loop would wait for the first of them, so others make them if there are any.
        """
        self.put(successor)
        numbers: Sequence[int] = (successor.number,)
        if late:
            self._spared = (*self._spared, successor)
            numbers = self.numbers_at_work()
        for job in jobs:
            # Another process gets them after its own jobs: if one kills it, too, that one is first
            # again, and its second death is counted.
            self._idlest(numbers).submit(job)
        return successor.number not in numbers

    def begin_epoch(self, children: dict[int, WorkerProcess]) -> None:
        """Go on with these, all workers, in another epoch."""
        self._hearing.children = children
        self._spared = ()

    @property
    def leaving(self) -> list[WorkerProcess]:
        """The processes that get no more jobs."""
        return [child for n, child in self._hearing.children.items() if n not in self.numbers]

    def part(self) -> list[WorkerProcess]:
        """Strike off those that leave and have answered all their jobs; return them."""
        idle = [child for child in self.leaving if not child.jobs]
        if idle:
            children = self._hearing.children.items()
            self._hearing.children = {n: child for n, child in children if child not in idle}
        return idle

    def with_batch(self, number: int | None) -> list[WorkerProcess]:
        """Return the process that has the batch; all of them if any batch would do."""
        children = list(self._hearing.children.values())
        return [child for child in children if number in child.jobs] or children

    def _idlest(self, numbers: Sequence[int]) -> WorkerProcess:
        """Return the process with the fewest jobs; of equals, whose turn it is.

        Where the loop is slower than the processes, none has a job left. If the first one always
        got the next job, it would need shared memory for all the batches that wait.
        """
        count, children = len(numbers), self._hearing.children
        best = self._next % count
        child = children[numbers[best]]
        for step in range(1, count):  # by hand: min() with a key takes 5 µs
            at = (self._next + step) % count
            other = children[numbers[at]]
            if len(other.jobs) < len(child.jobs):
                child, best = other, at
        self._next = best + 1
        return child

    def numbers_at_work(self) -> Sequence[int]:
        """Return the numbers of the processes that are not spared; all if every one is."""
        self._spared = tuple(child for child in self._spared if not child.is_up)
        children = self._hearing.children
        return [n for n in self.numbers if children[n] not in self._spared] or self.numbers
